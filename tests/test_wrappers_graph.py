"""Wrappers in graph mode: fixed buffers, replans in place, growth, and what a run reads at launch."""

import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernelmux import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    NoKernelError,
    PlanError,
    fast_decode_plan,
)
from kernelmux.dispatch.attention.op import ATTENTION, request_of
from kernelmux.dispatch.resolve import AllInstalled, Candidates, resolve
from kernelmux.dispatch.settings import Settings

naive = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("naive_attention.py"))))
Paged, close, offsets = naive.Paged, naive.close, naive.offsets
F32 = torch.float32


def ints(n: int) -> Tensor:
    return torch.full((n,), 12345, dtype=torch.int32)


def workspace() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def fixed_decode(batch: int = 3, pages: int = 12) -> tuple[CUDAGraphBatchDecodeWithPagedKVCacheWrapper, list[Tensor]]:
    buffers = [ints(batch + 1), ints(pages), ints(batch)]
    return CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers), buffers


def fixed_prefill(
    batch: int = 3, pages: int = 12, **kwargs: Any
) -> tuple[BatchPrefillWithPagedKVCacheWrapper, list[Tensor]]:
    buffers = [ints(batch + 1), ints(batch + 1), ints(pages), ints(batch)]
    return BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", True, *buffers, **kwargs), buffers


def plan_decode(wrapper: Any, case: Any, **options: Any) -> None:
    wrapper.plan(*case.tables, *case.heads, 16, 16, **{"q_data_type": F32} | options)


def plan_prefill(wrapper: Any, case: Any, **options: Any) -> None:
    wrapper.plan(case.qo_indptr, *case.tables, *case.heads, 16, 16, **{"q_data_type": F32} | options)


ONE = {"q_lens": (1, 1, 1)}


def test_plan_copies_into_the_buffers_and_leaves_the_rest_alone() -> None:
    case = Paged(**ONE)
    wrapper, (indptr, indices, last) = fixed_decode()
    plan_decode(wrapper, case)
    assert torch.equal(indptr, case.tables[0])
    assert torch.equal(last, case.tables[2])
    used = int(case.tables[0][-1])
    assert torch.equal(indices[:used], case.tables[1][:used])
    assert (indices[used:] == 12345).all()
    assert wrapper.is_cuda_graph_enabled
    assert wrapper._paged_kv_indptr_buf is indptr


def test_replans_in_place_keep_batch_and_runners() -> None:
    wrapper, _ = fixed_decode()
    kept = None
    for seed, lens in enumerate([(5, 0, 33), (16, 17, 1), (1, 1, 48)]):
        case = Paged(kv_lens=lens, seed=seed, **ONE)
        plan_decode(wrapper, case)
        close(wrapper.run(case.q, case.pair), case.expect()[0])
        assert kept in (None, (id(wrapper._batch), id(wrapper._active)))
        kept = (id(wrapper._batch), id(wrapper._active))


def test_a_run_reads_the_buffers_at_launch() -> None:
    wrapper, buffers = fixed_decode()
    plan_decode(wrapper, Paged(**ONE))
    table = wrapper._batch.block_table()
    after = Paged(kv_lens=(20, 7, 9), seed=4, **ONE)
    for buffer, values in zip(buffers, after.tables, strict=True):
        buffer[: values.numel()] = values
    close(wrapper.run(after.q, after.pair), after.expect()[0])
    assert wrapper._batch.block_table() is table
    assert table[0, :2].tolist() == after.tables[1][:2].tolist()


