"""How the wrappers choose kernels: by features of plan and run, once, in the context of plan()."""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelmux
from kernelmux import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, FallbackWarning
from kernelmux.capabilities import AttentionSpec, Backend, Batch, Kernel, Runner, Support, Unsupported
from kernelmux.dispatch.attention.op import ATTENTION, FEATURES, RUN_FEATURES, request_of
from kernelmux.dispatch.attention.reference import reference
from kernelmux.testing import installed

naive = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("naive_attention.py"))))
Paged, close = naive.Paged, naive.close
F32 = torch.float32


class Stub(ModuleType):
    """Kernels that note what they are asked and compute what the reference does."""

    def __init__(self) -> None:
        super().__init__("kernelmux_attention_stub")
        self.planned: list[tuple[str, Batch]] = []
        self.ran: list[str] = []
        self.refuse: str = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def plan(spec: AttentionSpec, batch: Batch) -> Runner:
            if self.refuse == "plan":
                raise Unsupported("not today")
            self.planned.append((name, batch))
            inner = reference(spec, batch)

            def run(*args: Any) -> None:
                if self.refuse == "run":
                    raise Unsupported("these strides")
                self.ran.append(name)
                inner(*args)

            return run

        return plan


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    made = Stub()
    monkeypatch.setitem(sys.modules, made.__name__, made)
    kernels = [
        Kernel("attention", "kernelmux_attention_stub:plain", Support(device="any", features=frozenset())),
        Kernel(
            "attention", "kernelmux_attention_stub:rich", Support(device="any", features=frozenset(FEATURES)), "rich"
        ),
    ]
    with installed(Backend("stub", "stub", tuple(kernels))):
        yield made


def workspace() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


CASE = {"q_lens": (1, 1, 1)}


def planned(case: Any, backend: str = "auto", **options: Any) -> BatchDecodeWithPagedKVCacheWrapper:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), backend=backend)
    wrapper.plan(*case.tables, *case.heads, 16, 16, q_data_type=F32, **options)
    return wrapper


def test_the_kernel_follows_the_features_of_each_call(stub: Stub) -> None:
    case = Paged(**CASE)
    wrapper = planned(case)
    assert [name for name, _ in stub.planned] == ["plain"]
    assert wrapper.resolved_backend == "stub"
    wrapper.run(case.q, case.pair)
    wrapper.run(case.q, case.pair, return_lse=True)
    wrapper.run(case.q, case.pair, sinks=torch.zeros(4))
    with torch.no_grad():
        wrapper.run(case.q, case.pair, q_scale=torch.ones(1, requires_grad=True))
    wrapper.run(case.q, case.pair, torch.ones(4), torch.ones(2), torch.ones(2))
    wide = torch.zeros(*case.pair[0].shape[:3], 32)
    wide[..., :16] = case.pair[0]
    wrapper.run(case.q, (wide[..., :16], case.pair[1]))
    odd = torch.zeros(1 + case.q.numel())[1:].view_as(case.q).copy_(case.q)
    wrapper.run(odd, case.pair)
    wrapper.run(case.q, case.pair)
    assert stub.ran == ["plain", *["rich"] * 6, "plain"]
    assert len(stub.planned) == 7
    assert len({id(batch) for _, batch in stub.planned}) == 1
    wrapper.run(case.q, case.pair, return_lse=True)
    assert len(stub.planned) == 7


def test_scales_on_the_host_fold_into_the_scale(stub: Stub) -> None:
    case = Paged(**CASE)
    planned(case).run(case.q, case.pair, q_scale=torch.tensor(2.0), k_scale=0.5)
    assert stub.ran == ["plain"]
    close(planned(case).run(case.q, case.pair, q_scale=torch.tensor(2.0)), case.expect(scale=0.5)[0])


def test_every_feature_of_a_plan_reaches_the_request() -> None:
    case = Paged()
    mask = torch.ones(109, dtype=torch.bool)
    seen = set()
    for options in (
        {"causal": True, "window_left": 3, "logits_soft_cap": 1.0, "pos_encoding_mode": "ALIBI"},
        {"pos_encoding_mode": "ROPE_LLAMA", "custom_mask": mask, "fixed_split_size": 4},
        {"disable_split_kv": True, "kv_data_type": torch.uint8},
    ):
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace())
        wrapper.plan(case.qo_indptr, *case.tables, 4, 2, 16, 16, q_data_type=F32, **options)
        spec = wrapper._base.spec
        seen |= request_of(spec, wrapper._batch, 0).features
    rest = {"multi_item", "bidirectional", "cuda_graph", "device_lengths"}
    assert seen == set(FEATURES) - rest - set(RUN_FEATURES)
    request = request_of(spec, wrapper._batch, 0b111111)
    assert set(RUN_FEATURES) <= request.features
    assert (request.dims["batch"], request.dims["q_len"], request.dims["kv_len"]) == (3, 3, 33)
    assert set(request.dims) <= set(ATTENTION.dims)


