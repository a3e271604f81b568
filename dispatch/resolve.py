"""The pure choice of a kernel: the same inputs give the same Decision, also for a GPU that is not there."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kernelmux.capabilities import Device, Kernel, NoKernelError, Reason, Request
from kernelmux.dispatch.decision import Decision, Verdict, by_gravity, named
from kernelmux.dispatch.settings import Choice, Settings
from kernelmux.policies import Rule


class Probe(Protocol):
    """What is known of the installation."""

    def problem(self, backend: str) -> Reason | None: ...

    def warm(self, kernel: Kernel, request: Request) -> bool: ...


@dataclass(frozen=True, slots=True)
class AllInstalled:
    """A probe that takes every library as installed and built: for other machines' GPUs and golden tables."""

    def problem(self, backend: str) -> Reason | None:
        return None

    def warm(self, kernel: Kernel, request: Request) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Candidates:
    """The kernels of one op and its reference."""

    kernels: Sequence[Kernel]
    reference: Kernel


@dataclass(slots=True)
class _Ranking:
    able: dict[str, Kernel]
    ranked: list[Kernel] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def add(self, kernels: Iterable[Kernel], source: str) -> None:
        for kernel in kernels:
            if kernel.id in self.able and kernel not in self.ranked:
                self.ranked.append(kernel)
                self.sources.append(source)


def resolve(
    request: Request,
    device: Device,
    candidates: Candidates,
    rules: Sequence[Rule],
    settings: Settings,
    probe: Probe,
    choices: Sequence[Choice] = (),
    refused: Mapping[str, Reason] | None = None,
) -> Decision:
    """Choose a kernel. `choices` are the argument's and the contexts', strongest first; the environment follows.

    Raises NoKernelError when a binding choice cannot be met, or when nothing is able.
    """
    here = [*candidates.kernels, candidates.reference]
    names = {k.backend for k in here} | {k.id for k in here}
    asked = [c for c in [*choices, *environment(settings, request)] if _applies(c, names)]
    verdicts = tuple(_verdict(k, request, device, settings, probe, asked, refused or {}) for k in here)
    ranking = _Ranking({v.kernel.id: v.kernel for v in verdicts if v.able})
    rule = None
    for choice in asked:
        ranking.add((v.kernel for n in choice.names for v in verdicts if named(v.kernel, n)), choice.source)
        if choice.names and not choice.auto:
            if not ranking.ranked:
                raise NoKernelError(_nothing(request, device, verdicts, f"{choice.source} asks for it by name"))
            break
    else:
        rule = _automatic(ranking, request, device, rules, verdicts, candidates.reference)
    if not ranking.ranked:
        raise NoKernelError(_nothing(request, device, verdicts, ""))
    notes = [f"{c.source} does not bind {request.op}: {', '.join(c.names)} declare no kernel for it"
             for c in environment(settings, request) if c.names and c not in asked]  # fmt: skip
    return Decision(
        request, device, ranking.ranked[0], ranking.sources[0], rule, verdicts, tuple(ranking.ranked), tuple(notes)
    )


def _automatic(
    ranking: _Ranking,
    request: Request,
    device: Device,
    rules: Sequence[Rule],
    verdicts: Sequence[Verdict],
    reference: Kernel,
) -> Rule | None:
    """Rank by the first rule that matches, then the unlisted by id, then the reference."""
    free = [v.kernel for v in verdicts if v.able and not v.held]
    rule = next((r for r in rules if r.matches(request, device)), None)
    if rule is not None:
        ranking.add((k for n in rule.order for k in free if named(k, n)), rule.source)
    ranking.add((k for k in free if k is not reference), "default")
    ranking.add([reference], "default")
    return rule


def environment(settings: Settings, request: Request) -> list[Choice]:
    """The environment's choices for a request: the narrowest variable that is set, and what broader ones exclude."""
    scopes = [f"{request.family}_{request.phase}"] if request.phase else []
    scopes += [f"{request.family}_{request.op}", request.family, ""]
    found = [settings.backends[scope] for scope in scopes if scope in settings.backends]
    return found[:1] + [Choice(never=c.never, source=c.source) for c in found[1:] if c.never]


def _applies(choice: Choice, names: set[str]) -> bool:
    """A choice of several ops binds those for which a named backend declares a kernel; one of a single op always."""
    return choice.exact or not choice.names or not names.isdisjoint(choice.names)


def _verdict(
    kernel: Kernel,
    request: Request,
    device: Device,
    settings: Settings,
    probe: Probe,
    asked: Sequence[Choice],
    refused: Mapping[str, Reason],
) -> Verdict:
    reasons = []
    if kernel.backend != "reference":
        if problem := probe.problem(kernel.backend):
            reasons.append(problem)
        reasons += kernel.support.reasons(request, device)
    reasons += _disabled(kernel, settings, asked)
    if "cuda_graph" in request.features and not kernel.graph_safe:
        reasons.append(Reason("feature", "cuda_graph", None, "this kernel synchronises with the host"))
    if request.grad and kernel.backend == "reference" and "grad" not in kernel.support.features:
        reasons.append(Reason("feature", "grad", None, "an in-place op has no gradient", "call it under no_grad()"))
    asked_for = any(named(kernel, n) for c in asked for n in c.names)
    if settings.strict and kernel.backend == "reference" and device.type == "cuda" and not asked_for:
        reasons.append(Reason("disabled", "KERNELMUX_STRICT=1", None, "the reference is slow on CUDA tensors"))
    if kernel.id in refused:
        reasons.append(refused[kernel.id])
    held = None
    wanting = not reasons and kernel.slow_build and "cuda_graph" not in request.features
    if wanting and not probe.warm(kernel, request):
        held = Reason("toolchain", "its graph for these shapes is not built yet", fix="it is built on explicit request")
    return Verdict(kernel, tuple(sorted(reasons, key=lambda r: r.rank)), held)


def _disabled(kernel: Kernel, settings: Settings, asked: Sequence[Choice]) -> Iterable[Reason]:
    for choice in asked:  # the strongest that speaks of this kernel decides
        if any(named(kernel, n) for n in choice.names):
            break
        if any(named(kernel, n) for n in choice.never):
            yield Reason("disabled", f"{kernel.backend} is excluded by {choice.source}")
            break
    for name in ("deterministic", "batch_invariant"):
        if getattr(settings, name) and not getattr(kernel, name):
            yield Reason("disabled", f"KERNELMUX_{name.upper()}=1", None, f"this kernel is not declared {name}")
    if settings.no_compile and kernel.compiles:
        yield Reason("disabled", "KERNELMUX_NO_COMPILE=1", None, "this kernel compiles at its first call")


def _nothing(request: Request, device: Device, verdicts: Sequence[Verdict], why: str) -> str:
    able = [v.kernel.id for v in verdicts if v.able]
    head = f"no kernel for {request} on {device}" + (f" ({why})" if why else "")
    lines = [head, *(f"  {v}" for v in by_gravity(verdicts) if not v.able or v.held)]
    return "\n".join([*lines, f"would work: {', '.join(able) if able else 'nothing on this machine'}"])
