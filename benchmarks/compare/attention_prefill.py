"""single_prefill_with_kv_cache, and the paged and ragged batch prefill wrappers."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from compare.case import Case, Results, Side
from compare.kv import BF16, fp8, indptr, masks, paged
from torch import Tensor

Q_LENS, KV_LENS = (7, 1, 33, 16), (37, 1, 300, 64)
E4M3 = torch.float8_e4m3fn


def packed(flat: Tensor, lens: Sequence[int]) -> Tensor:
    """Little-endian bits, each sequence padded to a byte: packed here, so as to depend on neither side."""
    parts = []
    for part in flat.cpu().split(list(lens)):
        bits = torch.cat((part.int(), part.new_zeros(-len(part) % 8, dtype=torch.int32))).view(-1, 8)
        parts.append((bits << torch.arange(8)).sum(1).to(torch.uint8))
    return torch.cat(parts).to(flat.device)


def mask_options(side: Side, mask: str, q_lens: Sequence[int], kv_lens: Sequence[int]) -> dict[str, Tensor]:
    if not mask:
        return {}
    flat = masks(side, q_lens, kv_lens)
    sizes = [q * k for q, k in zip(q_lens, kv_lens, strict=True)]
    return {"custom_mask": flat} if mask == "bool" else {"packed_custom_mask": packed(flat, sizes)}


def single(
    side: Side,
    q_len: int = 17,
    kv_len: int = 130,
    heads: tuple[int, int] = (8, 2),
    layout: str = "NHD",
    mask: str = "",
    backend: str = "fa2",
    **kwargs: Any,
) -> Results:
    q = side.rand(q_len, heads[0], 128, seed=1).mul(2).to(BF16)
    k, v = (side.rand(kv_len, heads[1], 128, seed=s, dtype=BF16) for s in (2, 3))
    if layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    options = mask_options(side, mask, [q_len], [kv_len])
    if "custom_mask" in options:
        options["custom_mask"] = options["custom_mask"].view(q_len, kv_len)
    out, lse = side.single_prefill_with_kv_cache(
        q, k, v, kv_layout=layout, return_lse=True, **options, **side.backend(backend), **kwargs
    )
    return {"out": out, "lse": lse}


def single_fp8(side: Side, causal: bool) -> Results:
    """q, k and v in fp8 with one dequantisation factor per head."""
    q, k, v = (fp8(side.rand(n, h, 128, seed=s)) for n, h, s in ((130, 8, 1), (300, 2, 2), (300, 2, 3)))
    scales = [side.rand(h, seed=s).abs().add(0.5) for h, s in ((8, 4), (2, 5), (2, 6))]
    out, lse = side.single_prefill_with_kv_cache(
        q, k, v, *scales, o_dtype=BF16, causal=causal, return_lse=True, **side.backend("fa3")
    )
    return {"out": out, "lse": lse}


def batch_paged(
    side: Side,
    q_lens: Sequence[int] = Q_LENS,
    kv_lens: Sequence[int] = KV_LENS,
    mask: str = "",
    backend: str = "fa2",
    run: dict[str, Any] | None = None,
    per_head_scales: bool = False,
    **options: Any,
) -> Results:
    form = {
        k: options.pop(k) for k in ("heads", "dim", "page_size", "layout", "form", "dtype", "kv_dtype") if k in options
    }
    p = paged(side, q_lens, kv_lens, **form)
    if per_head_scales:
        p.q = fp8(p.q)
    wrapper = side.BatchPrefillWithPagedKVCacheWrapper(
        side.workspace(), form.get("layout", "NHD"), **side.backend(backend)
    )
    types = {"q_data_type": p.q.dtype, "kv_data_type": p.k.dtype, "o_data_type": BF16 if per_head_scales else p.q.dtype}
    wrapper.plan(
        p.qo_indptr,
        *p.table,
        *p.heads,
        p.dim,
        p.page_size,
        **types,
        **mask_options(side, mask, q_lens, kv_lens),
        **options,
    )
    args = [
        side.rand(h, seed=s).abs().add(0.5)
        for h, s in zip((p.heads[0], p.heads[1], p.heads[1]), (4, 5, 6), strict=True)
    ]
    out, lse = wrapper.run(p.q, p.cache, *(args if per_head_scales else ()), return_lse=True, **(run or {}))
    return {"out": out, "lse": lse}


def batch_ragged(
    side: Side,
    q_lens: Sequence[int] = Q_LENS,
    kv_lens: Sequence[int] = KV_LENS,
    heads: tuple[int, int] = (8, 2),
    dims: tuple[int, int] = (128, 128),
    mask: str = "",
    backend: str = "fa2",
    kv_dtype: torch.dtype = BF16,
    run: dict[str, Any] | None = None,
    **options: Any,
) -> Results:
    q = side.rand(sum(q_lens), heads[0], dims[0], seed=1).mul(2).to(BF16)
    k = side.rand(sum(kv_lens), heads[1], dims[0], seed=2, dtype=BF16).to(kv_dtype)
    v = side.rand(sum(kv_lens), heads[1], dims[1], seed=3, dtype=BF16).to(kv_dtype)
    wrapper = side.BatchPrefillWithRaggedKVCacheWrapper(side.workspace(), "NHD", **side.backend(backend))
    wrapper.plan(
        indptr(side, q_lens),
        indptr(side, kv_lens),
        *heads,
        *dims,
        q_data_type=BF16,
        kv_data_type=kv_dtype,
        **mask_options(side, mask, q_lens, kv_lens),
        **options,
    )
    out, lse = wrapper.run(q, k, v, return_lse=True, **(run or {}))
    return {"out": out, "lse": lse}


def multi_item(side: Side, prefixes: Sequence[int] = (11, 20), window_left: int = -1) -> Results:
    """Items of 3, 2 and 4 tokens (then 5 and 1) after a prefix, all queries at once."""
    items = ([0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 5, 0, 1, 0])
    width = max(map(len, items))
    positions = torch.zeros(len(items), width, dtype=torch.int32)
    for row, values in enumerate(items):
        positions[row, : len(values)] = torch.tensor(values)
    lens = [n + len(values) for n, values in zip(prefixes, items, strict=True)]
    given: dict[str, Any] = {
        "causal": True,
        "window_left": window_left,
        "prefix_len_ptr": side.ints(list(prefixes)).to(torch.uint32),
        "token_pos_in_items_ptr": positions.flatten().to(side.device).to(torch.uint16),
        "token_pos_in_items_len": width,
        "max_item_len_ptr": side.ints([max(v) for v in items]).to(torch.uint16),
    }
    return batch_paged(side, lens, lens, **given)


def _single_cases() -> list[Case]:
    def case(features: str, module: str = "single-prefill", **kwargs: Any) -> Case:
        return Case("single_prefill_with_kv_cache", features, module, "attention", partial(single, **kwargs))

    return [
        case("GQA 8/2 NHD"),
        case("causal", causal=True),
        case("causal, kv_len < q_len", causal=True, q_len=40, kv_len=33),
        case("causal, HND, GQA 14/2", causal=True, layout="HND", heads=(14, 2)),
        case("custom mask", mask="bool"),
        case("packed custom mask", mask="packed", q_len=15, kv_len=37),
        case("custom mask wins over causal", mask="bool", causal=True),
        case("sm_scale, k_scale, v_scale", sm_scale=0.1, k_scale=1.3, v_scale=0.5),
        *(
            Case(
                "single_prefill_with_kv_cache",
                f"fp8 q, k, v with per-head scales{text}",
                "fa3-fp8",
                "attention fp8",
                run,
            )
            for text, run in ((", causal", partial(single_fp8, causal=True)), ("", partial(single_fp8, causal=False)))
        ),
    ]


def _paged_cases() -> list[Case]:
    def case(features: str, module: str = "prefill", kind: str = "attention", explained: str = "", **kw: Any) -> Case:
        run = partial(batch_paged, **kw)
        return Case("BatchPrefillWithPagedKVCacheWrapper", features, module, kind, run, explained)

    quirk = "upstream reads the offsets of a packed mask in elements, so that only its first sequence is right"
    twice = (
        "upstream multiplies the biased logits by sm_scale a second time before the tanh: with sm_scale 1 all agrees"
    )
    alibi, rope = {"pos_encoding_mode": "ALIBI"}, {"pos_encoding_mode": "ROPE_LLAMA"}
    approx = "attention approx"
    return [
        case("GQA 8/2 NHD tuple page 16"),
        case("causal", causal=True),
        case("causal, HND single page 16, GQA 28/4", causal=True, layout="HND", form="single", heads=(28, 4)),
        case("causal, NHD single page 1", causal=True, form="single", page_size=1),
        case("causal, HND, page 1 without a page dimension", causal=True, layout="HND", page_size=1, form="flat"),
        case("causal, kv_len < q_len", causal=True, q_lens=(40, 9, 3), kv_lens=(33, 2, 3)),
        case("causal, empty sequences", causal=True, q_lens=(0, 5, 4, 0), kv_lens=(9, 0, 37, 0)),
        case("custom mask", mask="bool"),
        case("custom mask wins over causal", mask="bool", causal=True),
        case("packed custom mask, batch 1", mask="packed", q_lens=(15,), kv_lens=(37,)),
        case("packed custom mask, batch 4", mask="packed", explained=quirk),
        case("sm_scale at plan", causal=True, sm_scale=0.05),
        case("q_scale, k_scale, v_scale", causal=True, run={"q_scale": 0.7, "k_scale": 1.3, "v_scale": 0.5}),
        case('lse_base "ln"', causal=True, run={"lse_base": "ln"}),
        case('lse_layout "HN"', causal=True, run={"lse_layout": "HN"}),
        case("fixed_split_size 2", causal=True, fixed_split_size=2),
        case("causal, window_left 30", "prefill-window", causal=True, window_left=30),
        case("causal, window_left 0", "prefill-window", causal=True, window_left=0),
        case("window_left 30 without causal", "prefill-window", window_left=30),
        case("custom mask and window_left 20", "prefill-window", mask="bool", window_left=20),
        case(
            "causal, window_left 5, kv_len < q_len",
            "prefill-window",
            causal=True,
            window_left=5,
            q_lens=(40, 9),
            kv_lens=(33, 2),
        ),
        case("causal, soft cap 8", "prefill-cap", approx, causal=True, logits_soft_cap=8.0),
        case("causal, soft cap 30", "prefill-cap", approx, causal=True, logits_soft_cap=30.0),
        case("causal, ALIBI", "prefill-alibi", causal=True, **alibi),
        case("ALIBI without causal, 12 heads", "prefill-alibi", heads=(12, 4), **alibi),
        case(
            "causal, ALIBI and soft cap 8",
            "prefill-alibi-cap",
            approx,
            twice,
            causal=True,
            logits_soft_cap=8.0,
            **alibi,
        ),
        case(
            "causal, ALIBI and soft cap 8, sm_scale 1",
            "prefill-alibi-cap",
            approx,
            causal=True,
            sm_scale=1.0,
            logits_soft_cap=8.0,
            **alibi,
        ),
        case("causal, ROPE_LLAMA", "prefill-rope", approx, causal=True, **rope),
        case(
            "causal, ROPE_LLAMA scale 2 theta 5e4",
            "prefill-rope",
            approx,
            causal=True,
            rope_scale=2.0,
            rope_theta=5e4,
            **rope,
        ),
        case(
            "causal, fp8 KV, k_scale, v_scale",
            "prefill-fp8",
            causal=True,
            kv_dtype=E4M3,
            run={"k_scale": 0.8, "v_scale": 1.7},
        ),
        case("head_dim 64, causal", "prefill-64", causal=True, dim=64),
        case("head_dim 256, causal", "prefill-256", causal=True, dim=256),
        case("fp16, causal", "prefill-fp16", causal=True, dtype=torch.float16),
        case("fa3", "fa3", backend="fa3"),
        case("fa3, causal", "fa3", backend="fa3", causal=True),
        case("fa3, causal, kv_len < q_len", "fa3", backend="fa3", causal=True, q_lens=(40, 9, 3), kv_lens=(33, 2, 3)),
        case("fa3, causal, empty sequences", "fa3", backend="fa3", causal=True, q_lens=(0, 5, 4), kv_lens=(9, 0, 37)),
        case("fa3, causal, window_left 30", "fa3-window", backend="fa3", causal=True, window_left=30),
        case(
            "fa3, fp8 q, k, v with per-head scales, causal",
            "fa3-fp8",
            "attention fp8",
            backend="fa3",
            causal=True,
            kv_dtype=E4M3,
            per_head_scales=True,
        ),
        Case("BatchPrefillWithPagedKVCacheWrapper", "multi-item scoring", "prefill", "attention", multi_item),
        Case(
            "BatchPrefillWithPagedKVCacheWrapper",
            "multi-item scoring, window_left 6",
            "prefill-window",
            "attention",
            partial(multi_item, window_left=6),
        ),
    ]


def _ragged_cases() -> list[Case]:
    def case(features: str, module: str = "prefill", kind: str = "attention", explained: str = "", **kw: Any) -> Case:
        run = partial(batch_ragged, **kw)
        return Case("BatchPrefillWithRaggedKVCacheWrapper", features, module, kind, run, explained)

    scales = "upstream ignores the scalar scales of a 16-bit ragged batch; here no argument is ignored"

    mla: dict[str, Any] = {"dims": (192, 128), "heads": (8, 8)}
    return [
        case("GQA 8/2"),
        case("causal, GQA 28/4", causal=True, heads=(28, 4)),
        case("causal, kv_len < q_len", causal=True, q_lens=(40, 9, 3), kv_lens=(33, 2, 3)),
        case("causal, empty sequences", causal=True, q_lens=(0, 5, 4, 0), kv_lens=(9, 0, 37, 0)),
        case("custom mask", mask="bool"),
        case('causal, lse_base "ln", lse_layout "HN"', causal=True, run={"lse_base": "ln", "lse_layout": "HN"}),
        case("causal, sm_scale", causal=True, sm_scale=0.05),
        case("causal, window_left 30", "prefill-window", causal=True, window_left=30),
        case("causal, soft cap 8", "prefill-cap", "attention approx", causal=True, logits_soft_cap=8.0),
        case("causal, ALIBI", "prefill-alibi", causal=True, pos_encoding_mode="ALIBI"),
        case("causal, ROPE_LLAMA", "prefill-rope", "attention approx", causal=True, pos_encoding_mode="ROPE_LLAMA"),
        case(
            "16-bit q: scales at run",
            explained=scales,
            causal=True,
            run={"q_scale": 0.7, "k_scale": 1.3, "v_scale": 0.5},
        ),
        case(
            "fp8 KV, k_scale, v_scale", "prefill-fp8", causal=True, kv_dtype=E4M3, run={"k_scale": 0.8, "v_scale": 1.7}
        ),
        case("head dims 192 and 128, causal", "ragged-192", causal=True, **mla),
        case("fa3, head dims 192 and 128, causal", "fa3-192", causal=True, backend="fa3", **mla),
        case("fa3, causal", "fa3", causal=True, backend="fa3"),
    ]


def cases() -> list[Case]:
    return [*_single_cases(), *_paged_cases(), *_ragged_cases()]
