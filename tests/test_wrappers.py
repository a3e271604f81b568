"""The attention wrappers against the formula: layouts, cache forms, masks, scales, results, replans, overrides."""

import math
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
    segment_packbits,
)

naive = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("naive_attention.py"))))
Paged, close, offsets = naive.Paged, naive.close, naive.offsets
F32 = torch.float32
LOG2E = math.log2(math.e)


def workspace() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def decode(case: Any, **plan: Any) -> BatchDecodeWithPagedKVCacheWrapper:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), case.layout)
    wrapper.plan(*case.tables, *case.heads, case.dims[0], case.page, **{"q_data_type": case.dtype} | plan)
    return wrapper


def prefill(case: Any, **plan: Any) -> BatchPrefillWithPagedKVCacheWrapper:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(), case.layout)
    sizes = (*case.heads, case.dims[0], case.page, case.dims[1])
    wrapper.plan(case.qo_indptr, *case.tables, *sizes, **{"q_data_type": case.dtype} | plan)
    return wrapper


def ragged(case: Any, **plan: Any) -> BatchPrefillWithRaggedKVCacheWrapper:
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace(), case.layout)
    wrapper.plan(case.qo_indptr, offsets(case.kv_lens), *case.heads, *case.dims, **{"q_data_type": case.dtype} | plan)
    return wrapper


def packed(case: Any) -> tuple[Tensor, Tensor]:
    k, v = torch.cat(case.ks), torch.cat(case.vs)
    return (k, v) if case.layout == "NHD" else (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())


# -- layouts and cache forms ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("form", ["pair", "single"])
def test_paged_caches_in_every_form(layout: str, page: int, form: str) -> None:
    case = Paged(layout=layout, page=page)
    out, lse = prefill(case, causal=True).run(case.q, getattr(case, form), return_lse=True)
    expected = case.expect(causal=True)
    close(out, expected[0])
    close(lse, expected[1])
    one = Paged(q_lens=(1, 1, 1), layout=layout, page=page)
    out, lse = decode(one).run(one.q, getattr(one, form), return_lse=True)
    close(out, one.expect()[0])
    close(lse, one.expect()[1])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["pair", "single"])
def test_a_page_of_one_token_may_leave_its_dim_out(layout: str, form: str) -> None:
    case = Paged(page=1, layout=layout)
    at = {"pair": {"NHD": 1, "HND": 2}, "single": {"NHD": 2, "HND": 3}}[form][layout]
    cache = tuple(c.squeeze(at) for c in case.pair) if form == "pair" else case.single.squeeze(at)
    close(prefill(case).run(case.q, cache), case.expect()[0])


def test_caches_may_be_strided_and_differ_in_strides() -> None:
    case = Paged(q_lens=(1, 1, 1))
    k, v = case.pair
    wide = torch.zeros(*k.shape[:2], 6, 16)
    wide[:, :, 1:3] = k
    close(decode(case).run(case.q, (wide[:, :, 1:3], v)), case.expect()[0])
    both = torch.cat((k, v), dim=-1)
    close(decode(case).run(case.q, (both[..., :16], both[..., 16:])), case.expect()[0])


def test_a_query_cut_out_of_a_fused_projection() -> None:
    case = Paged()
    fused = torch.zeros(case.q.shape[0], 9, 16)
    fused[:, 2:6] = case.q
    close(prefill(case, causal=True).run(fused[:, 2:6], case.pair), case.expect(causal=True)[0])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_ragged(layout: str) -> None:
    case = Paged(q_lens=(2, 0, 4), kv_lens=(5, 3, 2), dims=(24, 16), layout=layout)
    out, lse = ragged(case, causal=True).run(case.q, *packed(case), return_lse=True)
    expected = case.expect(causal=True)
    close(out, expected[0])
    close(lse, expected[1])
    assert (lse[2] == -math.inf).all()
    assert (out[2] == 0).all()


