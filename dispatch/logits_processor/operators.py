"""The operators that pipes run: each takes one kind of tensor to another. Fused ones call one function for several."""

from typing import Any, ClassVar

from torch import Tensor

from kernelmux.dispatch.logits_processor.tagged import TaggedTensor, TensorType
from kernelmux.dispatch.sampling import (
    min_p_sampling_from_probs,
    sampling_from_logits,
    sampling_from_probs,
    softmax,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_probs,
    top_p_sampling_from_probs,
)
from kernelmux.dispatch.sampling.arguments import check_distributions, min_p_of, temperature_of
from kernelmux.dispatch.sampling.reference import min_p_renorm_probs, scale_logits, top_k_cut_probs

LOGITS, PROBS, INDICES = TensorType.LOGITS, TensorType.PROBS, TensorType.INDICES


class Op:
    """One step: `IN` and `OUT` say what it takes and gives. Subclasses define `run`, or `__call__` for full control.

    `TAKES` names the keyword arguments that the step reads; None means any.
    """

    IN: ClassVar[TensorType]
    OUT: ClassVar[TensorType]
    TAKES: ClassVar[frozenset[str] | None] = None

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        if tensor.type is not self.IN:
            raise ValueError(f"{self.name} got {tensor.type.name}, it takes {self.IN.name}; insert what converts it")
        return TaggedTensor(self.run(tensor.data, kwargs), self.OUT)

    def run(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        raise NotImplementedError(f"{self.name} defines neither run() nor __call__()")

    @property
    def name(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        return f"{self.name}()"


class ParameterizedOp(Op):
    """A step with parameters: those of its constructor are defaults, those of a call override them."""

    def __init__(self, **default_params: Any) -> None:
        self.default_params = default_params

    def parameter(self, name: str, given: dict[str, Any]) -> Any:
        """A parameter that must be there."""
        value = given.get(name)
        value = self.default_params.get(name) if value is None else value
        if value is None:
            raise ValueError(f"{name} is missing; give it to the call or to the processor")
        return value

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.default_params.items())})"


class Drawing(ParameterizedOp):
    """A step that draws ids; it hands on what all sampling functions take."""

    OUT = INDICES
    SHARED: ClassVar[frozenset[str]] = frozenset(
        {"indices", "deterministic", "generator", "check_nan", "seed", "offset"}
    )

    def shared(self, given: dict[str, Any]) -> dict[str, Any]:
        both = {**self.default_params, **given}
        return {name: both[name] for name in self.SHARED if both.get(name) is not None}


class ScaleLogits(ParameterizedOp):
    """Divide by the temperature, in float32 (float64 stays). Temperature 0 gives 0, -inf stays."""

    IN, OUT, TAKES = LOGITS, LOGITS, frozenset({"temperature"})

    def run(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        check_distributions("logits", x)
        temperature = temperature_of(self.parameter("temperature", given), x)
        return scale_logits(x, 1.0 if temperature is None else temperature)


class ToProbs(ParameterizedOp):
    IN, OUT, TAKES = LOGITS, PROBS, frozenset({"enable_pdl"})

    def run(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return softmax(x)


class MaskTopK(ParameterizedOp):
    IN, OUT, TAKES = LOGITS, LOGITS, frozenset({"top_k"})

    def run(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return top_k_mask_logits(x, self.parameter("top_k", given))


class RenormTopK(ParameterizedOp):
    """Keep the k most probable. With `joint`, what follows is a top-p over probabilities as they were."""

    IN, OUT, TAKES = PROBS, PROBS, frozenset({"top_k"})

    def __init__(self, joint: bool = False, **default_params: Any) -> None:
        super().__init__(**default_params)
        self.joint = joint
        self.before_top_p = False  # set by legalisation

    def run(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        top_k = self.parameter("top_k", given)
        return top_k_cut_probs(x, top_k) if self.joint and self.before_top_p else top_k_renorm_probs(x, top_k)


class RenormTopP(ParameterizedOp):
    IN, OUT, TAKES = PROBS, PROBS, frozenset({"top_p"})

    def run(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return top_p_renorm_probs(x, self.parameter("top_p", given))


class RenormMinP(ParameterizedOp):
    IN, OUT, TAKES = PROBS, PROBS, frozenset({"min_p"})

    def run(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        check_distributions("probs", x)
        min_p = min_p_of(self.parameter("min_p", given), x)
        return min_p_renorm_probs(x, 0.0 if min_p is None else min_p)


class SampleLogits(Drawing):
    IN, TAKES = LOGITS, Drawing.SHARED

    def run(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return sampling_from_logits(x, **self.shared(given))


class SampleProbs(Drawing):
    IN, TAKES = PROBS, Drawing.SHARED

    def run(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return sampling_from_probs(x, **self.shared(given))  # type: ignore[no-any-return]


class TemperatureSoftmax(ParameterizedOp):
    """ScaleLogits and ToProbs."""

    IN, OUT, TAKES = LOGITS, PROBS, frozenset({"temperature", "enable_pdl"})

    def run(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return softmax(x, self.parameter("temperature", given))


class SampleTopK(Drawing):
    """RenormTopK and SampleProbs."""

    IN, TAKES = PROBS, Drawing.SHARED | {"top_k"}

    def run(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return top_k_sampling_from_probs(x, self.parameter("top_k", given), **self.shared(given))  # type: ignore[no-any-return]


class SampleTopP(Drawing):
    """RenormTopP and SampleProbs."""

    IN, TAKES = PROBS, Drawing.SHARED | {"top_p"}

    def run(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return top_p_sampling_from_probs(x, self.parameter("top_p", given), **self.shared(given))  # type: ignore[no-any-return]


class SampleMinP(Drawing):
    """RenormMinP and SampleProbs."""

    IN, TAKES = PROBS, Drawing.SHARED | {"min_p"}

    def run(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return min_p_sampling_from_probs(x, self.parameter("min_p", given), **self.shared(given))  # type: ignore[no-any-return]


class SampleTopKTopP(Drawing):
    """RenormTopK, RenormTopP and SampleProbs."""

    IN, TAKES = PROBS, Drawing.SHARED | {"top_k", "top_p"}

    def __init__(self, joint: bool, **default_params: Any) -> None:
        super().__init__(**default_params)
        self.order = "joint" if joint else "top_k_first"

    def run(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        top_k, top_p = self.parameter("top_k", given), self.parameter("top_p", given)
        return top_k_top_p_sampling_from_probs(x, top_k, top_p, filter_apply_order=self.order, **self.shared(given))  # type: ignore[no-any-return]
