"""LogitsPipe: types, fusion, parameters, errors, and that fused and discrete steps agree."""

import math
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelmux
from kernelmux.dispatch import sampling
from kernelmux.dispatch.logits_processor import (
    CompileError,
    Compiler,
    FusionRule,
    LegalizationError,
    LogitsPipe,
    LogitsProcessor,
    MinP,
    Op,
    ParameterizedOp,
    Sample,
    Softmax,
    TaggedTensor,
    Temperature,
    TensorType,
    TopK,
    TopP,
    compile_pipeline,
    legalize_processors,
    operators,
)

naive = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("naive_sampling.py"))))
LOGITS = 2 * torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
PROBS = torch.softmax(LOGITS, -1)
SEED: dict[str, Any] = {"seed": 11, "offset": 4}


def names(pipe: LogitsPipe) -> list[str]:
    return [op.name for op in (pipe.ops if pipe.compiled_ops is None else pipe.compiled_ops)]


def fix(pipe: LogitsPipe, x: Tensor, **kwargs: Any) -> Tensor:
    return pipe(x, **SEED, **kwargs)


# -- single steps equal the functions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_single_steps(compiled: bool) -> None:
    def run(processor: LogitsProcessor, x: Tensor, kind: TensorType, **kwargs: Any) -> Tensor:
        return LogitsPipe([processor], compile=compiled, input_type=kind)(x, **kwargs)

    logits, probs = TensorType.LOGITS, TensorType.PROBS
    assert torch.equal(run(Softmax(), LOGITS, logits), sampling.softmax(LOGITS))
    torch.testing.assert_close(run(Temperature(), LOGITS, logits, temperature=0.7), LOGITS / 0.7)
    t = torch.tensor([0.5, 1.0, 2.0, 3.0])
    torch.testing.assert_close(run(Temperature(temperature=t), LOGITS, logits), LOGITS / t[:, None])
    assert torch.equal(run(TopK(), LOGITS, logits, top_k=5), sampling.top_k_mask_logits(LOGITS, 5))
    k = torch.tensor([1, 2, 3, 0], dtype=torch.int32)
    assert torch.equal(run(TopK(), PROBS, probs, top_k=k), sampling.top_k_renorm_probs(PROBS, k))
    assert torch.equal(run(TopP(), PROBS, probs, top_p=0.8), sampling.top_p_renorm_probs(PROBS, 0.8))
    assert torch.equal(run(Sample(), PROBS, probs, **SEED), sampling.sampling_from_probs(PROBS, **SEED))
    assert torch.equal(run(Sample(), LOGITS, logits, **SEED), sampling.sampling_from_logits(LOGITS, **SEED))
    for min_p in (0.0, 0.1, 1.0):
        got = run(MinP(), PROBS, probs, min_p=min_p)
        expected = [naive.filtered(row, min_p=naive.single(min_p)) for row in PROBS.tolist()]
        torch.testing.assert_close(got, torch.tensor(expected))


def test_temperature_edges() -> None:
    logits = torch.tensor([[1.0, -math.inf, 3.0]], dtype=torch.float16)
    pipe = LogitsPipe([Temperature(), Softmax()], compile=False)
    assert pipe(logits, temperature=0.0).tolist() == [[0.5, 0, 0.5]]
    assert pipe(logits, temperature=1e-3).tolist() == [[0, 0, 1]]
    fused = LogitsPipe([Temperature(), Softmax()])
    for t in (0.0, 1e-3, 2.0):
        torch.testing.assert_close(fused(logits, temperature=t), pipe(logits, temperature=t))


# -- fused and discrete -----------------------------------------------------------------------------------------------

