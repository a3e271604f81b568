"""LogitsPipe: from logits to tokens in declared steps."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kernelmux.dispatch.logits_processor.compiler import CompileError, FusionRule, ValidityCheck, compile_pipeline
from kernelmux.dispatch.logits_processor.operators import Drawing, Op
from kernelmux.dispatch.logits_processor.processors import LegalizationError, LogitsProcessor, legalize_processors
from kernelmux.dispatch.logits_processor.tagged import TaggedTensor, TensorType

_KNOWN = Drawing.SHARED | {"temperature", "top_k", "top_p", "min_p", "enable_pdl"}


class LogitsPipe:
    """Run logits or probabilities through processors, as far as possible in fused steps.

    Args:
        processors: Temperature, Softmax, TopK, TopP, MinP, Sample or subclasses of LogitsProcessor, in order.
        compile: fuse steps that one function does (the distribution stays the same; the ids of one seed may not).
        input_type: what calls give; None: what the first processor takes, if that is one kind only.
        custom_fusion_rules, custom_validity_checks: besides the built-in ones.

    Calling the pipe takes a tensor [rows, vocab], or a TaggedTensor, and parameters by name (temperature, top_k, top_p,
    min_p, generator, seed, offset, indices, check_nan), which override those given to the processors. It returns a
    tensor. Names that no processor knows are refused; known ones that this pipe has no use for are not looked at.

    Raises:
        ValueError: "Pipeline creation failed: …" for processors that do not fit together (as LegalizationError or
            CompileError, which are ValueErrors); "Error executing operator i …" for whatever fails in a call.

    Source: FlashInfer's `logits_processor.LogitsPipe`.

    >>> import torch
    >>> from kernelmux.dispatch.logits_processor import Sample, Softmax, Temperature, TopP
    >>> pipe = LogitsPipe([Temperature(), Softmax(), TopP(top_p=0.5), Sample()])
    >>> pipe(torch.tensor([[1.0, 3.0, 2.0]]), temperature=0.7, seed=1, offset=0).tolist()
    [1]
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        compile: bool = True,
        input_type: TensorType | None = None,
        custom_fusion_rules: Sequence[FusionRule] | None = None,
        custom_validity_checks: Sequence[ValidityCheck] | None = None,
    ) -> None:
        self.processors = list(processors)
        try:
            self._initial_type = _initial_type(self.processors) if input_type is None else input_type
            self.ops = legalize_processors(self.processors, self._initial_type)
            self.compiled_ops: list[Op] | None = None
            self._known = _known_names(self.ops)
            if compile:
                self.compile(custom_fusion_rules, custom_validity_checks)
        except (LegalizationError, CompileError) as error:
            raise type(error)(f"Pipeline creation failed: {error}") from error
        except Exception as error:
            raise ValueError(f"Pipeline creation failed: {error}") from error

    @property
    def initial_type(self) -> TensorType:
        """What calls give."""
        return self._initial_type

    def compile(
        self,
        custom_fusion_rules: Sequence[FusionRule] | None = None,
        custom_validity_checks: Sequence[ValidityCheck] | None = None,
    ) -> None:
        """Fuse the steps; later calls run the fused ones.

        Raises:
            CompileError: when a validity check fails.
        """
        self.compiled_ops = compile_pipeline(self.ops, custom_fusion_rules, custom_validity_checks)
        self._known = _known_names(self.compiled_ops)

    def __call__(self, x: Tensor | TaggedTensor, **kwargs: Any) -> Tensor:
        ops = self.ops if self.compiled_ops is None else self.compiled_ops
        if self._known is not None and not self._known.issuperset(kwargs):
            name = min(set(kwargs) - self._known)
            raise ValueError(f"parameter {name!r} is not known, one of {', '.join(sorted(self._known))}; correct it")
        tensor = x if isinstance(x, TaggedTensor) else TaggedTensor(x, self._initial_type)
        if tensor.type is not self._initial_type:
            raise ValueError(f"x holds {tensor.type.name}, this pipe takes {self._initial_type.name}; convert it")
        for i, op in enumerate(ops):
            try:
                tensor = op(tensor, **kwargs)
            except Exception as error:
                raise ValueError(f"Error executing operator {i} {op.name}: {error}") from error
        return tensor.data

    def __repr__(self) -> str:
        return f"LogitsPipe({self.ops if self.compiled_ops is None else self.compiled_ops})"


def _initial_type(processors: Sequence[LogitsProcessor]) -> TensorType:
    """What the first processor takes."""
    if not processors:
        raise ValueError("there are no processors; give at least one")
    first, fitting = processors[0], []
    for kind in (TensorType.LOGITS, TensorType.PROBS):
        try:
            first.legalize(kind)
        except LegalizationError:
            continue
        fitting.append(kind)
    if len(fitting) != 1:
        takes = " and ".join(kind.name for kind in fitting) or "neither LOGITS nor PROBS"
        raise LegalizationError(f"{type(first).__name__} comes first and takes {takes}; give input_type")
    return fitting[0]


def _known_names(ops: Sequence[Op]) -> frozenset[str] | None:
    """The parameters that a call may give; None when a custom operator reads what it likes."""
    takes = [op.TAKES for op in ops]
    return None if None in takes else _KNOWN.union(*(names for names in takes if names))