def test_the_values_may_have_another_dim_than_the_keys() -> None:
    case = Paged(dims=(24, 8))
    close(prefill(case).run(case.q, case.pair), case.expect()[0])
    one = Paged(q_lens=(1, 1, 1), dims=(24, 8))
    out = decode(one).run(one.q, one.pair)
    assert out.shape == (3, 4, 8)
    close(out, one.expect()[0])


# -- options of the plan ----------------------------------------------------------------------------------------

OPTIONS = [
    ({"causal": True}, {"causal": True}),
    ({"window_left": 3}, {"window": 3}),
    ({"causal": True, "window_left": 0}, {"causal": True, "window": 0}),
    ({"logits_soft_cap": 2.0}, {"cap": 2.0}),
    ({"logits_soft_cap": 0.0, "sm_scale": 0.7}, {"scale": 0.7}),
    ({"pos_encoding_mode": "ALIBI"}, {"alibi": True}),
]


@pytest.mark.parametrize(("plan", "formula"), OPTIONS)
def test_options_of_prefill_and_ragged(plan: dict[str, Any], formula: dict[str, Any]) -> None:
    case = Paged()
    expected = case.expect(**formula)[0]
    close(prefill(case, **plan).run(case.q, case.pair), expected)
    close(ragged(case, **plan).run(case.q, *packed(case)), expected)


def rotated(x: Tensor, first: int, scale: float, theta: float) -> Tensor:
    """Rows of x as complex numbers (i, i + D/2), turned by their positions first, first + 1, …"""
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(first, first + len(x)).double(), theta ** -(torch.arange(half) / half) / scale)
    z = (
        torch.complex(x[..., :half].double(), x[..., half:].double())
        * torch.polar(torch.ones(()).double(), angle)[:, None]
    )
    return torch.cat((z.real, z.imag), dim=-1)


def test_rotary_embedding_in_the_kernel() -> None:
    case, turned = Paged(), Paged()
    for i, (n, m) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        turned.ks[i] = rotated(case.ks[i], 0, 2.0, 100.0)
        at = slice(sum(case.q_lens[:i]), sum(case.q_lens[: i + 1]))
        turned.q[at] = rotated(case.q[at], m - n, 2.0, 100.0).float()
    options = {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 100.0, "causal": True}
    expected = turned.expect(causal=True)[0]
    close(prefill(case, **options).run(case.q, case.pair), expected)
    close(prefill(case).forward(case.q, case.pair, **options), expected)
    close(ragged(case, **options).run(case.q, *packed(case)), expected)


@pytest.mark.parametrize(("plan", "formula"), OPTIONS[1:5:2])
def test_options_of_decode(plan: dict[str, Any], formula: dict[str, Any]) -> None:
    case = Paged(q_lens=(1, 1, 1))
    close(decode(case, **plan).run(case.q, case.pair), case.expect(**formula)[0])


def test_several_queries_per_sequence_in_decode() -> None:
    case = Paged(q_lens=(3, 3), kv_lens=(3, 20))
    wrapper = decode(case, q_len_per_req=3)
    close(wrapper.run(case.q, case.pair, q_len_per_req=3), case.expect(causal=True)[0])
    close(decode(case, q_len_per_req=3, is_causal=False).run(case.q, case.pair), case.expect()[0])


def test_positional_options_of_decode_are_deprecated_but_work() -> None:
    case = Paged(q_lens=(1, 1, 1))
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    with pytest.warns(DeprecationWarning, match="by name"):
        wrapper.plan(*case.tables, *case.heads, 16, 16, "NONE", 4, 0.0, F32, None, None, None, 0.5)
    close(wrapper.run(case.q, case.pair), case.expect(window=4, scale=0.5)[0])
    with pytest.raises(TypeError, match="at most 23"):
        wrapper.plan(*case.tables, *case.heads, 16, 16, *[None] * 17)