def test_a_plan_uses_what_the_last_batch_came_to_use(stub: Stub) -> None:
    case = Paged(**CASE)
    wrapper = planned(case)
    wrapper.forward_return_lse(case.q, case.pair, window_left=2)
    stub.planned.clear()
    wrapper.plan(*case.tables, *case.heads, 16, 16, q_data_type=F32)
    assert [name for name, _ in stub.planned] == ["rich"]
    close(wrapper.forward_return_lse(case.q, case.pair, window_left=2)[0], case.expect(window=2)[0])
    assert len(stub.planned) == 1
    close(wrapper.run(case.q, case.pair), case.expect(window=2)[0])
    wrapper.plan(*case.tables, *case.heads, 16, 16, q_data_type=F32)
    close(wrapper.run(case.q, case.pair), case.expect()[0])


def test_graph_mode_keeps_the_first_choice(stub: Stub) -> None:
    case = Paged(**CASE)
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (4, 12, 3)]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", True, False, *buffers)
    wrapper.plan(*case.tables, *case.heads, 16, 16, q_data_type=F32)
    with kernelmux.prefer("reference"):
        wrapper.plan(*case.tables, *case.heads, 16, 16, q_data_type=F32)
    wrapper.run(case.q, case.pair)
    assert len(stub.planned) == 1
    assert stub.ran == ["rich"]  # without a GPU, lengths that only buffers hold are a feature


def test_a_named_backend_binds(stub: Stub) -> None:
    case = Paged(**CASE)
    wrapper = planned(case, backend="reference")
    wrapper.run(case.q, case.pair)
    assert stub.ran == []
    assert (wrapper._backend, wrapper.resolved_backend) == ("reference", "reference")
    assert planned(case, backend="stub:attention/rich").resolved_backend == "stub"
    assert stub.planned[-1][0] == "rich"
    with pytest.raises(kernelmux.NoKernelError, match="soft_cap: not supported by this kernel"):
        planned(case, backend="stub:attention", logits_soft_cap=2.0)


def test_the_context_of_plan_counts_also_for_what_run_asks_first(stub: Stub) -> None:
    case = Paged(**CASE)
    with kernelmux.prefer("reference"):
        wrapper = planned(case)
    wrapper.run(case.q, case.pair, return_lse=True)
    assert stub.planned == []
    wrapper = planned(case)
    with kernelmux.prefer("reference", scope="attention_decode"):
        wrapper.run(case.q, case.pair, return_lse=True)
    assert stub.ran == ["rich"]


@pytest.mark.parametrize("where", ["plan", "run"])
def test_a_kernel_may_refuse_before_any_launch(stub: Stub, where: str) -> None:
    case = Paged(**CASE)
    stub.refuse = where
    with pytest.warns(FallbackWarning, match=r"refused at run time: (not today|these strides); using the next"):  # noqa: PT031
        wrapper = planned(case)
        close(wrapper.run(case.q, case.pair), case.expect()[0])
    assert wrapper.resolved_backend == "reference"
    planned(case).run(case.q, case.pair)  # noted: no second warning
    kernelmux.reload()
    stub.refuse = ""
    assert planned(case).resolved_backend == "stub"


@pytest.mark.parametrize("learnt", ["q", "sinks", "q_scale"])
def test_gradients_go_to_a_kernel_that_has_them(stub: Stub, learnt: str) -> None:
    case = Paged(**CASE)
    tensors = {"q": case.q, "sinks": torch.zeros(4), "q_scale": torch.ones(())}
    tensors[learnt].requires_grad_()
    wrapper = planned(case)
    out = wrapper.run(tensors.pop("q"), case.pair, **tensors)
    assert stub.ran == []
    assert wrapper.resolved_backend == "reference"
    assert out.requires_grad
    with pytest.raises(kernelmux.NoKernelError, match=r"grad: this kernel is not differentiable.*no_grad"):
        planned(case, backend="stub").run(case.q.requires_grad_(), case.pair)