FUSED = {
    "temperature": ([Temperature(), Softmax()], ["TemperatureSoftmax"]),
    "all": (
        [Temperature(), Softmax(), TopK(), TopP(), Sample()],
        ["TemperatureSoftmax", "SampleTopKTopP"],
    ),
    "joint": (
        [Temperature(), Softmax(), TopK(joint_topk_topp=True), TopP(), Sample()],
        ["TemperatureSoftmax", "SampleTopKTopP"],
    ),
    "top_k": ([Temperature(), Softmax(), TopK(), Sample()], ["TemperatureSoftmax", "SampleTopK"]),
    "top_p": ([Temperature(), Softmax(), TopP(), Sample()], ["TemperatureSoftmax", "SampleTopP"]),
    "min_p": ([Temperature(), Softmax(), MinP(), Sample()], ["TemperatureSoftmax", "SampleMinP"]),
    "logits": (
        [TopK(), Temperature(), Softmax(), TopP(), Sample()],
        ["MaskTopK", "TemperatureSoftmax", "SampleTopP"],
    ),
    "chain": (
        [Softmax(), TopK(), MinP(), TopP(), Sample()],
        ["ToProbs", "RenormTopK", "RenormMinP", "SampleTopP"],
    ),
}


@pytest.mark.parametrize(("processors", "expected"), FUSED.values(), ids=FUSED.keys())
def test_fusion_keeps_the_distribution(processors: list[LogitsProcessor], expected: list[str]) -> None:
    kind = TensorType.LOGITS
    fused = LogitsPipe(processors, input_type=kind)
    discrete = LogitsPipe(processors, compile=False, input_type=kind)
    assert names(fused) == expected
    assert len(names(discrete)) == len(processors)
    given: dict[str, Any] = {"temperature": 1.3, "top_k": 7, "top_p": 0.8, "min_p": 0.2}
    if expected[-1] == "TemperatureSoftmax":
        torch.testing.assert_close(fused(LOGITS, **given), discrete(LOGITS, **given))
        return
    given["indices"] = torch.arange(4).repeat_interleave(3000)
    a, b = fix(fused, LOGITS, **given), fix(discrete, LOGITS, **given)
    assert (a == b).float().mean() > 0.999  # one seed, one distribution: sums differ in their last bits only
    before_last = LogitsPipe(processors[:-1], compile=False, input_type=kind)(LOGITS, **given)
    for row, ids in zip(before_last.tolist(), a.view(4, -1), strict=True):
        assert set(ids.tolist()) <= {i for i, p in enumerate(row) if p > 0}


def test_joint_is_not_top_k_first() -> None:
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    given: dict[str, Any] = {"top_k": 3, "top_p": 0.72, "indices": torch.zeros(4000, dtype=torch.int32)}
    for joint, support in ((False, {0, 1}), (True, {0, 1, 2})):
        for compiled in (False, True):
            pipe = LogitsPipe([TopK(joint_topk_topp=joint), TopP(), Sample()], compiled, TensorType.PROBS)
            ids = fix(pipe, probs, **given)
            assert set(ids.tolist()) == support
            naive.assert_distributed(ids, naive.renormalised(probs[0].tolist(), support))


def test_joint_without_a_top_p_renormalises() -> None:
    pipe = LogitsPipe([TopK(joint_topk_topp=True)], input_type=TensorType.PROBS)
    assert torch.equal(pipe(PROBS, top_k=3), sampling.top_k_renorm_probs(PROBS, 3))


def test_compile_later() -> None:
    pipe = LogitsPipe([Softmax(), TopP(), Sample()], compile=False)
    assert names(pipe) == ["ToProbs", "RenormTopP", "SampleProbs"]
    pipe.compile()
    assert names(pipe) == ["ToProbs", "SampleTopP"]
    assert "SampleTopP" in repr(pipe)


# -- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_call_parameters_override_those_of_the_processors(compiled: bool) -> None:
    pipe = LogitsPipe([Temperature(temperature=0.5), Softmax(), TopK(top_k=1), Sample(seed=3, offset=0)], compiled)
    assert torch.equal(pipe(LOGITS), LOGITS.argmax(-1).int())
    wide = {"top_k": 0, "temperature": 2.0, "seed": 8}
    expected = sampling.sampling_from_probs(sampling.softmax(LOGITS, 2.0), seed=8, offset=0)
    assert torch.equal(pipe(LOGITS, **wide), expected)