def test_fast_decode_plan_trusts_the_buffers() -> None:
    wrapper, buffers = fixed_decode()
    with pytest.raises(PlanError, match=r"before plan\(\)"):
        fast_decode_plan(wrapper, *buffers, 4, 2, 16, 16)
    plan_decode(wrapper, Paged(**ONE))
    wrapper.begin_forward = partial(fast_decode_plan, wrapper)
    after = Paged(kv_lens=(20, 7, 9), seed=4, **ONE)
    for buffer, values in zip(buffers, after.tables, strict=True):
        buffer[: values.numel()] = values
    wrapper.begin_forward(*after.tables, *after.heads, 16, 16, sm_scale=0.5, global_override_indptr_cpu=after.tables[0])
    close(wrapper.run(after.q, after.pair), after.expect(scale=0.5)[0])
    assert wrapper.begin_forward.func == fast_decode_plan
    long = Paged(kv_lens=(16 * 20, 1, 1), **ONE)
    with pytest.raises(ValueError, match="320 needed, this wrapper's CUDA graph has room for 192"):
        wrapper.begin_forward(long.tables[0], ints(99), long.tables[2], *after.heads, 16, 16)


def test_fast_decode_plan_of_an_eager_wrapper_is_plan() -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    plan_decode(wrapper, Paged(**ONE))
    case = Paged(q_lens=(1, 1), kv_lens=(40, 2))
    fast_decode_plan(wrapper, *case.tables, *case.heads, 16, 16)
    close(wrapper.run(case.q, case.pair), case.expect()[0])


def test_several_queries_per_sequence() -> None:
    wrapper, _ = fixed_decode(2)
    case = Paged(q_lens=(3, 3), kv_lens=(3, 20))
    plan_decode(wrapper, case, q_len_per_req=3)
    close(wrapper.run(case.q, case.pair), case.expect(causal=True)[0])
    with pytest.raises(ValueError, match="q_len_per_req is 1, this wrapper's CUDA graph was planned with 3"):
        plan_decode(wrapper, case)


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (
            Paged(q_lens=(1, 1), kv_lens=(1, 1)),
            {},
            "the batch has 2 sequences, this wrapper's CUDA graph is made for 3",
        ),
        (Paged(kv_lens=(16 * 13, 1, 1), **ONE), {}, "keys in the longest sequence: 208 needed.*room for 192"),
        (Paged(kv_lens=(96, 96, 16), **ONE), {}, "paged_kv_indices_buf: 13 entries needed, the buffer has 12"),
        (Paged(page=4, **ONE), {"page_size": 4}, "page_size is 4, this wrapper's CUDA graph was planned with 16"),
    ],
)
def test_growth_of_decode_says_need_and_have(case: Any, options: dict[str, Any], message: str) -> None:
    wrapper, _ = fixed_decode()
    plan_decode(wrapper, Paged(**ONE))
    with pytest.raises(ValueError, match=message):
        wrapper.plan(*case.tables, *case.heads, 16, options.get("page_size", 16), q_data_type=F32)


def test_a_declared_longest_sequence_bounds_the_table() -> None:
    wrapper, _ = fixed_decode(pages=4096)
    plan_decode(wrapper, Paged(**ONE), max_sequence_kv=64)
    assert wrapper._batch.block_table().shape == (3, 4)
    with pytest.raises(ValueError, match="65 needed, this wrapper's CUDA graph has room for 64"):
        plan_decode(wrapper, Paged(kv_lens=(65, 1, 1), **ONE))
    with pytest.raises(ValueError, match="max_sequence_kv is 32, the longest sequence is 33"):
        plan_decode(wrapper, Paged(**ONE), max_sequence_kv=32)


def test_the_table_of_a_large_pool_stays_small() -> None:
    wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), ints(257), ints(1 << 24), ints(256))
    case = Paged(q_lens=(1,) * 256, kv_lens=(1,) * 256, page=1)
    wrapper.plan(*case.tables, 4, 2, 16, 1, q_data_type=F32)
    assert wrapper._batch.table_width == 1 << 17


