"""What users build pipes from. A processor turns into operators once the kind of its input is known."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from kernelmux.dispatch.logits_processor.operators import (
    MaskTopK,
    Op,
    RenormMinP,
    RenormTopK,
    RenormTopP,
    SampleLogits,
    SampleProbs,
    ScaleLogits,
    ToProbs,
)
from kernelmux.dispatch.logits_processor.tagged import TensorType

LOGITS, PROBS = TensorType.LOGITS, TensorType.PROBS


class LegalizationError(ValueError):
    """A processor stands where it cannot: it does not take what the one before it gives."""


class LogitsProcessor:
    """One step of a pipe. `params` are defaults for what a call of the pipe may give by name.

    Subclasses define `legalize(input_type)`, which returns operators or raises LegalizationError.
    """

    def __init__(self, **params: Any) -> None:
        self.params = params

    def legalize(self, input_type: TensorType) -> list[Op]:
        """The operators that do this for a kind of input.

        Raises:
            LegalizationError: when there are none.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define legalize()")

    def _only(self, wanted: TensorType, got: TensorType) -> None:
        if got is not wanted:
            name = type(self).__name__
            raise LegalizationError(f"{name} gets {got.name}, it takes {wanted.name}; {_HINTS[wanted]}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.params.items())})"


_HINTS = {LOGITS: "put it before Softmax", PROBS: "put Softmax before it"}


class Temperature(LogitsProcessor):
    """Divide logits by `temperature`, a number or a tensor [rows]."""

    def legalize(self, input_type: TensorType) -> list[Op]:
        self._only(LOGITS, input_type)
        return [ScaleLogits(**self.params)]


class Softmax(LogitsProcessor):
    """Turn logits into probabilities."""

    def __init__(self, enable_pdl: bool | None = None, **params: Any) -> None:
        super().__init__(**params)

    def legalize(self, input_type: TensorType) -> list[Op]:
        self._only(LOGITS, input_type)
        return [ToProbs(**self.params)]


class TopK(LogitsProcessor):
    """Keep the `top_k` largest: masks logits, renormalises probabilities.

    With `joint_topk_topp`, which needs probabilities, a TopP right after it applies to those from before TopK.
    """

    def __init__(self, joint_topk_topp: bool = False, **params: Any) -> None:
        super().__init__(**params)
        self.joint_topk_topp = joint_topk_topp

    def legalize(self, input_type: TensorType) -> list[Op]:
        if input_type is LOGITS:
            if self.joint_topk_topp:
                raise LegalizationError("TopK with joint_topk_topp gets LOGITS, it takes PROBS; put Softmax before it")
            return [MaskTopK(**self.params)]
        self._only(PROBS, input_type)
        return [RenormTopK(self.joint_topk_topp, **self.params)]


class TopP(LogitsProcessor):
    """Keep the nucleus of probability `top_p` and renormalise."""

    def legalize(self, input_type: TensorType) -> list[Op]:
        self._only(PROBS, input_type)
        return [RenormTopP(**self.params)]


class MinP(LogitsProcessor):
    """Keep what has at least `min_p` of the largest probability and renormalise."""

    def legalize(self, input_type: TensorType) -> list[Op]:
        self._only(PROBS, input_type)
        return [RenormMinP(**self.params)]


class Sample(LogitsProcessor):
    """Draw ids, from logits or probabilities. A call may give generator, seed, offset, indices and check_nan."""

    def __init__(self, deterministic: bool = True, **params: Any) -> None:
        super().__init__(deterministic=deterministic, **params)

    def legalize(self, input_type: TensorType) -> list[Op]:
        if input_type is LOGITS:
            return [SampleLogits(**self.params)]
        self._only(PROBS, input_type)
        return [SampleProbs(**self.params)]


def legalize_processors(
    processors: Sequence[LogitsProcessor], initial_type: TensorType = TensorType.LOGITS
) -> list[Op]:
    """The operators of a list of processors, each given what the one before it gives.

    Raises:
        LegalizationError: for a processor that stands where it cannot.

    >>> legalize_processors([Temperature(), Softmax(), Sample()])
    [ScaleLogits(), ToProbs(), SampleProbs(deterministic=True)]
    """
    ops: list[Op] = []
    for processor in processors:
        ops += processor.legalize(ops[-1].OUT if ops else initial_type)
    for op, following in pairwise(ops):
        if isinstance(op, RenormTopK):
            op.before_top_p = isinstance(following, RenormTopP)
    return ops