def test_other_errors_pass_through(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Paged(**CASE)

    def broken(spec: AttentionSpec, batch: Batch) -> Runner:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(stub, "plain", broken, raising=False)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        planned(case)


def test_strides_may_be_prepared_ahead(stub: Stub) -> None:
    case = Paged(**CASE)
    wrapper = planned(case)
    wrapper.prewarm_paged_kv_stride_variant()
    assert [name for name, _ in stub.planned] == ["plain", "rich"]
    wide = torch.zeros(*case.pair[0].shape[:3], 32)
    wrapper.run(case.q, (wide[..., :16], case.pair[1]))
    assert len(stub.planned) == 2
    wrapper.plan(*case.tables, *case.heads, 16, 16, q_data_type=F32)
    assert len(stub.planned) == 3  # what was used last has them anyway


def test_nothing_is_asked_when_there_is_nothing_to_do(stub: Stub) -> None:
    case = Paged(q_lens=(), kv_lens=())
    assert planned(case).run(case.q, case.pair).shape == (0, 4, 16)
    keyless = Paged(kv_lens=(0, 0, 0), **CASE)
    assert (planned(keyless).run(keyless.q, keyless.pair) == 0).all()
    assert stub.planned == []


def test_equal_batches_decide_once(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    decisions = []
    decide = ATTENTION.decide
    monkeypatch.setattr(ATTENTION, "decide", lambda *a: decisions.append(a) or decide(*a))
    for seed, lens in enumerate([(5, 1, 33), (6, 2, 31)]):
        case = Paged(kv_lens=lens, seed=seed, **CASE)
        planned(case).run(case.q, case.pair)
    assert len(decisions) == 1


def test_calls_are_logged_without_looking_at_values(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KERNELMUX_LOGLEVEL", "3")
    monkeypatch.setenv("KERNELMUX_LOGDEST", "stdout")
    kernelmux.reload()
    case = Paged(**CASE)
    planned(case).run(case.q, case.pair, sinks=torch.ones(4))
    text = capsys.readouterr().out
    assert "kernelmux decision attention/decode" in text
    assert "call attention/decode -> stub:attention/rich" in text
    assert "RunExtras(sinks=[4], causal_window_left=-1" in text


def test_calls_are_counted(stub: Stub) -> None:
    case = Paged(**CASE)
    with kernelmux.track():
        wrapper = planned(case)
        for _ in range(3):
            wrapper.run(case.q, case.pair)
    assert [(u.kernel, u.phase, u.calls) for u in kernelmux.usage()] == [("stub:attention", "decode", 3)]


def test_a_planned_batch_chooses_again_after_reload(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Paged(**CASE)
    wrapper = planned(case)
    wrapper.run(case.q, case.pair)
    with kernelmux.track():  # the wrapper was planned before
        wrapper.run(case.q, case.pair)
    assert [(u.kernel, u.calls) for u in kernelmux.usage()] == [("stub:attention", 1)]
    monkeypatch.setenv("KERNELMUX_BACKEND_ATTENTION", "reference")
    kernelmux.reload()
    assert wrapper.resolved_backend == "stub"  # of the last call
    close(wrapper.run(case.q, case.pair), case.expect()[0])
    assert stub.ran == ["plain"] * 2
    assert wrapper.resolved_backend == "reference"


def test_a_graph_keeps_its_kernel_and_says_so_after_reload(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Paged(**CASE)
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (4, 12, 3)]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", True, False, *buffers)
    wrapper.plan(*case.tables, *case.heads, 16, 16, q_data_type=F32)
    monkeypatch.setenv("KERNELMUX_BACKEND_ATTENTION", "reference")
    kernelmux.reload()
    wrapper.run(case.q, case.pair)
    assert (stub.ran, wrapper.resolved_backend) == (["rich"], "stub")


def test_batches_of_one_key_refuse_the_same_kernel_once(stub: Stub) -> None:
    case = Paged(**CASE)
    first, second = planned(case), planned(case)
    stub.refuse = "run"
    with pytest.warns(FallbackWarning, match="using the next") as caught:  # noqa: PT031
        for wrapper in (first, second):
            close(wrapper.run(case.q, case.pair), case.expect()[0])
    refused = [str(w.message).split(": ")[1].split(" ")[0] for w in caught]
    assert refused == ["stub:attention", "stub:attention/rich"]
    assert (first.resolved_backend, second.resolved_backend) == ("reference", "reference")


def test_a_reload_in_the_middle_of_a_plan_loses_nothing(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Paged(**CASE)
    select = ATTENTION.select

    def reloading(*args: Any) -> Any:
        found = select(*args)
        monkeypatch.setenv("KERNELMUX_BACKEND_ATTENTION", "reference")
        kernelmux.reload()  # as another thread may
        return found

    monkeypatch.setattr(ATTENTION, "select", reloading)
    wrapper = planned(case)
    monkeypatch.setattr(ATTENTION, "select", select)
    assert wrapper.resolved_backend == "stub"
    assert planned(case).resolved_backend == "reference"  # the choice from before the reload was not kept
    close(wrapper.run(case.q, case.pair), case.expect()[0])
    assert wrapper.resolved_backend == "reference"


def test_only_kernels_that_ran_are_counted(stub: Stub) -> None:
    case = Paged(**CASE)
    stub.refuse = "plan"
    with kernelmux.track(), pytest.warns(FallbackWarning, match="using the next"):
        planned(case).run(case.q, case.pair)
    assert [(use.kernel, use.calls) for use in kernelmux.usage()] == [("reference:attention", 1)]
    kernelmux.reload()
    stub.refuse = "run"
    with kernelmux.track(), pytest.warns(FallbackWarning, match="using the next"):
        planned(case).run(case.q, case.pair)
    assert [(use.kernel, use.calls) for use in kernelmux.usage()] == [("reference:attention", 1)]


def test_a_failed_choice_leaves_the_last_kernel_standing(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Paged(**CASE)
    wrapper = planned(case)
    monkeypatch.setenv("KERNELMUX_BACKEND", "no-such-backend")
    kernelmux.reload()
    with pytest.raises(kernelmux.SettingError, match="no-such-backend"):
        wrapper.run(case.q, case.pair)
    assert wrapper.resolved_backend == "stub"
