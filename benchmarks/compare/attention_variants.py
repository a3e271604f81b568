"""Attention with sinks, with bidirectional ranges and over an NVFP4 cache."""

from functools import partial

import torch
from compare.case import Case, Results, Side
from compare.kv import BF16, paged

Q_LENS, KV_LENS = (7, 3, 33), (37, 0, 300)


def sinks(side: Side, window_left: int = -1, without_keys: bool = False) -> Results:
    """The second sequence has no keys: its rows, whose softmax has the sink alone, are compared apart."""
    p = paged(side, Q_LENS, KV_LENS)
    types = {"q_data_type": BF16, "kv_data_type": BF16}
    sink, scale = side.rand(p.heads[0], seed=7).mul(2), 1 / p.dim**0.5
    planned = (p.qo_indptr, *p.table, *p.heads, p.dim, p.page_size)
    options = {**types, "causal": True, "window_left": window_left, "sm_scale": scale}
    if side.package == "kernelmux":  # where sinks are an argument of run()
        wrapper = side.BatchPrefillWithPagedKVCacheWrapper(side.workspace(), "NHD")
        wrapper.plan(*planned, **options)
        out, lse = wrapper.run(p.q, p.cache, sinks=sink, return_lse=True)
    else:
        dims = {"head_dim_qk": p.dim, "head_dim_vo": p.dim, "window_left": window_left}
        wrapper = side.BatchAttentionWithAttentionSinkWrapper(
            side.workspace(), "NHD", **types, **dims, **side.backend("fa2")
        )
        wrapper.plan(*planned, **options)
        out, lse = wrapper.run(p.q, p.cache, sink, scale, return_lse=True)
    keyless = torch.zeros(sum(Q_LENS), dtype=torch.bool, device=side.device)
    keyless[Q_LENS[0] : Q_LENS[0] + Q_LENS[1]] = True
    rows = keyless if without_keys else ~keyless
    return {"out": out[rows], "lse": lse[rows]}


def ranges(side: Side, causal_window_left: int = -1, range_window_left: int = -1) -> Results:
    q_lens, kv_lens = (7, 33), (37, 60)
    p = paged(side, q_lens, kv_lens)
    spans = torch.full((sum(q_lens), 2), -1, dtype=torch.int32)
    spans[2:5] = torch.tensor([32, 35])
    spans[10:20] = torch.tensor([30, 47])
    wrapper = side.BatchPrefillWithCausalBidirectionalRangesWrapper(
        side.workspace(), "NHD", q_data_type=BF16, kv_data_type=BF16, head_dim_qk=128, head_dim_vo=128
    )
    wrapper.plan(p.qo_indptr, *p.table, *p.heads, p.dim, p.page_size, q_data_type=BF16, kv_data_type=BF16)
    out, lse = wrapper.run(
        p.q,
        p.cache,
        spans.to(side.device),
        causal_window_left=causal_window_left,
        range_window_left=range_window_left,
        return_lse=True,
    )
    return {"out": out, "lse": lse}


def nvfp4(side: Side) -> Results:
    """Paged prefill over E2M1 values (random bytes) with E4M3 block scales."""
    q_lens, kv_lens = (7, 33), (37, 60)
    p = paged(side, q_lens, kv_lens)
    shape = (*p.k.shape[:-1], p.dim // 2)
    generator = torch.Generator().manual_seed(5)
    k, v = (torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(side.device) for _ in "kv")
    scales = [side.rand(*p.k.shape[:-1], p.dim // 16, seed=s).abs().add(0.1).to(torch.float8_e4m3fn) for s in (6, 7)]
    wrapper = side.BatchPrefillWithPagedKVCacheWrapper(side.workspace(), "NHD", **side.backend("fa2"))
    types = {"q_data_type": BF16, "kv_data_type": torch.uint8, "o_data_type": BF16}
    wrapper.plan(p.qo_indptr, *p.table, *p.heads, p.dim, p.page_size, causal=True, **types)
    out, lse = wrapper.run(p.q, (k, v), k_scale=0.3, v_scale=0.5, kv_cache_sf=(scales[0], scales[1]), return_lse=True)
    return {"out": out, "lse": lse}


def cases() -> list[Case]:
    sink, bidirectional = "BatchAttentionWithAttentionSinkWrapper", "BatchPrefillWithCausalBidirectionalRangesWrapper"
    return [
        Case(sink, "causal", "sinks", "attention", sinks),
        Case(sink, "rows without keys", "sinks", "attention", partial(sinks, without_keys=True)),
        Case(sink, "causal, window_left 30", "sinks-window", "attention", partial(sinks, window_left=30)),
        Case(bidirectional, "ranges", "bidirectional", "attention", ranges),
        Case(
            bidirectional,
            "ranges, causal_window_left 8, range_window_left 6",
            "bidirectional",
            "attention",
            partial(ranges, causal_window_left=8, range_window_left=6),
        ),
        Case("BatchPrefillWithPagedKVCacheWrapper", "NVFP4 KV, causal", "prefill-nvfp4", "attention approx", nvfp4),
    ]
