"""What the attention wrappers refuse, in words that name argument, value, limit and remedy."""

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
    BatchPrefillWithCausalBidirectionalRangesWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    SettingError,
)

naive = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("naive_attention.py"))))
Paged, offsets = naive.Paged, naive.offsets
F32 = torch.float32


def workspace() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def plan(**changes: Any) -> BatchPrefillWithPagedKVCacheWrapper:
    """A paged prefill plan of two sequences with some arguments changed."""
    arguments = {
        "qo_indptr": ints(0, 2, 3),
        "paged_kv_indptr": ints(0, 2, 3),
        "paged_kv_indices": ints(0, 1, 2),
        "paged_kv_last_page_len": ints(3, 1),
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim_qk": 16,
        "page_size": 4,
        "q_data_type": F32,
    }
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace())
    wrapper.plan(**(arguments | changes))
    return wrapper


ITEMS = {"prefix_len_ptr": ints(1, 1), "token_pos_in_items_ptr": ints(0, 0), "max_item_len_ptr": ints(1, 1)}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_qo_heads": 5}, ValueError, "num_qo_heads is 5, it must be a multiple of num_kv_heads 2"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads is 0, it must be an int of at least 1"),
        ({"head_dim_qk": 16.5}, ValueError, "head_dim_qk is 16.5, it must be an int"),
        ({"page_size": 0}, ValueError, "page_size is 0, it must be an int of at least 1"),
        ({"pos_encoding_mode": "ROPE"}, ValueError, "pos_encoding_mode is 'ROPE', one of NONE, ROPE_LLAMA, ALIBI"),
        ({"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap is -1.0, it must not be negative"),
        ({"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 0.0}, ValueError, "rope_scale is 0.0"),
        ({"pos_encoding_mode": "ROPE_LLAMA", "head_dim_qk": 15}, ValueError, "head_dim_qk is 15"),
        ({"q_data_type": "half16"}, TypeError, "q_data_type is 'half16', it must be a torch dtype or its name"),
        ({"kv_data_type": 3}, TypeError, "kv_data_type is 3"),
        ({"q_data_type": torch.int8}, ValueError, "q_data_type is int8, it must be a floating dtype"),
        ({"kv_data_type": torch.int8}, ValueError, "kv_data_type is int8.*or uint8 for NVFP4"),
        ({"qo_indptr": [0, 2, 3]}, TypeError, "qo_indptr is a list, it must be an int32 tensor"),
        ({"qo_indptr": torch.tensor([0.0, 2, 3])}, ValueError, r"qo_indptr has shape \[3\] of float32"),
        ({"qo_indptr": ints(0, 3)}, ValueError, "qo_indptr has 2 entries and paged_kv_indptr 3; both need batch"),
        ({"qo_indptr": ints(0, 3, 2)}, ValueError, "qo_indptr gives a sequence the length -1"),
        ({"qo_indptr": ints(1, 2, 3)}, ValueError, r"qo_indptr\[0\] is 1, it must be 0"),
        ({"paged_kv_last_page_len": ints(3)}, ValueError, "paged_kv_last_page_len has 1 entries.*describes 2"),
        ({"paged_kv_last_page_len": ints(3, -5)}, ValueError, "paged_kv_last_page_len gives a sequence the length -5"),
        ({"paged_kv_indices": ints(0, 1)}, ValueError, r"paged_kv_indptr\[-1\] is 3, there are 2 page ids"),
        (
            {"custom_mask": torch.ones(14, dtype=torch.bool)},
            ValueError,
            "custom_mask has 14 elements, the batch has 15",
        ),
        ({"custom_mask": torch.ones(15)}, ValueError, "custom_mask is float32, it must be bool"),
        ({"packed_custom_mask": torch.ones(2, dtype=torch.uint8)}, ValueError, "has 2 bytes, the batch needs 3"),
        ({"packed_custom_mask": torch.ones(3)}, ValueError, "packed_custom_mask is float32, it must be uint8"),
        ({"prefix_len_ptr": ints(1, 1)}, ValueError, "token_pos_in_items_ptr is None, multi-item scoring needs"),
        (ITEMS, ValueError, "token_pos_in_items_len is 0, it must be the padded row length"),
        ({"max_token_per_sequence": 1}, ValueError, "max_token_per_sequence is 1, the longest query is 2"),
        ({"max_sequence_kv": 6}, ValueError, "max_sequence_kv is 6, the longest sequence is 7"),
        ({"uniform_q_len": 2}, ValueError, "uniform_q_len is 2, qo_indptr gives other lengths"),
    ],
)
def test_what_plan_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan(**changes)


def test_a_refused_plan_leaves_the_last_one_in_force() -> None:
    case = Paged()
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace())
    wrapper.plan(case.qo_indptr, *case.tables, 4, 2, 16, 16, q_data_type=F32, sm_scale=0.5)
    with pytest.raises(ValueError, match="paged_kv_last_page_len has 3 entries"):
        wrapper.plan(case.qo_indptr, case.tables[0][:2], *case.tables[1:], 4, 2, 16, 16, q_data_type=torch.float64)
    with kernelmux.prefer("!reference"), pytest.raises(kernelmux.NoKernelError):
        wrapper.plan(case.qo_indptr, *case.tables, 4, 2, 16, 16, q_data_type=torch.float64, sm_scale=0.1)
    naive.close(wrapper.run(case.q, case.pair), case.expect(scale=0.5)[0])