def test_dtypes_by_name_and_defaults() -> None:
    case = Paged(q_lens=(1, 1, 1), dtype=torch.float16)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*case.tables, *case.heads, 16, 16)
    close(wrapper.run(case.q, case.pair), case.expect()[0], 2e-3)
    wrapper.plan(*case.tables, *case.heads, 16, 16, q_data_type=None, data_type="float16", o_data_type="float32")
    assert wrapper.run(case.q, case.pair).dtype == F32


def test_int64_index_tensors_and_a_table_longer_than_needed() -> None:
    case = Paged(q_lens=(1, 1, 1), spare=5)
    case.tables = tuple(t.long() for t in case.tables)
    close(decode(case).run(case.q, case.pair), case.expect()[0])


# -- masks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def masks() -> list[Tensor]:
    g = torch.Generator().manual_seed(7)
    return [torch.rand(n, m, generator=g) < 0.5 for n, m in zip((2, 1, 3), (5, 0, 33), strict=True)]


@pytest.mark.parametrize("how", ["flat", "packed"])
@pytest.mark.parametrize("window", [-1, 6])
def test_custom_masks_replace_causal(masks: list[Tensor], how: str, window: int) -> None:
    case = Paged()
    flat = torch.cat([m.reshape(-1) for m in masks])
    bits, _ = segment_packbits(flat, offsets(m.numel() for m in masks), bitorder="little")
    mask = {"custom_mask": flat} if how == "flat" else {"packed_custom_mask": bits, "custom_mask": ~flat}
    expected = case.expect(masks=masks, window=window)[0]
    close(prefill(case, causal=True, window_left=window, **mask).run(case.q, case.pair), expected)
    close(ragged(case, causal=True, window_left=window, **mask).run(case.q, *packed(case)), expected)


def test_a_mask_buffer_may_be_longer_and_of_integers(masks: list[Tensor]) -> None:
    case = Paged()
    flat = torch.cat([m.reshape(-1) for m in masks] + [torch.ones(99, dtype=torch.bool)]).to(torch.uint8)
    close(prefill(case, custom_mask=flat).run(case.q, case.pair), case.expect(masks=masks)[0])


def test_multi_item_scoring() -> None:
    case = Paged(q_lens=(6, 4), kv_lens=(6, 5))
    positions = [[0, 1, 2, 0], [0, 1]]  # items after a prefix of 2 and 3
    prefix = torch.tensor([2, 3])
    table = torch.tensor([[*row, *[0] * (4 - len(row))] for row in positions], dtype=torch.int32).reshape(-1)
    wrapper = prefill(
        case,
        causal=True,
        prefix_len_ptr=prefix,
        token_pos_in_items_ptr=table,
        token_pos_in_items_len=4,
        max_item_len_ptr=torch.tensor([2, 1]),
    )
    seen = []
    for row, n, m, first in zip(positions, (6, 4), (6, 5), (2, 3), strict=True):
        mask = torch.zeros(n, m, dtype=torch.bool)
        for i in range(n):
            p = i + m - n
            for j in range(p + 1):
                mask[i, j] = p < first or j < first or p < j + row[p - first]
        seen.append(mask)
    close(wrapper.run(case.q, case.pair), case.expect(masks=seen)[0])


def test_bidirectional_ranges() -> None:
    case = Paged(q_lens=(4, 3), kv_lens=(6, 3))
    wrapper = BatchPrefillWithCausalBidirectionalRangesWrapper(workspace(), q_data_type=F32, kv_data_type=F32)
    wrapper.plan(case.qo_indptr, *case.tables, *case.heads, 16, 16)
    ranges = torch.tensor([[-1, -1], [3, 5], [3, 5], [3, 5], [0, 2], [0, 2], [-1, -1]], dtype=torch.int32)
    seen, row = [], 0
    for n, m in ((4, 6), (3, 3)):
        mask = torch.zeros(n, m, dtype=torch.bool)
        for i in range(n):
            p, (a, b) = i + m - n, ranges[row].tolist()
            for j in range(m):
                mask[i, j] = (j <= p and j >= p - 2) or (a <= j <= b and j >= p - 1)
            row += 1
        seen.append(mask)
    out, lse = wrapper.run(case.q, case.pair, ranges, 2, 1, return_lse=True)
    expected = case.expect(masks=seen)
    close(out, expected[0])
    close(lse, expected[1])
    close(wrapper.forward(case.q, case.pair, ranges.long(), 2, 1), expected[0])
    assert wrapper.run_return_lse(case.q, case.pair, ranges)[1].shape == (7, 4)


