"""How serving engines call the wrappers, and which private attributes they read and write: one test per engine."""

import math
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
    fast_decode_plan,
)

naive = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("naive_attention.py"))))
Paged, close, offsets = naive.Paged, naive.close, naive.offsets
F32 = torch.float32
LN2 = math.log(2)


def workspace() -> Tensor:
    return torch.zeros(1 << 10, dtype=torch.uint8)


def ints(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.int32)


def test_vllm_decode() -> None:
    case = Paged(q_lens=(1, 1, 1), layout="HND")
    indptr, indices, last = case.tables
    buffers = {
        "paged_kv_indptr_buffer": ints(4),
        "paged_kv_indices_buffer": ints(64),
        "paged_kv_last_page_len_buffer": ints(3),
    }
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace(), "HND", use_cuda_graph=True, **buffers, use_tensor_cores=True, backend="auto"
    )
    common = {
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "page_size": 16,
        "pos_encoding_mode": "NONE",
        "window_left": -1,
        "logits_soft_cap": None,
        "q_data_type": F32,
        "kv_data_type": F32,
        "data_type": None,
        "sm_scale": 0.3,
        "rope_scale": None,
        "rope_theta": None,
        "non_blocking": True,
        "fixed_split_size": -1,
        "disable_split_kv": False,
        "q_len_per_req": 1,
    }
    wrapper.plan(
        indptr=indptr,
        indices=indices,
        last_page_len=last,
        **common,
        o_data_type=F32,
        block_tables=None,
        seq_lens=torch.tensor(case.kv_lens, dtype=torch.int32),
    )
    assert wrapper._window_left == -1
    assert wrapper._logits_soft_cap == 0.0
    assert wrapper._logits_soft_cap is not None
    assert wrapper._sm_scale == 0.3
    out = torch.empty(3, 4, 16)
    wrapper.run(case.q, case.pair, q_scale=1.0, k_scale=0.5, v_scale=2.0, out=out, kv_cache_sf=None, sinks=None)
    close(out, case.expect(scale=0.15)[0] * 2)
    lse = torch.empty(3, 4)
    wrapper.run(case.q, case.pair, k_scale=1.0, v_scale=1.0, out=out, lse=lse, return_lse=True)
    close(lse, case.expect(scale=0.3)[1])
    buffers["paged_kv_indices_buffer"][: int(indptr[-1])] = indices[: int(indptr[-1])]
    fast_decode_plan(wrapper, indptr=indptr, indices=buffers["paged_kv_indices_buffer"], last_page_len=last, **common)
    close(wrapper.run(case.q, case.pair), case.expect(scale=0.3)[0])
    sinks = torch.ones(4)
    close(wrapper.run(case.q, case.pair, sinks=sinks), case.expect(scale=0.3, sinks=sinks)[0])


def test_vllm_prefill_and_context_parallel_ragged() -> None:
    case = Paged()
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", backend="auto")
    wrapper.plan(
        qo_indptr=case.qo_indptr,
        paged_kv_indptr=case.tables[0],
        paged_kv_indices=case.tables[1],
        paged_kv_last_page_len=case.tables[2],
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim_qk=16,
        page_size=16,
        causal=True,
        sm_scale=0.25,
        window_left=8,
        logits_soft_cap=0.0,
        q_data_type=F32,
        kv_data_type=F32,
        o_data_type=F32,
        fixed_split_size=None,
        disable_split_kv=False,
        seq_lens=torch.tensor(case.kv_lens, dtype=torch.int32),
    )
    assert (wrapper._causal, wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale) == (True, 8, 0.0, 0.25)
    out = torch.empty(6, 4, 16)
    wrapper.run(case.q, case.pair, q_scale=1.0, k_scale=1.0, v_scale=1.0, out=out, kv_cache_sf=None)
    close(out, case.expect(causal=True, window=8)[0])
    _, lse = wrapper.run(case.q, case.pair, return_lse=True, k_scale=1.0, v_scale=1.0)
    close(lse * LN2, case.expect(causal=True, window=8)[1] * LN2)
    fresh = Paged(q_lens=(2, 3), kv_lens=(2, 3), dims=(24, 16))
    new_tokens = BatchPrefillWithRaggedKVCacheWrapper(workspace())
    new_tokens.plan(
        qo_indptr=fresh.qo_indptr,
        kv_indptr=fresh.qo_indptr,
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim_qk=24,
        head_dim_vo=16,
        causal=True,
        sm_scale=0.2,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type=F32,
    )
    out, lse = new_tokens.run(fresh.q, torch.cat(fresh.ks), torch.cat(fresh.vs), return_lse=True)
    close(out, fresh.expect(causal=True, scale=0.2)[0])
    close(lse, fresh.expect(causal=True, scale=0.2)[1])