def test_indices_generator_and_check_nan() -> None:
    pipe = LogitsPipe([Softmax(), TopP(top_p=0.9), Sample()])
    indices = torch.tensor([3, 3, 0])
    expected = sampling.top_p_sampling_from_probs(PROBS, 0.9, indices, generator=torch.Generator().manual_seed(2))
    got = pipe(LOGITS, indices=indices, generator=torch.Generator().manual_seed(2))
    assert got.dtype == torch.int64
    assert torch.equal(got, expected)
    spoilt = LOGITS.clone()
    spoilt[1, 1] = math.nan
    with pytest.raises(ValueError, match=r"Error executing operator 1 SampleTopP: Input probs contains NaN"):
        pipe(spoilt, check_nan=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_missing_parameter(compiled: bool) -> None:
    pipe = LogitsPipe([Temperature(), Softmax(), TopP(), Sample()], compiled)
    with pytest.raises(ValueError, match=r"Error executing operator 0 \w+: temperature is missing; give it"):
        pipe(LOGITS, top_p=0.5)
    with pytest.raises(ValueError, match=r"Error executing operator \d \w+: top_p is missing"):
        pipe(LOGITS, temperature=0.5)


def test_wrong_values_are_reported_with_their_operator() -> None:
    pipe = LogitsPipe([Temperature(), Softmax()])
    with pytest.raises(ValueError, match=r"Error executing operator 0 TemperatureSoftmax: temperature has shape \[3\]"):
        pipe(LOGITS, temperature=torch.ones(3))
    with pytest.raises(ValueError, match="Error executing operator 0 TemperatureSoftmax: temperature is True"):
        pipe(LOGITS, temperature=True)


def test_misspelt_parameters_are_refused_and_unused_ones_not() -> None:
    pipe = LogitsPipe([Softmax()])
    with pytest.raises(ValueError, match="parameter 'temprature' is not known, one of check_nan, "):
        pipe(LOGITS, temprature=0.5)
    assert torch.equal(pipe(LOGITS, top_p=0.5), PROBS)


# -- types ------------------------------------------------------------------------------------------------------------


def test_tagged_tensors() -> None:
    tagged = TaggedTensor.probs(PROBS)
    assert tagged.type is TensorType.PROBS
    assert (tagged.shape, tagged.size(), tagged.size(1)) == ((4, 50), (4, 50), 50)
    assert (tagged.dtype, tagged.device) == (torch.float32, torch.device("cpu"))
    assert TaggedTensor.logits(PROBS).type is TensorType.LOGITS
    assert TaggedTensor.indices(PROBS).type is TensorType.INDICES
    assert [(t.name, t.value) for t in TensorType] == [("LOGITS", 1), ("PROBS", 2), ("INDICES", 3)]
    with pytest.raises(TypeError, match=r"data is a list, it must be a torch\.Tensor"):
        TaggedTensor([1.0], TensorType.PROBS)  # type: ignore[arg-type]
    pipe = LogitsPipe([Softmax()])
    got = pipe(TaggedTensor.logits(LOGITS))
    assert isinstance(got, Tensor)
    with pytest.raises(ValueError, match="x holds PROBS, this pipe takes LOGITS"):
        pipe(tagged)


def test_the_input_type_is_inferred() -> None:
    assert LogitsPipe([Softmax()]).initial_type is TensorType.LOGITS
    assert LogitsPipe([TopP()]).initial_type is TensorType.PROBS
    assert LogitsPipe([MinP(), Sample()]).initial_type is TensorType.PROBS
    for first in (TopK(), Sample()):
        with pytest.raises(ValueError, match=r"Pipeline creation failed: \w+ comes first and takes LOGITS and PROBS"):
            LogitsPipe([first])
        assert LogitsPipe([first], input_type=TensorType.PROBS).initial_type is TensorType.PROBS


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        ([TopP(), Softmax()], "Softmax gets PROBS, it takes LOGITS"),
        ([Softmax(), Softmax()], "Softmax gets PROBS"),
        ([Softmax(), Temperature()], "Temperature gets PROBS, it takes LOGITS; put it before Softmax"),
        ([Temperature(), TopP()], "TopP gets LOGITS, it takes PROBS; put Softmax before it"),
        ([Softmax(), Sample(), TopP()], "TopP gets INDICES"),
        ([Softmax(), Sample(), Sample()], "Sample gets INDICES"),
        ([Temperature(), TopK(joint_topk_topp=True)], "TopK with joint_topk_topp gets LOGITS"),
        ([], "there are no processors"),
    ],
)
def test_pipes_that_cannot_be(processors: list[LogitsProcessor], message: str) -> None:
    with pytest.raises(ValueError, match=f"Pipeline creation failed: {message}"):
        LogitsPipe(processors)
    if processors:
        with pytest.raises(LegalizationError, match=message):
            legalize_processors(processors, LogitsPipe([processors[0]]).initial_type)


