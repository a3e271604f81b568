"""What the attention reference keeps to beside its formula: graph mode, aliasing, gradients, big caches, bad plans."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kernelmux.capabilities import AttentionSpec, Batch, RunExtras
from kernelmux.dispatch.attention.packbits import segment_packbits
from kernelmux.dispatch.attention.position import alibi_slopes, rotate
from kernelmux.dispatch.attention.reference import reference

CPU = torch.device("cpu")
F64 = torch.float64


def offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def ragged(q_lens: Sequence[int], kv_lens: Sequence[int], host: bool = True) -> Batch:
    lens = (tuple(q_lens), tuple(kv_lens)) if host else (None, None)
    return Batch(
        CPU, len(q_lens), sum(q_lens), max(q_lens), max(kv_lens), 0, offsets(q_lens), offsets(kv_lens),
        q_lens=lens[0], kv_lens=lens[1],
    )  # fmt: skip


def paged(kv_lens: Sequence[int], page: int, pages: Sequence[int], host: bool = True) -> Batch:
    counts = [-(-n // page) for n in kv_lens]
    last = [n - (c - 1) * page if c else 0 for n, c in zip(kv_lens, counts, strict=True)]
    ones = (1,) * len(kv_lens)
    return Batch(
        CPU, len(kv_lens), len(kv_lens), 1, max(kv_lens), page, offsets(ones), offsets(counts),
        torch.tensor(pages, dtype=torch.int32), torch.tensor(last, dtype=torch.int32),
        q_lens=ones if host else None, kv_lens=tuple(kv_lens) if host else None,
    )  # fmt: skip


def spec(
    heads: int = 2, kv_heads: int = 1, dim: int = 4, page: int = 0, dtype: torch.dtype = F64, **features: Any
) -> AttentionSpec:
    phase, kv = "decode" if page else "ragged", features.pop("kv_dtype", dtype)
    return AttentionSpec(phase, heads, kv_heads, dim, dim, page, dtype, kv, dtype, **features)


def attend(s: AttentionSpec, b: Batch, q: Tensor, k: Tensor, v: Tensor, extras: RunExtras | None = None) -> Tensor:
    out = torch.full_like(q, 77.0)
    reference(s, b)(q, k, v, out, None, 0.5, extras)
    return out


def test_lengths_are_read_from_the_buffers_in_graph_mode() -> None:
    """The same runner follows what is written into the index tensors; rows past the last sequence become empty."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(5, 2, 4, generator=g, dtype=F64), torch.randn(6, 2, 1, 4, generator=g, dtype=F64)
    batch = paged((3, 0, 5, 2), 2, (4, 0, 2, 5, 1, 3, -1), host=False)
    s = spec(page=2, use_cuda_graph=True)
    run, lse = reference(s, batch), torch.zeros(5, 2)
    out = torch.full_like(q, 77.0)
    for lens, pages in (((3, 0, 5, 2), (4, 0, 2, 5, 1, 3, -1)), ((2, 2, 0, 7), (3, 1, 0, 2, 4, 5, -1))):
        now = paged(lens, 2, pages)
        batch.kv_indptr.copy_(now.kv_indptr)
        batch.kv_indices.copy_(now.kv_indices)
        batch.last_page_len.copy_(now.last_page_len)
        run(q, k, -k, out, lse, 0.5, None)
        torch.testing.assert_close(out[:4], attend(s, now, q[:4], k, -k))
        assert (out[4] == 0).all() and (lse[4] == -math.inf).all()
        assert (lse[:4] == -math.inf).all(-1).tolist() == [n == 0 for n in lens]
    batch.qo_indptr.copy_(torch.tensor([0, 1, 1, 1, 2]))
    run(q, k, -k, out, lse, 0.5, None)
    assert (out[2:] == 0).all() and (out[:2] != 0).all()


def test_no_sequences_and_no_rows() -> None:
    out, lse = torch.full((2, 2, 4), 77.0, dtype=F64), torch.zeros(2, 2)
    empty = torch.zeros(0, 1, 4, dtype=F64)
    batch = Batch(CPU, 0, 0, 0, 0, 0, offsets(()), offsets(()), q_lens=(), kv_lens=())
    reference(spec(), batch)(out.clone(), empty, empty, out, lse, 1.0, None)
    assert (out == 0).all() and (lse == -math.inf).all()
    reference(spec(), ragged((0, 0), (3, 0)))(empty[:, [0, 0]], empty, empty, out[:0], lse[:0], 1.0, None)


def test_out_may_be_q() -> None:
    q, k, v = (torch.randn(n, h, 4, dtype=F64) for n, h in ((7, 2), (9, 1), (9, 1)))
    batch, s = ragged((3, 4), (5, 4)), spec(causal=True)
    want = attend(s, batch, q, k, v)
    reference(s, batch)(q, k, v, q, None, 0.5, None)
    torch.testing.assert_close(q, want)