def test_vllm_sparse_prefill_overwrites_the_page_table() -> None:
    worst = Paged(q_lens=(1, 1, 1), kv_lens=(24, 24, 24), heads=(4, 1), page=8)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD")
    wrapper.plan(
        *(worst.qo_indptr, *worst.tables, 4, 1, 16, 8),
        q_data_type=F32,
        disable_split_kv=True,
        max_token_per_sequence=1,
    )
    case = Paged(q_lens=(1, 1, 1), kv_lens=(3, 17, 0), heads=(4, 1), page=8)
    wrapper._paged_kv_indices_buf = case.tables[1]
    wrapper._paged_kv_indptr_buf, wrapper._paged_kv_last_page_len_buf = case.tables[0], case.tables[2]
    close(wrapper.run(case.q, case.pair), case.expect()[0])


@pytest.mark.parametrize("graph", [False, True])
def test_sglang_decode(graph: bool) -> None:
    case = Paged(q_lens=(1, 1, 1), page=1)
    buffers = {
        "paged_kv_indptr_buffer": ints(4),
        "paged_kv_indices_buffer": ints(64),
        "paged_kv_last_page_len_buffer": torch.ones(3, dtype=torch.int32),
    }
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace(), "NHD", use_cuda_graph=graph, use_tensor_cores=True, **(buffers if graph else {})
    )
    wrapper._int_workspace_buffer.zero_()
    last = torch.ones(3, dtype=torch.int32)
    last[1] = 0 if case.kv_lens[1] == 0 else 1
    args = (case.tables[0], case.tables[1], last, 4, 2, 16, 1)
    options = {"data_type": F32, "q_data_type": F32, "non_blocking": True}
    wrapper.begin_forward(*args, **options, fixed_split_size=None, disable_split_kv=False)
    cache = tuple(c.view(-1, 2, 16) for c in case.pair)
    for _ in range(2):
        out = wrapper.forward(case.q, cache, sm_scale=0.3, logits_soft_cap=5.0, k_scale=None, v_scale=None)
        close(out, case.expect(scale=0.3, cap=5.0)[0])
        wrapper.begin_forward = partial(fast_decode_plan, wrapper)
        assert wrapper.begin_forward.func == fast_decode_plan
        wrapper.begin_forward(
            *args, **options, fixed_split_size=None, disable_split_kv=False, global_override_indptr_cpu=case.tables[0]
        )


def test_sglang_prefill() -> None:
    case = Paged(page=1)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD")
    indices = torch.cat((case.tables[1], ints(256)))
    wrapper.begin_forward(
        *(case.qo_indptr, case.tables[0], indices, case.tables[2].clamp(max=1), 4, 2, 16, 1),
        q_data_type=F32,
        kv_data_type=F32,
        custom_mask=None,
        non_blocking=True,
        fixed_split_size=None,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
    )
    cache = tuple(c.view(-1, 2, 16) for c in case.pair)
    options = {"sm_scale": 0.3, "window_left": 4, "logits_soft_cap": 2.0, "k_scale": None, "v_scale": None}
    close(
        wrapper.forward(case.q, cache, causal=True, **options),
        case.expect(causal=True, window=4, cap=2.0, scale=0.3)[0],
    )
    out, lse = wrapper.forward_return_lse(case.q, cache, causal=False, sm_scale=0.3, logits_soft_cap=0.0)
    close(out, case.expect(scale=0.3)[0])
    close(lse, case.expect(scale=0.3)[1])
    new = Paged(q_lens=(2, 3), kv_lens=(2, 3))
    ragged = BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD")
    ragged.begin_forward(new.qo_indptr, new.qo_indptr, 4, 2, 16, q_data_type=F32)
    packed = (torch.cat(new.ks), torch.cat(new.vs))
    close(ragged.forward(new.q, *packed, causal=True, sm_scale=0.25, logits_soft_cap=0.0), new.expect(causal=True)[0])
    lse = ragged.forward_return_lse(new.q, *packed, causal=True, sm_scale=0.25, window_left=1, logits_soft_cap=0.0)[1]
    close(lse, new.expect(causal=True, window=1)[1])


