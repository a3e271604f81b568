"""The outcome of one choice: the value that the call, `explain()`, errors, warnings, the log and tests all read."""

from collections.abc import Iterable
from dataclasses import dataclass

from kernelmux.capabilities import Device, Kernel, Reason, Request
from kernelmux.policies import Rule


@dataclass(frozen=True, slots=True)
class Verdict:
    """One candidate: able when it has no reasons. `held`: able, but not chosen by itself for the time being."""

    kernel: Kernel
    reasons: tuple[Reason, ...] = ()
    held: Reason | None = None

    @property
    def able(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        if self.able:
            return f"{self.kernel.id}: able" + (f", held back: {self.held}" if self.held else "")
        return f"{self.kernel.id}: " + "; ".join(map(str, self.reasons))


@dataclass(frozen=True, slots=True)
class Decision:
    """Which kernel serves a request on a device, who said so, and a verdict on every candidate.

    `source` is one of: argument, context, an environment variable's name, user policy, packaged rule, default.
    `ranked` lists the kernels that would be tried, the chosen one first.
    """

    request: Request
    device: Device
    kernel: Kernel
    source: str
    rule: Rule | None
    verdicts: tuple[Verdict, ...]
    ranked: tuple[Kernel, ...]
    notes: tuple[str, ...] = ()

    @property
    def automatic(self) -> bool:
        """Nobody asked for this kernel by name."""
        return self.source == "default" or (self.rule is not None and self.source == self.rule.source)

    @property
    def why(self) -> str:
        """One line: who chose, and why."""
        if self.rule is not None and self.automatic and self.source != "default":
            return f"{self.source} {self.rule.name}: {self.rule.why}"
        if self.kernel.backend == "reference":
            return (
                f"{self.source}: no other kernel is able" if len(self.verdicts) > 1 else f"{self.source}: the only one"
            )
        return f"{self.source}: able" if self.source == "default" else self.source

    def __str__(self) -> str:
        lines = [
            f"request  {self.request}",
            f"device   {self.device}",
            f"chosen   {self.kernel.id}",
            f"because  {self.why}",
        ]
        if self.rule is not None and self.rule.evidence:
            lines.append("evidence " + ", ".join(f"{k}: {v}" for k, v in self.rule.evidence.items()))
        lines += [f"note     {note}" for note in self.notes]
        lines.append("candidates")
        lines += [f"  {verdict}" for verdict in by_gravity(self.verdicts, self.ranked)]
        return "\n".join(lines)


def by_gravity(verdicts: Iterable[Verdict], ranked: Iterable[Kernel] = ()) -> list[Verdict]:
    """Able ones first in their rank, then the refused, broken packages before mismatches of shape."""
    place = {kernel.id: i for i, kernel in enumerate(ranked)}
    return sorted(
        verdicts,
        key=lambda v: (bool(v.reasons), place.get(v.kernel.id, 999), [r.rank for r in v.reasons[:1]], v.kernel.id),
    )
