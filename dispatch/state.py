"""What decisions depend on beside the call: settings, rules, the context, and whether calls are counted."""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from kernelmux.capabilities import Kernel, Reason, Request, RuleError, SettingError
from kernelmux.capabilities.kernel import load as load_target
from kernelmux.dispatch import registry
from kernelmux.dispatch import settings as environment
from kernelmux.dispatch.settings import Choice, Settings
from kernelmux.policies import Rule
from kernelmux.policies import load as load_rules
from kernelmux.policies import packaged as packaged_rules

if TYPE_CHECKING:
    from kernelmux.dispatch.op import Op

OPS: dict[str, "Op"] = {}
lock = threading.RLock()


class Preference:
    """What `prefer()` set, the innermost first. One object per value, compared by identity: cheap in a key."""

    __slots__ = ("scoped",)

    def __init__(self, scoped: tuple[tuple[str, Choice], ...]) -> None:
        self.scoped = scoped


@lru_cache(maxsize=1024)
def _preference(scoped: tuple[tuple[str, Choice], ...]) -> Preference:
    return Preference(scoped)


PREFER: ContextVar[Preference | None] = ContextVar("kernelmux_prefer", default=None)


@contextlib.contextmanager
def prefer(*names: str, scope: str = "") -> Iterator[None]:
    """Prefer backends inside a `with` block, with the grammar of the environment variables.

    Args:
        names: backends or kernel ids in order; end with "auto" to allow the others; "!name" excludes one.
        scope: a family, family_op or family_phase such as "attention_decode"; "" for every op that a named backend
            declares a kernel for.

    Raises:
        SettingError: for a name or scope that does not exist.

    >>> import torch, kernelmux
    >>> with kernelmux.prefer("reference", scope="norm"):
    ...     kernelmux.rmsnorm(torch.ones(2, 4), torch.ones(4)).shape
    torch.Size([2, 4])
    """
    if scope and scope not in scopes():
        raise SettingError(f"prefer() scope is {scope!r}, one of {', '.join(sorted(scopes()))}")
    choice = environment.parse_choice(",".join(names), backend_names(), "context", exact="_" in scope)
    outer = PREFER.get()
    token = PREFER.set(_preference(((scope, choice), *(outer.scoped if outer else ()))))
    try:
        yield
    finally:
        PREFER.reset(token)


def scopes() -> set[str]:
    """Every scope that a choice can be narrowed to: families, family_op and family_phase."""
    found = set()
    for op in OPS.values():
        found |= {op.family, f"{op.family}_{op.name}", *(f"{op.family}_{p}" for p in op.phases)}
    return found


def backend_names() -> list[str]:
    """What may be asked for: backends, the reference, and kernel ids."""
    ids = [k.id for b in registry.backends().values() for k in b.kernels] + [op.reference.id for op in OPS.values()]
    return [*registry.backends(), registry.REFERENCE, *ids]


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The environment's settings, read at first use."""
    return environment.read(backend_names(), scopes())


@lru_cache(maxsize=1)
def rules() -> tuple[Rule, ...]:
    """The user's rules, then the packaged ones."""
    policy = settings().policy
    found = (*(load_rules(policy, "user policy") if policy else ()), *packaged_rules())
    known = set(backend_names())
    for rule in found:
        _check_names(rule, [rule.op], set(OPS), "op")
        _check_names(rule, rule.order, known, "order")
        op = OPS[rule.op]
        _check_names(rule, [rule.phase] if rule.phase else [], set(op.phases), "phase")
        _check_names(rule, rule.when, set(op.dims), "when")
        _check_names(rule, rule.dtypes, set(op.roles), "dtypes")
        _check_names(rule, rule.features, set(op.features), "features")
        _check_names(rule, rule.without, set(op.features), "without")
    return found


def _check_names(rule: Rule, given: Iterable[str], known: set[str], key: str) -> None:
    for name in given:
        if name not in known:
            text = ", ".join(sorted(known))
            raise RuleError(
                f"{rule.source} {rule.name!r}: key {key!r} names {name!r}, which is not known; known: {text}"
            )


def reload() -> None:
    """Read the environment, policies and backends again, and forget every decision.

    A wrapper chooses again at its next run(); one for CUDA graphs keeps the kernels that graphs may hold.
    """
    with lock:
        settings.cache_clear()
        rules.cache_clear()
        for op in OPS.values():
            op.reset()


class Installed:
    """The probe of this machine."""

    def problem(self, backend: str) -> Reason | None:
        return registry.backends()[backend].problem()

    def warm(self, kernel: Kernel, request: Request) -> bool:
        try:
            return bool(load_target(kernel.slow_build)(request))
        except Exception:  # then it cannot be known, and an eager call must not find out the slow way
            return False


INSTALLED = Installed()


@dataclass(slots=True)
class Use:
    """Calls of one op that one kernel served, counted while `track()` is on."""

    op: str
    phase: str
    kernel: str
    source: str
    why: str
    calls: int = 0


uses: dict[tuple[str, str, str], Use] = {}
_counting = threading.Event()


@contextlib.contextmanager
def track() -> Iterator[None]:
    """Count calls per op and kernel inside the block; `usage()` gives the counts. Decisions are made afresh.

    Replays of CUDA graphs are no calls, and a wrapper for CUDA graphs counts when it was made inside the block.
    """
    global uses
    uses = {}
    _counting.set()
    reload()
    try:
        yield
    finally:
        _counting.clear()
        reload()


def counting() -> bool:
    return _counting.is_set()


def usage() -> list[Use]:
    """What `track()` counted, last block."""
    return sorted((use for use in uses.values() if use.calls), key=lambda u: (u.op, u.phase, u.kernel))