# -- scales and results -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [float, torch.tensor, lambda x: torch.tensor([x])])
def test_scales_are_numbers_or_tensors(kind: Any) -> None:
    case = Paged(q_lens=(1, 1, 1))
    expected = case.expect(scale=0.5 * 2 * 0.5)[0] * 3
    scales = {"q_scale": kind(2.0), "k_scale": kind(0.5), "v_scale": kind(3.0)}
    close(decode(case, sm_scale=0.5).run(case.q, case.pair, **scales), expected)
    close(prefill(case, sm_scale=0.5).run(case.q, case.pair, **scales), expected)
    close(ragged(case, sm_scale=0.5).run(case.q, *packed(case), o_scale=kind(0.5), **scales), expected * 2)


def test_scales_per_head() -> None:
    case = Paged()
    q, k, v = torch.tensor([1.0, 2.0, 0.5, 3.0]), torch.tensor([0.5, 2.0]), torch.tensor([2.0, 0.25])
    by_head = (k.repeat_interleave(2) * q)[None, :, None]
    scaled = Paged()
    scaled.q = case.q * by_head
    expected = scaled.expect()[0] * v.repeat_interleave(2)[None, :, None]
    close(prefill(case).run(case.q, case.pair, q, k, v), expected)


def test_sinks_join_the_denominator() -> None:
    case = Paged()
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out, lse = prefill(case, causal=True).run(case.q, case.pair, sinks=sinks, return_lse=True)
    expected = case.expect(causal=True, sinks=sinks)
    close(out, expected[0])
    close(lse, expected[1])
    close(lse[2], sinks * LOG2E)  # the sequence without keys


def test_fp8_caches_and_outputs() -> None:
    case = Paged(q_lens=(1, 1, 1))
    cache = tuple(c.nan_to_num().to(torch.float8_e4m3fn) for c in case.pair)
    case.ks, case.vs = ([t.to(torch.float8_e4m3fn).float() for t in ts] for ts in (case.ks, case.vs))
    wrapper = decode(case, kv_data_type=torch.float8_e4m3fn)
    close(wrapper.run(case.q, cache, k_scale=0.5, v_scale=2.0), case.expect(scale=0.125)[0] * 2)
    eight = decode(case, kv_data_type=torch.float8_e4m3fn, o_data_type=torch.float8_e4m3fn)
    out = eight.run(case.q, cache, v_scale=2.0)
    assert out.dtype == torch.float8_e4m3fn
    close(out, case.expect()[0] * 2, 0.07)
    huge = eight.run(case.q, cache, v_scale=1e6).float()
    assert huge.abs().max() == 448
    assert not huge.isnan().any()


def test_an_fp8_query_in_ragged_gives_bfloat16() -> None:
    case = Paged(q_lens=(2, 2), kv_lens=(3, 4))
    f8 = [t.to(torch.float8_e4m3fn) for t in (case.q, *packed(case))]
    wrapper = ragged(case, q_data_type=torch.float8_e4m3fn)
    assert wrapper.run(*f8).dtype == torch.bfloat16


