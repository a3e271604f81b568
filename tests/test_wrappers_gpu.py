"""The wrappers on a GPU, whatever kernels are able there: values, CUDA graphs, devices of index tensors."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelmux
from kernelmux import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    PlanError,
    fast_decode_plan,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
)

naive = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("naive_attention.py"))))
Paged, close, offsets = naive.Paged, naive.close, naive.offsets
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::kernelmux.FallbackWarning")]
BF16 = torch.bfloat16
SHAPE = {"heads": (8, 2), "dims": (64, 64), "dtype": BF16}
ONE = {"q_lens": (1, 1, 1)} | SHAPE


def gpu(value: Any) -> Any:
    return value.cuda() if isinstance(value, Tensor) else tuple(t.cuda() for t in value)


def workspace() -> Tensor:
    return torch.empty(1 << 20, dtype=torch.uint8, device="cuda")


def ints(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.int32, device="cuda")


def fixed(batch: int = 3, pages: int = 64) -> tuple[Any, list[Tensor]]:
    buffers = [ints(batch + 1), ints(pages), ints(batch)]
    return CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers), buffers


def plan_decode(wrapper: Any, case: Any, **options: Any) -> None:
    wrapper.plan(*case.tables, *case.heads, case.dims[0], case.page, q_data_type=BF16, **options)


def captured(function: Any) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


@pytest.mark.parametrize("on", ["cpu", "cuda"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_values(on: str, layout: str) -> None:
    case = Paged(layout=layout, **SHAPE)
    expected = case.expect(causal=True)
    indptr = case.qo_indptr.to(on)
    tables = [t.to(on) for t in case.tables]
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(), layout)
    wrapper.plan(indptr, *tables, 8, 2, 64, 16, causal=True, q_data_type=BF16)
    out, lse = wrapper.run(case.q.cuda(), gpu(case.pair), return_lse=True)
    close(out.cpu(), expected[0], 2e-2)
    close(lse.cpu(), expected[1], 2e-2)
    ragged = BatchPrefillWithRaggedKVCacheWrapper(workspace())
    ragged.plan(indptr, offsets(case.kv_lens).to(on), 8, 2, 64, causal=True, q_data_type=BF16)
    close(ragged.run(*gpu((case.q, torch.cat(case.ks), torch.cat(case.vs)))).cpu(), expected[0], 2e-2)
    one = Paged(layout=layout, **ONE)
    decode = BatchDecodeWithPagedKVCacheWrapper(workspace(), layout)
    decode.plan(*[t.to(on) for t in one.tables], 8, 2, 64, 16, q_data_type=BF16)
    close(decode.run(one.q.cuda(), one.single.cuda()).cpu(), one.expect()[0], 2e-2)


def test_a_graph_reads_what_later_plans_put_into_the_buffers() -> None:
    case = Paged(spare=60, **ONE)
    wrapper, buffers = fixed()
    plan_decode(wrapper, case)
    q, out = case.q.cuda(), torch.empty(3, 8, 64, dtype=BF16, device="cuda")
    k, v = (torch.zeros(64, 16, 2, 64, dtype=BF16, device="cuda") for _ in range(2))
    second = torch.empty_like(out)

    def layers() -> None:
        wrapper.run(q, (k, v), out=out)
        wrapper.run(q, (k, v), out=second)

    graph = captured(layers)
    for seed, lens in enumerate([(5, 1, 33), (160, 16, 17), (0, 700, 2)]):
        case = Paged(kv_lens=lens, seed=seed, spare=0, **ONE)
        for cache, values in zip((k, v), case.pair, strict=True):
            cache[: values.shape[0]] = values.cuda()
        q.copy_(case.q)
        if seed < 2:
            plan_decode(wrapper, case)
        else:
            for buffer, values in zip(buffers, case.tables, strict=True):
                buffer[: values.numel()] = values.cuda()
            sizes = (*case.heads, 64, 16)
            fast_decode_plan(wrapper, case.tables[0], buffers[1], case.tables[2], *sizes, q_data_type=BF16)
        graph.replay()
        close(out.cpu(), case.expect()[0], 2e-2)
        close(second.cpu(), case.expect()[0], 2e-2)


def test_each_capture_refreshes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Paged(**ONE)
    wrapper, _ = fixed()
    plan_decode(wrapper, case)
    updates = []
    update = type(wrapper._batch).update
    monkeypatch.setattr(type(wrapper._batch), "update", lambda batch: updates.append(batch) or update(batch))
    q, cache = case.q.cuda(), gpu(case.pair)
    wrapper.run(q, cache)
    assert len(updates) == 1
    from kernelmux.dispatch.attention.plan import _runtime

    for expected in (1, 1):
        updates.clear()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            for _ in range(3):
                wrapper.run(q, cache)
        assert len(updates) == (expected if _runtime() else 3)


def test_capturing_a_wrapper_that_is_not_for_graphs_raises() -> None:
    case = Paged(**ONE)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    plan_decode(wrapper, case)
    q, cache = case.q.cuda(), gpu(case.pair)
    wrapper.run(q, cache)
    with pytest.raises(PlanError, match="captured in a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        wrapper.run(q, cache)


def test_a_prefill_graph_with_fewer_rows() -> None:
    case = Paged(q_lens=(4, 2, 3), kv_lens=(20, 2, 33), **SHAPE)
    buffers = [ints(4), ints(4), ints(64), ints(3)]
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", True, *buffers)
    wrapper.plan(case.qo_indptr, *case.tables, 8, 2, 64, 16, causal=True, q_data_type=BF16)
    q, cache = case.q.cuda(), gpu(case.pair)
    results: list[Tensor] = []

    def layer() -> None:
        results[:] = [wrapper.run(q, cache)]

    graph = captured(layer)
    graph.replay()
    close(results[0].cpu(), case.expect(causal=True)[0], 2e-2)
    after = Paged(q_lens=(1, 2, 3), kv_lens=(20, 2, 33), **SHAPE)
    q[:6] = after.q.cuda()
    for old, new in zip(cache, after.pair, strict=True):
        old.copy_(new)
    wrapper.plan(after.qo_indptr, *after.tables, 8, 2, 64, 16, causal=True, q_data_type=BF16)
    graph.replay()
    close(results[0][:6].cpu(), after.expect(causal=True)[0], 2e-2)


def test_one_sequence_also_inside_a_capture() -> None:
    q, k, v = (torch.randn(n, h, 64).to(BF16).cuda() for n, h in ((5, 8), (40, 2), (40, 2)))
    expected = naive.attend(q.cpu(), k.cpu(), v.cpu(), causal=True)[0]
    close(single_prefill_with_kv_cache(q, k, v, causal=True).cpu(), expected, 2e-2)
    close(single_decode_with_kv_cache(q[-1], k, v).cpu(), expected[-1], 2e-2)
    graph, results = torch.cuda.CUDAGraph(), []
    try:
        with torch.cuda.graph(graph):
            results.append(single_decode_with_kv_cache(q[-1], k, v))
    except kernelmux.NoKernelError as error:
        pytest.skip(f"feature: {error}")
    graph.replay()
    close(results[0].cpu(), expected[-1], 2e-2)


def test_tensor_scales_stay_on_the_device() -> None:
    case = Paged(**ONE)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    plan_decode(wrapper, case)
    two = torch.tensor([2.0], device="cuda")
    out = wrapper.run(case.q.cuda(), gpu(case.pair), q_scale=two, k_scale=two, v_scale=two)
    close(out.cpu(), case.expect(scale=0.5)[0] * 2, 3e-2)


def test_other_devices_are_refused() -> None:
    case = Paged(**ONE)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    plan_decode(wrapper, case)
    with pytest.raises(ValueError, match="is on cpu, q on cuda:0"):
        wrapper.run(case.q.cuda(), case.pair)
    with pytest.raises(ValueError, match="is on cpu, planned is cuda:0"):
        wrapper.run(case.q, case.pair)