def test_prefill_in_buffers() -> None:
    wrapper, buffers = fixed_prefill()
    case = Paged()
    plan_prefill(wrapper, case, causal=True)
    close(wrapper.run(case.q, case.pair), case.expect(causal=True)[0])
    fewer = Paged(q_lens=(1, 1, 2), kv_lens=(9, 2, 2), seed=3)
    plan_prefill(wrapper, fewer, causal=True)
    assert buffers[0].tolist() == [0, 1, 2, 4]
    padded = torch.cat((fewer.q, torch.full((2, 4, 16), float("nan"))))
    out = wrapper.run(padded, fewer.pair)
    close(out[:4], fewer.expect(causal=True)[0])
    assert (out[4:] == 0).all()
    with pytest.raises(ValueError, match="q has 7 rows, plan"):
        wrapper.run(torch.zeros(7, 4, 16), fewer.pair)
    with pytest.raises(ValueError, match="7 needed, this wrapper's CUDA graph has room for 6"):
        plan_prefill(wrapper, Paged(q_lens=(2, 2, 3), kv_lens=(3, 3, 3)), causal=True)
    with pytest.raises(ValueError, match="the batch has 2 sequences, this wrapper's CUDA graph is made for 3"):
        plan_prefill(wrapper, Paged(q_lens=(1, 1), kv_lens=(3, 3)))


def test_prefill_bounds_are_those_of_the_first_plan() -> None:
    wrapper, _ = fixed_prefill()
    plan_prefill(wrapper, Paged(q_lens=(2, 2, 2)), max_token_per_sequence=2, max_sequence_kv=40)
    assert (wrapper._batch.max_q_len, wrapper._batch.max_kv_len) == (2, 40)
    with pytest.raises(ValueError, match=r"queries in the longest sequence: 3 needed.*room for 2"):
        plan_prefill(wrapper, Paged(q_lens=(3, 1, 2)))


def test_masks_in_buffers() -> None:
    case = Paged()
    masks = [torch.arange(n * m).reshape(n, m) % 3 != 1 for n, m in zip(case.q_lens, case.kv_lens, strict=True)]
    flat = torch.cat([m.reshape(-1) for m in masks])
    mask_buf, mask_indptr = torch.full((64,), 77, dtype=torch.uint8), ints(4)
    wrapper, _ = fixed_prefill(custom_mask_buf=mask_buf, mask_indptr_buf=mask_indptr)
    plan_prefill(wrapper, case, custom_mask=flat)
    close(wrapper.run(case.q, case.pair), case.expect(masks=masks)[0])
    assert mask_indptr.tolist() == [0, 2, 2, 15]
    assert (mask_buf[15:] == 77).all()
    mask_buf[:15] = 255
    close(wrapper.run(case.q, case.pair), case.expect()[0])
    plan_prefill(wrapper, case, causal=True)
    close(wrapper.run(case.q, case.pair), case.expect(causal=True)[0])
    assert wrapper._custom_mask_buf is mask_buf
    small, _ = fixed_prefill(custom_mask_buf=mask_buf[:8], mask_indptr_buf=mask_indptr)
    with pytest.raises(ValueError, match="custom_mask needs 15 bytes, custom_mask_buf has 8"):
        plan_prefill(small, case, custom_mask=flat)
    short, _ = fixed_prefill(custom_mask_buf=mask_buf, mask_indptr_buf=mask_indptr[:3])
    with pytest.raises(ValueError, match="mask_indptr needs 4 entries, mask_indptr_buf has 3"):
        plan_prefill(short, case, custom_mask=flat)
    wrong, _ = fixed_prefill(custom_mask_buf=mask_buf.int(), mask_indptr_buf=mask_indptr)
    with pytest.raises(ValueError, match="custom_mask_buf is int32"):
        plan_prefill(wrong, case, custom_mask=flat)
    none, _ = fixed_prefill()
    with pytest.raises(ValueError, match="custom_mask_buf or mask_indptr_buf is None; pass both"):
        plan_prefill(none, case, custom_mask=flat)


def test_ragged_in_buffers() -> None:
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", True, ints(4), ints(4))
    for lens in ((5, 0, 33), (2, 0, 3)):
        case = Paged(kv_lens=lens)
        wrapper.plan(case.qo_indptr, offsets(lens), *case.heads, 16, causal=True, q_data_type=F32)
        close(wrapper.run(case.q, torch.cat(case.ks), torch.cat(case.vs)), case.expect(causal=True)[0])
    with pytest.raises(ValueError, match="39 needed, this wrapper's CUDA graph has room for 38"):
        wrapper.plan(case.qo_indptr, offsets((39, 0, 0)), *case.heads, 16, q_data_type=F32)