def test_something_else_among_the_processors() -> None:
    with pytest.raises(ValueError, match="Pipeline creation failed"):
        LogitsPipe([Softmax(), "TopP"])  # type: ignore[list-item]


# -- compiling --------------------------------------------------------------------------------------------------------


def test_validity_checks() -> None:
    softmax, sample = operators.ToProbs(), operators.SampleProbs()
    with pytest.raises(CompileError, match="there are 2 Softmax, at most 1"):
        compile_pipeline([softmax, softmax])
    with pytest.raises(CompileError, match="RenormTopP follows SampleProbs, which gives ids"):
        compile_pipeline([softmax, sample, operators.RenormTopP()])
    with pytest.raises(CompileError, match="ScaleLogits takes LOGITS, ToProbs before it gives PROBS"):
        compile_pipeline([softmax, operators.ScaleLogits()])

    def no_sampling(ops: list[Op]) -> None:
        if any(op.OUT is TensorType.INDICES for op in ops):
            raise CompileError("sampling is not allowed here")

    with pytest.raises(CompileError, match="Pipeline creation failed: sampling is not allowed here"):
        LogitsPipe([Softmax(), Sample()], custom_validity_checks=[no_sampling])
    assert names(LogitsPipe([Softmax()], custom_validity_checks=[no_sampling])) == ["ToProbs"]


class Argmax(ParameterizedOp):
    IN, OUT = TensorType.PROBS, TensorType.INDICES

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        return TaggedTensor.indices(tensor.data.argmax(-1) + self.parameter("shift", kwargs))


class Greedy(LogitsProcessor):
    def legalize(self, input_type: TensorType) -> list[Op]:
        if input_type is not TensorType.PROBS:
            raise LegalizationError("Greedy takes PROBS")
        return [Argmax(**self.params)]


def test_a_processor_of_ones_own() -> None:
    pipe = LogitsPipe([Softmax(), Greedy(shift=0)])
    assert torch.equal(pipe(LOGITS), LOGITS.argmax(-1))
    assert torch.equal(pipe(LOGITS, shift=2), LOGITS.argmax(-1) + 2)
    assert LogitsPipe([Greedy(shift=0)]).initial_type is TensorType.PROBS


def test_a_fusion_rule_of_ones_own() -> None:
    rule = FusionRule(
        (operators.ToProbs, operators.RenormTopP, operators.SampleProbs),
        lambda ops: ops[1].default_params.get("top_p") == 0,
        lambda ops: Greedy(shift=0).legalize(TensorType.PROBS)[0],
    )
    greedy = LogitsPipe([Softmax(), TopP(top_p=0), Sample()], custom_fusion_rules=[rule])
    assert names(greedy) == ["Argmax"]
    other = LogitsPipe([Softmax(), TopP(top_p=0.5), Sample()], custom_fusion_rules=[rule])
    assert names(other) == ["ToProbs", "SampleTopP"]
    compiler = Compiler()
    taken = FusionRule((operators.RenormTopP, operators.SampleProbs), lambda ops: True, lambda ops: Argmax(shift=0))
    compiler.register_fusion_rule(taken)
    assert [op.name for op in compiler.compile(other.ops)] == ["ToProbs", "Argmax"]
    late = taken._replace(prio=-1)
    assert names(LogitsPipe([TopP(), Sample()], custom_fusion_rules=[late])) == ["SampleTopP"]


def test_the_names_stay_in_their_module() -> None:
    assert kernelmux.CompileError is not CompileError
    assert not hasattr(kernelmux, "Op")