@pytest.mark.parametrize("features", [{"causal": True, "soft_cap": 2.0}, {"pos_encoding": "ROPE_LLAMA"}])
def test_gradients(features: dict[str, object]) -> None:
    batch, s = ragged((2, 3), (4, 2)), spec(**features)
    inputs = [torch.randn(n, h, 4, dtype=F64, requires_grad=True) for n, h in ((5, 2), (6, 1), (6, 1))]
    sinks = torch.randn(2, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, k, v, s0: attend(s, batch, q, k, v, RunExtras(sinks=s0)), (*inputs, sinks)
    )


def test_very_negative_logits_still_weigh_one() -> None:
    """One key gets weight 1 however small its logit, and the LSE tells the logit."""
    q, k, v = torch.full((1, 1, 128), 64.0), torch.full((1, 1, 128), -64.0), torch.ones(1, 1, 128)
    out, lse = torch.empty_like(q), torch.empty(1, 1)
    s = spec(1, 1, 128, dtype=torch.float32)
    reference(s, ragged((1,), (1,)))(q, k, v, out, lse, 128**-0.5, None)
    assert (out == 1).all()
    assert lse.item() * math.log(2) == pytest.approx(-64 * 64 * 128 / 128**0.5)


def test_only_pages_inside_the_window_are_looked_up() -> None:
    """An engine may have freed the pages before the window: their entries are -1, or pages of NaN."""
    k = torch.randn(4, 2, 1, 4, dtype=F64)
    q = torch.randn(2, 2, 4, dtype=F64)
    s = spec(page=2, window_left=2)
    want = attend(s, paged((6, 3), 2, (0, 1, 2, 0, 3)), q, k, k)
    k[0, 0] = math.nan
    torch.testing.assert_close(attend(s, paged((6, 3), 2, (-1, 1, 2, 0, 3)), q, k, k)[0], want[0])


def test_nan_logits_are_not_hidden() -> None:
    q, k = torch.ones(2, 2, 4, dtype=F64), torch.ones(4, 1, 4, dtype=F64)
    k[1, 0, 0] = math.nan
    out = attend(spec(), ragged((1, 1), (2, 2)), q, k, torch.ones_like(k))
    assert out[0].isnan().all() and (out[1] == 1).all()


def test_offsets_past_two_to_the_31() -> None:
    """Pages whose first element lies beyond 2^31; the memory is reserved, not used."""
    pages, page, heads, dim = 131_100, 16, 8, 128
    cache = torch.empty(pages, page, heads, dim, dtype=torch.float8_e5m2)
    last = pages - 1
    cache[last] = torch.ones(page, heads, dim).to(cache.dtype)
    assert cache[last].storage_offset() > 2**31
    q = torch.ones(1, heads, dim, dtype=torch.float16)
    s = spec(heads, heads, dim, page, torch.float16, kv_dtype=cache.dtype)
    assert (attend(s, paged((10,), page, (last,)), q, cache, cache) == 1).all()


def test_rope_at_a_far_position_equals_float64() -> None:
    x = torch.randn(2, 1, 128, dtype=F64)
    at = torch.tensor([131071, 1_000_000])
    torch.testing.assert_close(rotate(x.float(), at, 1.0, 1e4).double(), rotate(x, at, 1.0, 1e4), atol=1e-6, rtol=1e-6)


def test_alibi_slopes() -> None:
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(1) == [2.0**-8]
    twelve = alibi_slopes(12)
    assert twelve[:8] == alibi_slopes(8) and twelve[8:] == [2.0 ** -(i + 0.5) for i in range(4)]


def test_custom_mask_wins_over_causal() -> None:
    bits, indptr = segment_packbits(torch.ones(6, dtype=torch.bool), offsets((6,)), bitorder="little")
    batch = ragged((2,), (3,))
    batch.packed_mask, batch.mask_indptr = bits, indptr
    q, k = torch.randn(2, 2, 4, dtype=F64), torch.randn(3, 1, 4, dtype=F64)
    want = attend(spec(), ragged((2,), (3,)), q, k, k)
    torch.testing.assert_close(attend(spec(custom_mask=True, causal=True), batch, q, k, k), want)


def test_what_a_plan_lacks_is_an_error() -> None:
    with pytest.raises(ValueError, match="head_dim_qk is 5, rotary embedding needs an even one; rotate beforehand"):
        reference(spec(dim=5, pos_encoding="ROPE_LLAMA"), ragged((1,), (1,)))
    x = torch.ones(1, 2, 4, dtype=F64)
    for name, fix in (("custom_mask", "pass custom_mask"), ("multi_item", "pass prefix_len_ptr")):
        with pytest.raises(ValueError, match=fix):
            attend(spec(**{name: True}), ragged((1,), (1,)), x, x[:, :1], x[:, :1])
    with pytest.raises(ValueError, match="pass bidirectional_ranges"):
        attend(spec(bidirectional=True), ragged((1,), (1,)), x, x[:, :1], x[:, :1])