def test_sglang_replays_prefill_behind_plan() -> None:
    """fast_prefill_plan fills the buffers, calls _cached_module.plan and writes planned state."""
    case = Paged()
    buffers = [ints(4), ints(4), ints(12), ints(3)]
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", True, *buffers)
    wrapper.plan(case.qo_indptr, *case.tables, 4, 2, 16, 16, causal=True, q_data_type=F32)
    after = Paged(q_lens=(1, 2, 1), kv_lens=(3, 20, 9), seed=5)
    for buffer, values in zip(buffers, (after.qo_indptr, *after.tables), strict=True):
        buffer[: values.numel()] = values
    kv_lens = torch.tensor(after.kv_lens)

    def cached_plan(kv_lens: Tensor) -> Any:
        return wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            after.qo_indptr,
            after.tables[0],
            kv_lens,
            wrapper._max_total_num_rows,
            *(3, 4, 2, 16, True, 16, 16, True, -1, -1, False, 0, 0),
        )

    wrapper._plan_info = cached_plan(kv_lens)
    wrapper._qo_indptr_last, wrapper._batch_size, wrapper._num_qo_heads = 4, 3, 4
    close(wrapper.run(after.q, after.pair), after.expect(causal=True)[0])
    with pytest.raises(ValueError, match="keys in the longest sequence: 999 needed"):
        cached_plan(torch.tensor([999, 1, 1]))


def test_minisglang() -> None:
    case = Paged(q_lens=(1, 1, 1), page=1)
    cache = tuple(c.view(-1, 1, 2, 16) for c in case.pair)
    decode = BatchDecodeWithPagedKVCacheWrapper(workspace(), kv_layout="NHD", use_tensor_cores=True)
    prefill = BatchPrefillWithPagedKVCacheWrapper(workspace(), kv_layout="NHD")
    prefill._int_workspace_buffer = decode._int_workspace_buffer
    assert prefill._int_workspace_buffer is decode._int_workspace_buffer
    assert decode._int_workspace_buffer.dtype == torch.uint8
    graph = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        workspace(),
        kv_layout="NHD",
        use_tensor_cores=True,
        indptr_buffer=ints(4),
        indices_buffer=ints(64),
        last_page_len_buffer=ints(3),
    )
    graph._backend = "fa2"
    options = {
        "pos_encoding_mode": "NONE",
        "data_type": F32,
        "q_data_type": F32,
        "kv_data_type": F32,
        "seq_lens": torch.tensor(case.kv_lens, dtype=torch.int32),
        "non_blocking": True,
    }
    last = case.tables[2]
    for wrapper in (decode, graph):
        wrapper.plan(
            indptr=case.tables[0],
            indices=case.tables[1],
            last_page_len=last,
            num_qo_heads=4,
            num_kv_heads=2,
            head_dim=16,
            page_size=1,
            **options,
        )
        close(wrapper.run(q=case.q, paged_kv_cache=cache), case.expect()[0])
    assert graph._backend == "fa2"
    del options["data_type"]
    prefill.plan(
        qo_indptr=case.qo_indptr,
        paged_kv_indptr=case.tables[0],
        paged_kv_indices=case.tables[1],
        paged_kv_last_page_len=last,
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim_qk=16,
        page_size=1,
        causal=True,
        **options,
    )
    close(prefill.run(q=case.q, paged_kv_cache=cache), case.expect(causal=True)[0])


def test_lightllm() -> None:
    case = Paged(q_lens=(1, 1, 1), page=1)
    both = torch.cat([c.view(-1, 2, 16) for c in case.pair], dim=1)
    views = (both[:, :2].unsqueeze(1), both[:, 2:].unsqueeze(1))
    assert not views[0].is_contiguous()
    decode = BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", use_tensor_cores=True)
    decode.plan(*case.tables, 4, 2, 16, 1, q_data_type=F32, kv_data_type=F32, non_blocking=True)
    out = torch.empty(3, 4, 16)
    decode.run(case.q, views, out=out)
    close(out, case.expect()[0])
    prefill = BatchPrefillWithPagedKVCacheWrapper(workspace(), qo_indptr_buf=ints(4), paged_kv_indptr_buf=ints(4))
    prefill.plan(
        *(case.qo_indptr, *case.tables, 4, 2, 16, 1),
        causal=True,
        pos_encoding_mode="NONE",
        logits_soft_cap=0.0,
        q_data_type=F32,
        kv_data_type=F32,
    )
    prefill.run(case.q, views, out=out)
    close(out, case.expect(causal=True)[0])
    new = Paged(q_lens=(2, 3), kv_lens=(2, 3), heads=(4, 4), dims=(24, 16))
    ragged = BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD")
    ragged.plan(
        qo_indptr=new.qo_indptr,
        kv_indptr=new.qo_indptr,
        num_qo_heads=4,
        num_kv_heads=4,
        head_dim_qk=24,
        head_dim_vo=16,
        q_data_type=F32,
        causal=True,
        sm_scale=0.1,
    )
    out = torch.empty(5, 4, 16)
    ragged.run(new.q, torch.cat(new.ks), torch.cat(new.vs), out=out)
    close(out, new.expect(causal=True, scale=0.1)[0])


