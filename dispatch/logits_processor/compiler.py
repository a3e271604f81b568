"""Checking a list of operators, and replacing runs of them by fused ones with the same distribution."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from kernelmux.dispatch.logits_processor.operators import (
    Op,
    ParameterizedOp,
    RenormMinP,
    RenormTopK,
    RenormTopP,
    SampleMinP,
    SampleProbs,
    SampleTopK,
    SampleTopKTopP,
    SampleTopP,
    ScaleLogits,
    TemperatureSoftmax,
    ToProbs,
)
from kernelmux.dispatch.logits_processor.tagged import TensorType

ValidityCheck = Callable[[Sequence[Op]], Any]


class CompileError(ValueError):
    """A list of operators makes no valid pipe."""


class FusionRule(NamedTuple):
    """Replace consecutive operators of the classes `pattern` by `build(those)` if `guard(those)`.

    Rules of higher `prio` are tried first, of equal ones the longer pattern, then the one registered last.
    """

    pattern: tuple[type[Op], ...]
    guard: Callable[[list[Op]], bool]
    build: Callable[[list[Op]], Op]
    prio: int = 0


class Compiler:
    """Validity checks and fusion rules, applied to lists of operators. A check raises CompileError."""

    def __init__(self) -> None:
        self.rules: list[FusionRule] = list(_RULES)
        self.checks: list[ValidityCheck] = [_one_softmax, _ids_come_last, _kinds_fit]

    def register_fusion_rule(self, rule: FusionRule) -> None:
        self.rules.insert(0, rule)

    def register_validity_check(self, check: ValidityCheck) -> None:
        self.checks.append(check)

    def compile(self, ops: Sequence[Op]) -> list[Op]:
        """The fused operators.

        Raises:
            CompileError: when a check fails.
        """
        for check in self.checks:
            check(ops)
        result = list(ops)
        for rule in sorted(self.rules, key=lambda r: (-r.prio, -len(r.pattern))):
            result = _fuse(result, rule)
        return result


def compile_pipeline(
    ops: Sequence[Op],
    custom_fusion_rules: Sequence[FusionRule] | None = None,
    custom_validity_checks: Sequence[ValidityCheck] | None = None,
) -> list[Op]:
    """Check and fuse a list of operators, with rules and checks of one's own besides the built-in ones.

    Raises:
        CompileError: when a check fails.

    >>> compile_pipeline([ScaleLogits(), ToProbs(), RenormTopP(top_p=0.9), SampleProbs()])
    [TemperatureSoftmax(), SampleTopP(top_p=0.9)]
    """
    compiler = Compiler()
    for rule in custom_fusion_rules or ():
        compiler.register_fusion_rule(rule)
    for check in custom_validity_checks or ():
        compiler.register_validity_check(check)
    return compiler.compile(ops)


def _fuse(ops: list[Op], rule: FusionRule) -> list[Op]:
    result, at, length = [], 0, len(rule.pattern)
    while at < len(ops):
        part = ops[at : at + length]
        fits = [type(op) for op in part] == list(rule.pattern) and length > 0 and rule.guard(part)
        result.append(rule.build(part) if fits else ops[at])
        at += length if fits else 1
    return result


def _defaults(ops: list[Op]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for op in ops:
        if isinstance(op, ParameterizedOp):
            merged |= op.default_params
    return merged


def _joint(ops: list[Op]) -> bool:
    return isinstance(ops[0], RenormTopK) and ops[0].joint


def _always(ops: list[Op]) -> bool:
    return True


_RULES = (
    FusionRule((ScaleLogits, ToProbs), _always, lambda ops: TemperatureSoftmax(**_defaults(ops))),
    FusionRule(
        (RenormTopK, RenormTopP, SampleProbs), _always, lambda ops: SampleTopKTopP(_joint(ops), **_defaults(ops))
    ),
    FusionRule((RenormTopK, SampleProbs), _always, lambda ops: SampleTopK(**_defaults(ops))),
    FusionRule((RenormTopP, SampleProbs), _always, lambda ops: SampleTopP(**_defaults(ops))),
    FusionRule((RenormMinP, SampleProbs), _always, lambda ops: SampleMinP(**_defaults(ops))),
)


def _one_softmax(ops: Sequence[Op]) -> None:
    count = sum(isinstance(op, ToProbs) for op in ops)
    if count > 1:
        raise CompileError(f"there are {count} Softmax, at most 1; remove the others")


def _ids_come_last(ops: Sequence[Op]) -> None:
    for op, following in pairwise(ops):
        if op.OUT is TensorType.INDICES:
            raise CompileError(f"{following.name} follows {op.name}, which gives ids; nothing may follow it, remove it")


def _kinds_fit(ops: Sequence[Op]) -> None:
    for op, following in pairwise(ops):
        if op.OUT is not following.IN:
            raise CompileError(
                f"{following.name} takes {following.IN.name}, {op.name} before it gives {op.OUT.name}; reorder them"
            )