def test_buffers_are_checked_when_the_wrapper_is_made() -> None:
    with pytest.raises(ValueError, match="paged_kv_indptr_buffer is None with use_cuda_graph=True"):
        BatchDecodeWithPagedKVCacheWrapper(workspace(), use_cuda_graph=True)
    with pytest.raises(ValueError, match=r"indices_buffer is \[8\] of int64 on cpu, it must be 1-D int32"):
        CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), ints(2), ints(8).long(), ints(1))
    with pytest.raises(ValueError, match="paged_kv_indptr_buffer has 3 entries, it must have 2"):
        CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), ints(3), ints(8), ints(1))
    with pytest.raises(ValueError, match="qo_indptr_buf is None"):
        BatchPrefillWithPagedKVCacheWrapper(workspace(), use_cuda_graph=True)
    with pytest.raises(ValueError, match="kv_indptr_buf is None"):
        BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", True, ints(2))


# -- engines replace private attributes after plan() ------------------------------------------------------------


def test_an_eager_run_reads_index_tensors_written_after_plan() -> None:
    worst = Paged(kv_lens=(48, 48, 48), **ONE)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    plan_decode(wrapper, worst)
    case = Paged(kv_lens=(20, 7, 9), **ONE)
    wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf = case.tables
    close(wrapper.run(case.q, case.pair), case.expect()[0])
    case.tables[2][1] = 3  # the very tensor is read, not a copy
    shorter = naive.attend(case.q[1:2], case.ks[1][:3], case.vs[1][:3])[0]
    close(wrapper.run(case.q, case.pair)[1:2], shorter)
    plan_decode(wrapper, worst)
    close(wrapper.run(worst.q, worst.pair), worst.expect()[0])


def test_a_replaced_mask_is_read() -> None:
    case = Paged()
    wrapper, _ = fixed_prefill(custom_mask_buf=torch.zeros(64, dtype=torch.uint8), mask_indptr_buf=ints(4))
    plan_prefill(wrapper, case, custom_mask=torch.zeros(109, dtype=torch.bool))
    wrapper._custom_mask_buf = torch.full((64,), 255, dtype=torch.uint8)
    wrapper._mask_indptr_buf = offsets((2, 0, 13))
    close(wrapper.run(case.q, case.pair), case.expect()[0])


# -- the choice -------------------------------------------------------------------------------------------------


def test_on_a_gpu_a_graph_needs_a_kernel_that_is_safe_in_it() -> None:
    wrapper, _ = fixed_decode()
    plan_decode(wrapper, Paged(**ONE))
    spec = wrapper._base.variant(("use_cuda_graph", True)).spec
    request = request_of(spec, wrapper._batch, 0)
    assert "cuda_graph" in request.features
    from kernelmux import Device

    with pytest.raises(NoKernelError, match="reference:attention: cuda_graph: this kernel synchronises with the host"):
        resolve(
            request, Device("cuda", "a GPU", 90), Candidates([], ATTENTION.reference), (), Settings(), AllInstalled()
        )


def test_running_before_planning() -> None:
    q, cache = torch.zeros(1, 4, 16), torch.zeros(1, 2, 16, 2, 16)
    for wrapper, args in (
        (BatchDecodeWithPagedKVCacheWrapper(workspace()), (q, cache)),
        (BatchPrefillWithPagedKVCacheWrapper(workspace()), (q, cache)),
        (BatchPrefillWithRaggedKVCacheWrapper(workspace()), (q, q, q)),
    ):
        for method in (wrapper.run, wrapper.forward):
            with pytest.raises(PlanError, match=r"run\(\) is called before plan\(\); call plan\(\)"):
                method(*args)