@pytest.mark.parametrize("graph", [False, True])
def test_tensorrt_llm(graph: bool) -> None:
    case = Paged(layout="HND")
    prefill = BatchPrefillWithPagedKVCacheWrapper(
        workspace(),
        "HND",
        qo_indptr_buf=ints(4),
        paged_kv_indptr_buf=ints(4),
        paged_kv_indices_buf=ints(16),
        paged_kv_last_page_len_buf=ints(3),
        use_cuda_graph=graph,
    )
    prefill.plan(case.qo_indptr, *case.tables, 4, 2, 16, 16, causal=True, q_data_type=F32, kv_data_type=F32)
    close(prefill.run(case.q, case.single), case.expect(causal=True)[0])


def test_tgi() -> None:
    case = Paged(q_lens=(1, 1, 1))
    decode = BatchDecodeWithPagedKVCacheWrapper(
        workspace(),
        kv_layout="NHD",
        use_cuda_graph=True,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=ints(4),
        paged_kv_indices_buffer=ints(16),
        paged_kv_last_page_len_buffer=ints(3),
    )
    decode.plan(*case.tables, num_qo_heads=4, num_kv_heads=2, head_dim=16, page_size=16, data_type=F32, q_data_type=F32)
    out = decode.forward(
        case.q,
        paged_kv_cache=case.pair,
        logits_soft_cap=None,
        sm_scale=0.4,
        k_scale=torch.tensor(0.5),
        v_scale=torch.tensor(2.0),
        window_left=3,
    )
    close(out, case.expect(scale=0.2, window=3)[0] * 2)
    prefill = BatchPrefillWithPagedKVCacheWrapper(workspace(), kv_layout="NHD", use_cuda_graph=False)
    prefill.plan(
        *(case.qo_indptr, *case.tables),
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim_qk=16,
        page_size=16,
        q_data_type=F32,
        kv_data_type=F32,
    )
    out = prefill.forward(
        case.q,
        paged_kv_cache=case.pair,
        causal=True,
        logits_soft_cap=None,
        sm_scale=0.4,
        k_scale=1.0,
        v_scale=1.0,
        window_left=-1,
    )
    close(out, case.expect(scale=0.4, causal=True)[0])


def test_workspaces_are_replaced_and_their_mirror_follows() -> None:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace())
    first = wrapper._pin_memory_int_workspace_buffer
    assert first.shape == wrapper._int_workspace_buffer.shape == (8 << 20,)
    wrapper.reset_workspace_buffer(torch.zeros(64, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8))
    assert wrapper._pin_memory_int_workspace_buffer.shape == (32,)
    assert wrapper._float_workspace_buffer.numel() == 64
    mirror = torch.zeros(4, dtype=torch.uint8)
    wrapper._pin_memory_int_workspace_buffer = mirror
    assert wrapper._pin_memory_int_workspace_buffer is mirror
    assert wrapper.workspace_size(ints(2), ints(2), ints(1), ints(1), 4, 2, 16, 16, causal=True) == (0, 0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'"):
        wrapper.workspace_size(ints(2), ints(2), ints(1), ints(1), 4, 2, 16, 16, casual=True)
    with pytest.raises(ValueError, match="aligned to 16 bytes"):
        BatchPrefillWithPagedKVCacheWrapper(torch.zeros(64, dtype=torch.uint8)[1:])
    with pytest.raises(TypeError, match="float_workspace_buffer is a int"):
        BatchPrefillWithPagedKVCacheWrapper(128)  # type: ignore[arg-type]


def test_attributes_are_free() -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)
    wrapper._max_item_len_ptr = wrapper.anything = None
    assert wrapper.use_tensor_cores
    assert (wrapper.resolved_backend, wrapper._backend) == ("auto", "auto")