def test_nvfp4_caches() -> None:
    from kernelmux.dispatch.quantization.nvfp4_kv_reference import unpack_nvfp4

    g = torch.Generator().manual_seed(3)
    case = Paged(q_lens=(1, 1, 1), kv_lens=(5, 2, 33), dims=(32, 32))
    shape = case.pair[0].shape
    data = [torch.randint(0, 256, (*shape[:3], 16), generator=g, dtype=torch.uint8) for _ in range(2)]
    sf = [(torch.rand(*shape[:3], 2, generator=g) + 0.5).to(torch.float8_e4m3fn) for _ in range(2)]
    plain = [unpack_nvfp4(d, s, F32) for d, s in zip(data, sf, strict=True)]
    out = decode(case).run(case.q, tuple(plain))
    wrapper = decode(case, kv_data_type=torch.uint8)
    close(wrapper.run(case.q, tuple(data), kv_cache_sf=tuple(sf)), out)
    one = wrapper.run(case.q, torch.stack(data, 1), kv_cache_sf=torch.stack(sf, 1))
    close(one, out)
    with pytest.raises(ValueError, match="kv_cache_sf is None, an NVFP4 cache needs it"):
        wrapper.run(case.q, tuple(data))
    with pytest.raises(ValueError, match=r"kv_cache_sf has a part \[.*\] of float8_e4m3fn"):
        wrapper.run(case.q, tuple(data), kv_cache_sf=tuple(s[..., :1] for s in sf))


@pytest.mark.parametrize("make", [prefill, ragged])
@pytest.mark.parametrize("base", ["log2", "ln"])
@pytest.mark.parametrize("layout", ["NH", "HN"])
@pytest.mark.parametrize("given", [False, True])
def test_the_lse_in_every_form(make: Any, base: str, layout: str, given: bool) -> None:
    case = Paged()
    expected = case.expect()[1] / (1 if base == "log2" else LOG2E)
    expected = expected if layout == "NH" else expected.t()
    cache = (case.pair,) if make is prefill else packed(case)
    lse = torch.full(expected.shape, 7.0) if given else None
    out, found = make(case).run(case.q, *cache, lse=lse, return_lse=True, lse_base=base, lse_layout=layout)
    assert found.is_contiguous()
    assert lse is None or found is lse
    close(found, expected)
    if given:
        lse = torch.full(expected.shape, 7.0)
        alone = make(case).run(case.q, *cache, lse=lse, lse_base=base, lse_layout=layout)
        close(alone, out)
        close(lse, expected)


def test_results_go_where_the_caller_wants_them() -> None:
    case = Paged(q_lens=(1, 1, 1))
    wide = torch.zeros(3, 8, 16)
    out, lse = wide[:, 2:6], torch.zeros(5, 4)[1:4]
    found = decode(case).run_return_lse(case.q, case.pair, out=out, lse=lse)
    assert found[0] is out
    assert found[1] is lse
    close(out, case.expect()[0])
    assert (wide[:, :2] == 0).all()


# -- replans, overrides, empties --------------------------------------------------------------------------------


def test_a_wrapper_is_planned_again_for_other_batches() -> None:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace())
    for seed, (q_lens, kv_lens) in enumerate(
        [((2, 1), (5, 9)), ((4,), (4,)), ((1, 1, 1), (0, 17, 2)), ((2, 1), (5, 9))]
    ):
        case = Paged(q_lens=q_lens, kv_lens=kv_lens, seed=seed)
        wrapper.plan(case.qo_indptr, *case.tables, *case.heads, 16, 16, causal=seed % 2 == 0, q_data_type=F32)
        for _ in range(2):
            close(wrapper.run(case.q, case.pair), case.expect(causal=seed % 2 == 0)[0])


