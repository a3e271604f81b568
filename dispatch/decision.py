"""The outcome of one choice: the value that the call, `explain()`, errors, warnings, the log and tests all read."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeGuard

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
        return self.source == "default" or self._by_rule(self.rule)

    @property
    def why(self) -> str:
        """One line: who chose, and why; and what the rule prefers to this kernel, if it could not have it."""
        if self._by_rule(self.rule):
            preferred = "".join(f"; {text}" for text in self._preferred(self.rule))
            return f"{self.source} {self.rule.name}: {self.rule.why}{preferred}"
        if self.kernel.backend == "reference":
            return (
                f"{self.source}: no other kernel is able" if len(self.verdicts) > 1 else f"{self.source}: the only one"
            )
        return f"{self.source}: able" if self.source == "default" else self.source

    def _by_rule(self, rule: Rule | None) -> TypeGuard[Rule]:
        return rule is not None and self.source == rule.source

    def _preferred(self, rule: Rule) -> Iterator[str]:
        for name in takewhile(lambda n: not named(self.kernel, n), rule.order):
            verdicts = [v for v in self.verdicts if named(v.kernel, name)]
            nearest = min(verdicts, key=lambda v: len(v.reasons), default=None)
            if nearest is not None:
                yield f"{name} is held back: {nearest.held}" if nearest.able else f"not {nearest}"

    def __str__(self) -> str:
        lines = [
            f"request  {self.request}",
            f"device   {self.device}",
            f"chosen   {self.kernel.id}",
            f"because  {self.why}",
        ]
        if self._by_rule(self.rule) and self.rule.evidence:
            lines.append("evidence " + ", ".join(f"{k}: {v}" for k, v in self.rule.evidence.items()))
        lines += [f"note     {note}" for note in self.notes]
        lines.append("candidates")
        lines += [f"  {verdict}" for verdict in by_gravity(self.verdicts, self.ranked)]
        return "\n".join(lines)


def named(kernel: Kernel, name: str) -> bool:
    """A name is a backend's or a kernel's."""
    return name in (kernel.backend, kernel.id)


def by_gravity(verdicts: Iterable[Verdict], ranked: Iterable[Kernel] = ()) -> list[Verdict]:
    """Able ones first in their rank, then the refused, broken packages before mismatches of shape."""
    place = {kernel.id: i for i, kernel in enumerate(ranked)}
    return sorted(
        verdicts,
        key=lambda v: (bool(v.reasons), place.get(v.kernel.id, 999), [r.rank for r in v.reasons[:1]], v.kernel.id),
    )