def run(q: Tensor | None = None, cache: Any = None, args: tuple[Any, ...] = (), **options: Any) -> Any:
    q = torch.zeros(3, 4, 16) if q is None else q
    cache = (torch.zeros(3, 4, 2, 16), torch.zeros(3, 4, 2, 16)) if cache is None else cache
    return plan().run(q, cache, *args, **options)


def cache(*shape: int, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor]:
    return torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": torch.zeros(4, 4, 16)}, ValueError, r"q has 4 rows, plan\(\) was told 3"),
        ({"q": torch.zeros(2, 16)}, ValueError, r"q has shape \[2, 16\]"),
        (
            {"q": torch.zeros(3, 4, 16).half()},
            ValueError,
            "q is float16, planned is float32; convert it, or pass q_data_type",
        ),
        ({"q": torch.zeros(3, 2, 16)}, ValueError, "q has 2 heads of dim 16, planned are 4 of dim 16"),
        ({"q": torch.zeros(3, 4, 32)[..., ::2]}, ValueError, "q has stride 2 along its last dim, it must be 1"),
        ({"cache": cache(3, 4, 2, 16, dtype=torch.float64)}, ValueError, r"\(keys\) is float64, planned is float32"),
        ({"cache": cache(3, 2, 4, 16)}, ValueError, r"\(keys\) has 4 heads of dim 16, planned are 2.*kv_layout"),
        ({"cache": cache(3, 8, 2, 16)}, ValueError, "pages of 8 tokens, plan.. was told page_size 4"),
        ({"cache": cache(3, 4, 2, 8)}, ValueError, "heads of dim 8, planned are 2 of dim 16"),
        ({"cache": list(cache(3, 4, 2, 16))}, TypeError, "paged_kv_cache is a list, it must be one tensor or a tuple"),
        ({"cache": torch.zeros(3, 3, 4, 2, 16)}, ValueError, r"paged_kv_cache has shape \[3, 3, 4, 2, 16\]"),
        ({"cache": 3}, TypeError, "paged_kv_cache is a int"),
        ({"cache": (cache(3, 4, 2, 16)[0], cache(2, 4, 2, 16)[0])}, ValueError, "all but the last dim must be equal"),
        ({"out": torch.zeros(3, 4, 8)}, ValueError, r"out is \[3, 4, 8\] of float32 on cpu, it must be \[3, 4, 16\]"),
        ({"out": torch.zeros(3, 4, 16).half()}, ValueError, "of float16 on cpu, it must be .* of float32"),
        ({"out": torch.zeros(3, 4, 32)[..., ::2]}, ValueError, "out has stride 2 along its last dim"),
        ({"lse": torch.zeros(4, 3)}, ValueError, r"lse is \[4, 3\] of float32 on cpu, it must be \[3, 4\]"),
        ({"lse": torch.zeros(3, 4).double()}, ValueError, "lse is .* of float64"),
        ({"return_lse": True, "lse_base": "e"}, ValueError, "lse_base is 'e', it must be 'log2' or 'ln'"),
        ({"return_lse": True, "lse_layout": "nh"}, ValueError, "lse_layout is 'nh', it must be 'NH' or 'HN'"),
        ({"window_left": 5}, ValueError, r"window_left is 5 in run\(\), -1 was planned"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks has shape \[3\] on cpu, it must be \[4\]"),
        ({"q_scale": torch.ones(4)}, ValueError, "q_scale has 4 values, it must be one number"),
        ({"v_scale": torch.ones(2)}, ValueError, "v_scale has 2 values"),
        ({"args": (torch.ones(4),)}, ValueError, "1 extra positional arguments, they must be scale_q, scale_k"),
        ({"args": (torch.ones(4), torch.ones(4), torch.ones(2))}, ValueError, r"scale_k is \[4\] of float32"),
        ({"args": (1.0, torch.ones(2), torch.ones(2))}, ValueError, "scale_q is a float"),
        ({"kv_cache_sf": cache(3, 4, 2, 1)}, ValueError, "kv_cache_sf is given, but the planned cache is not NVFP4"),
        ({"skip_softmax_threshold_scale_factor": 2.0}, ValueError, "skip_softmax_threshold_scale_factor is 2.0, which"),
        ({"use_fp16_softmax": True}, ValueError, "use_fp16_softmax is True, which no kernel here applies"),
        ({"uses_spcompress": True}, ValueError, "uses_spcompress is True"),
    ],
)
def test_what_run_refuses(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(**arguments)


def test_what_run_takes_without_effect() -> None:
    run(window_left=-1, enable_pdl=True, use_fp16_softmax=False, skip_softmax_threshold_scale_factor=0.0)


def test_what_decode_refuses() -> None:
    case = Paged(q_lens=(1, 1, 1))
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    tables, sizes = case.tables, (4, 2, 16, 16)
    for changes, message in (
        ({"window_right": 3}, "window_right is 3, which no kernel here applies"),
        ({"q_len_per_req": 0}, "q_len_per_req is 0, it must be an int of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.plan(*tables, *sizes, q_data_type=F32, **changes)
    with pytest.raises(ValueError, match=r"indptr has 4 entries|last_page_len has 2 entries, indptr describes 3"):
        wrapper.plan(tables[0], tables[1], tables[2][:2], *sizes)
    with pytest.raises(ValueError, match=r"indptr\[-1\] is 4, there are 3 page ids"):
        wrapper.plan(tables[0], tables[1][:3], tables[2], *sizes)
    wrapper.plan(*tables, *sizes, q_data_type=F32, window_left=4)
    with pytest.raises(ValueError, match=r"window_left is 3 in run\(\), 4 was planned"):
        wrapper.run(case.q, case.pair, window_left=3)
    with pytest.raises(ValueError, match=r"q_len_per_req is 2 in run\(\), 1 was planned"):
        wrapper.run(case.q, case.pair, q_len_per_req=2)
    with pytest.raises(ValueError, match=r"skip_softmax_threshold_scale_factor is 1.0"):
        wrapper.run(case.q, case.pair, skip_softmax_threshold_scale_factor=1.0)
    with pytest.raises(ValueError, match="variant is 'shared', it must be 'independent'"):
        wrapper.prewarm_paged_kv_stride_variant("shared")


def test_what_ragged_refuses() -> None:
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace())
    indptr = ints(0, 2, 3)
    with pytest.raises(ValueError, match=r"v_indptr is a tensor .*, which no kernel here applies"):
        wrapper.plan(indptr, indptr, 4, 2, 16, q_data_type=F32, v_indptr=ints(0, 1, 2))
    with pytest.raises(ValueError, match="qo_indptr has 3 entries and kv_indptr 2"):
        wrapper.plan(indptr, ints(0, 2), 4, 2, 16)
    with pytest.raises(ValueError, match="kv_indptr gives a sequence the length -1"):
        wrapper.plan(indptr, ints(0, 3, 2), 4, 2, 16)
    wrapper.plan(indptr, indptr, 4, 2, 16, q_data_type=F32, v_indptr=indptr)
    q, kv = torch.zeros(3, 4, 16), torch.zeros(2, 2, 16)
    with pytest.raises(ValueError, match=r"k has 2 rows, kv_indptr\[-1\] is 3; pass all keys"):
        wrapper.run(q, kv, kv)
    with pytest.raises(ValueError, match=r"k has shape .* 3 dimensions are needed"):
        wrapper.run(q, torch.zeros(3, 2, 1, 16), torch.zeros(3, 2, 1, 16))


def test_what_the_ranges_wrapper_refuses() -> None:
    wrapper = BatchPrefillWithCausalBidirectionalRangesWrapper(workspace(), q_data_type=F32, kv_data_type=F32)
    tables = (ints(0, 2, 3), ints(0, 2, 3), ints(0, 1, 2), ints(3, 1))
    for changes in ({"window_left": 3}, {"custom_mask": torch.ones(15, dtype=torch.bool)}, {"prefix_len_ptr": ints(1)}):
        with pytest.raises(ValueError, match=f"{next(iter(changes))} is .*, which no kernel here applies"):
            wrapper.plan(*tables, 4, 2, 16, 4, **changes)
    wrapper.plan(*tables, 4, 2, 16, 4)
    q = torch.zeros(3, 4, 16)
    with pytest.raises(ValueError, match=r"bidirectional_ranges is \[2, 2\] on cpu, it must be \[3, 2\]"):
        wrapper.run(q, cache(3, 4, 2, 16), torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(TypeError, match="bidirectional_ranges is float32"):
        wrapper.run(q, cache(3, 4, 2, 16), torch.zeros(3, 2))


@pytest.mark.parametrize(
    "make",
    [BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper],
)
def test_what_constructors_refuse(make: Any) -> None:
    with pytest.raises(ValueError, match="kv_layout is 'nhd', it must be 'NHD' or 'HND'"):
        make(workspace(), "nhd")
    with pytest.raises(ValueError, match=r"jit_args is .*, which no kernel here applies"):
        make(workspace(), jit_args=["uri"])
    with pytest.raises(
        SettingError, match=r"names 'fa2', no backend of that name.*'fa2' is FlashInfer's; kernelmux.flash"
    ):
        make(workspace(), backend="fa2")
    with pytest.raises(SettingError, match="names 'cudn', no backend of that name"):
        make(workspace(), backend="cudn")
    assert make(workspace(), backend="reference")._backend == "reference"


def test_the_check_setting_looks_at_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELMUX_CHECK", "1")
    kernelmux.reload()
    kv = cache(3, 4, 2, 16)
    q = torch.zeros(3, 4, 16)
    plan(seq_lens=ints(7, 1), seq_lens_q=ints(2, 1)).run(q, kv)
    with pytest.raises(ValueError, match=r"kv_indices\[1\] is 9, the cache has pages 0..2"):
        plan(paged_kv_indices=ints(0, 9, 2)).run(q, kv)
    with pytest.raises(ValueError, match=r"kv_last_page_len\[1\] is 0, it must be 1..4"):
        plan(paged_kv_last_page_len=ints(3, 0)).run(q, kv)
    with pytest.raises(ValueError, match=r"seq_lens is \[7, 2\], the index tensors give \[7, 1\]; make them agree"):
        plan(seq_lens=ints(7, 2))
    with pytest.raises(ValueError, match=r"seq_lens_q is \[2\]"):
        plan(seq_lens_q=ints(2))


def test_offsets_that_leave_the_keys_are_refused() -> None:
    ragged = kernelmux.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(8, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"kv_indptr\[0\] is -2, it must not be negative"):
        ragged.plan(torch.tensor([0, 3]).int(), torch.tensor([-2, 2]).int(), 4, 2, 64, q_data_type="float32")
    decode = kernelmux.BatchDecodeWithPagedKVCacheWrapper(torch.empty(8, dtype=torch.uint8))
    page = torch.tensor([0, 1, 2]).int()
    with pytest.raises(ValueError, match=r"indptr\[0\] is -1"):
        decode.plan(torch.tensor([-1, 2, 3]).int(), page, torch.tensor([1, 1]).int(), 4, 2, 64, 16)
    with pytest.raises(ValueError, match="last_page_len holds 200, at most page_size = 16"):
        decode.plan(torch.tensor([0, 2, 3]).int(), page, torch.tensor([200, 1]).int(), 4, 2, 64, 16)


def test_batch_invariance_is_not_promised_by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELMUX_BATCH_INVARIANT", "1")
    kernelmux.reload()
    with pytest.raises(kernelmux.NoKernelError, match="this kernel is not declared batch_invariant"):
        kernelmux.mm_bf16(torch.ones(2, 4), torch.ones(4, 3), out_dtype=torch.float32)
    assert kernelmux.rmsnorm(torch.ones(2, 4), torch.ones(4)).shape == (2, 4)