def test_forward_replaces_what_was_planned() -> None:
    case = Paged()
    wrapper = prefill(case, causal=True, window_left=4, logits_soft_cap=3.0, sm_scale=0.2)
    close(wrapper.forward(case.q, case.pair), case.expect()[0])
    assert (wrapper._causal, wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale) == (
        False,
        -1,
        0.0,
        0.25,
    )
    out, lse = wrapper.forward_return_lse(
        case.q, case.pair, causal=True, window_left=2, logits_soft_cap=1.5, sm_scale=0.4, k_scale=0.5, v_scale=2.0
    )
    expected = case.expect(causal=True, window=2, cap=1.5, scale=0.2)
    close(out, expected[0] * 2)
    close(lse, expected[1])
    assert (wrapper._causal, wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale) == (True, 2, 1.5, 0.4)
    close(wrapper.run(case.q, case.pair), case.expect(causal=True, window=2, cap=1.5, scale=0.4)[0])
    wrapper = ragged(case)
    close(wrapper.forward(case.q, *packed(case), causal=True), case.expect(causal=True)[0])
    one = Paged(q_lens=(1, 1, 1))
    late = decode(one)
    expected = one.expect(window=3, cap=0.9)
    out, lse = late.forward_return_lse(one.q, one.pair, window_left=3, logits_soft_cap=0.9)
    close(out, expected[0])
    close(lse, expected[1])


def test_forward_leaves_several_queries_per_sequence_causal() -> None:
    case = Paged(q_lens=(3, 3), kv_lens=(3, 20))
    close(decode(case, q_len_per_req=3).forward(case.q, case.pair), case.expect(causal=True)[0])


def test_forward_does_not_call_plan() -> None:
    case = Paged()
    wrapper = prefill(case)
    wrapper.plan = wrapper.begin_forward = None
    close(wrapper.forward(case.q, case.pair, causal=True), case.expect(causal=True)[0])


@pytest.mark.parametrize("make", [prefill, ragged])
def test_nothing_to_do(make: Any) -> None:
    none = Paged(q_lens=(), kv_lens=())
    no_rows = Paged(q_lens=(0, 0), kv_lens=(3, 0))
    for case in (none, no_rows):
        cache = (case.pair,) if make is prefill else tuple(torch.zeros(sum(case.kv_lens), 2, 16) for _ in range(2))
        out, lse = make(case).run(case.q, *cache, return_lse=True)
        assert out.shape == (0, 4, 16)
        assert lse.shape == (0, 4)


def test_an_empty_batch_decodes_to_nothing() -> None:
    case = Paged(q_lens=(), kv_lens=())
    assert decode(case).run(case.q, case.pair).shape == (0, 4, 16)


def test_a_batch_without_keys() -> None:
    case = Paged(q_lens=(2, 1), kv_lens=(0, 0))
    out, lse = prefill(case, causal=True).run(torch.ones(3, 4, 16), case.pair, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    _, lse = prefill(case).run(torch.ones(3, 4, 16), case.pair, return_lse=True, sinks=torch.ones(4))
    close(lse, torch.full((3, 4), LOG2E))


def test_gradients_flow_through_the_reference() -> None:
    case = Paged(q_lens=(2, 1), kv_lens=(3, 4), dims=(4, 4), dtype=torch.float64)
    q, k, v = (t.requires_grad_() for t in (case.q, *packed(case)))
    wrapper = ragged(case, causal=True)
    assert torch.autograd.gradcheck(lambda *x: wrapper.run(*x, v_scale=2.0), (q, k, v))
    with pytest.raises(ValueError, match="out is given and an input requires grad"):
        wrapper.run(q, k, v, out=torch.empty(3, 4, 4, dtype=torch.float64))
    with torch.no_grad():
        assert not wrapper.run(q, k, v).requires_grad


def test_a_prefilled_prefix_merges_with_the_rest() -> None:
    case = Paged(q_lens=(4,), kv_lens=(12,), page=4)
    whole, _ = prefill(case, causal=True).run(case.q, case.pair, return_lse=True)
    prefix = Paged(q_lens=(4,), kv_lens=(12,), page=4)
    prefix.tables = (offsets([2]), case.tables[1][:2], torch.tensor([4], dtype=torch.int32))
    a = prefill(prefix).run_return_lse(case.q, case.pair)
    rest = ragged(Paged(q_lens=(4,), kv_lens=(4,)), causal=True)
    b = rest.run_return_lse(case.q, case.ks[0][8:], case.vs[0][8:])
    merged, _ = kernelmux.merge_state(*a, *b)
    close(merged, whole)
