"""Rotary embedding: computed and from a cache, in place or not, and the quantising forms."""

from functools import partial
from typing import Any

import torch
from compare.case import Case, Results, Side
from compare.kv import BF16, fp8, indptr, paged
from torch import Tensor

LENS, OFFSETS = (5, 0, 17, 1), (0, 3, 100, 511)
E4M3 = torch.float8_e4m3fn


def qk(side: Side, dim: int, fused: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    n = sum(LENS)
    if fused:
        whole = side.rand(n, 8 + 2 + 2, dim, seed=1, dtype=dtype)
        return whole[:, :8], whole[:, 8:10]
    return side.rand(n, 8, dim, seed=1, dtype=dtype), side.rand(n, 2, dim, seed=2, dtype=dtype)


def positions(side: Side, dtype: torch.dtype = torch.int32) -> Tensor:
    return side.ints([first + i for n, first in zip(LENS, OFFSETS, strict=True) for i in range(n)], dtype)


def computed(
    side: Side,
    name: str,
    dim: int = 128,
    fused: bool = False,
    dtype: torch.dtype = BF16,
    index: torch.dtype = torch.int32,
    **kw: Any,
) -> Results:
    q, k = qk(side, dim, fused, dtype)
    where = (
        (positions(side, index),) if "pos_ids" in name else (indptr(side, LENS).to(index), side.ints(OFFSETS, index))
    )
    made = getattr(side, name)(q, k, *where, **kw)
    if name.endswith("inplace"):
        return {"q": q, "k": k}
    return {"q": made[0], "k": made[1], "q before": q}


def cache(side: Side, width: int) -> Tensor:
    angles = torch.arange(600.0)[:, None] * 1e4 ** (-torch.arange(0, width, 2) / width)
    return torch.cat((angles.cos(), angles.sin()), -1).float().to(side.device)


def cached(
    side: Side,
    inplace: bool,
    dim: int = 128,
    rotary: int = 0,
    neox: bool = True,
    fused: bool = False,
    dtype: torch.dtype = BF16,
    index: torch.dtype = torch.int64,
) -> Results:
    n = sum(LENS)
    if fused:
        whole = side.rand(n, 12 * dim, seed=1, dtype=dtype)
        q, k = whole[:, : 8 * dim], whole[:, 8 * dim : 10 * dim]
    else:
        q, k = side.rand(n, 8 * dim, seed=1, dtype=dtype), side.rand(n, 2 * dim, seed=2, dtype=dtype)
    args = positions(side, index), q, k, dim, cache(side, rotary or dim)
    if inplace:
        side.apply_rope_with_cos_sin_cache_inplace(*args, is_neox=neox)
        return {"q": q, "k": k}
    q, k = side.apply_rope_with_cos_sin_cache(*args, is_neox=neox)
    return {"q": q, "k": k}


def quantised(
    side: Side, name: str = "rope_quantize_fp8", mla: bool = False, neox: bool = True, nope: int = 64, **kw: Any
) -> Results:
    n = sum(LENS)
    heads = () if mla else (2,)
    q_rope, k_rope = side.rand(n, 8, 64, seed=1, dtype=BF16), side.rand(n, *heads, 64, seed=2, dtype=BF16)
    width = 512 if mla else nope
    q_nope = side.rand(n, 8, width, seed=3, dtype=BF16) if width else None
    k_nope = side.rand(n, *heads, width, seed=4, dtype=BF16) if width else None
    made = getattr(side, name)(q_rope, k_rope, q_nope, k_nope, cache(side, 64), positions(side), is_neox=neox, **kw)
    names = ("q_rope", "k_rope", "q_nope", "k_nope")
    return {key: t for key, t in zip(names, made, strict=True) if t is not None and t.numel()}


def appended(side: Side, mla: bool, layout: str = "NHD") -> Results:
    """Rotate, quantise and append: tokens are the last ones of each sequence."""
    lens, kv_lens = (5, 0, 17, 1), (37, 8, 60, 1)
    p = paged(side, lens, kv_lens, kv_dtype=E4M3, layout=layout)
    n = sum(lens)
    heads, width = ((), 512) if mla else ((2,), 64)
    q_rope, k_rope = side.rand(n, 8, 64, seed=1, dtype=BF16), side.rand(n, *heads, 64, seed=2, dtype=BF16)
    q_nope, k_nope = side.rand(n, 8, width, seed=3, dtype=BF16), side.rand(n, *heads, width, seed=4, dtype=BF16)
    v = None if mla else side.rand(n, 2, 128, seed=5, dtype=BF16)
    if mla:
        pages = p.k.shape[0]
        stores = fp8(side.rand(pages, 16, 512, seed=6)), fp8(side.rand(pages, 16, 64, seed=7))
    else:
        stores = p.k, p.v
    batch = side.ints([b for b, m in enumerate(lens) for _ in range(m)])
    where = side.ints([kv_lens[b] - m + i for b, m in enumerate(lens) for i in range(m)])
    q_rope_out, q_nope_out = side.rope_quantize_fp8_append_paged_kv_cache(
        q_rope, k_rope, q_nope, k_nope, v, cache(side, 64), where, stores, p.indices, p.indptr, batch, where,
        quant_scale_q=0.7, quant_scale_kv=1.5, page_size=16, kv_layout=layout,
    )  # fmt: skip
    return {"q_rope": q_rope_out, "q_nope": q_nope_out, "first cache": stores[0], "second cache": stores[1]}


def _computed_cases() -> list[Case]:
    def case(name: str, features: str, **kwargs: Any) -> Case:
        return Case(name, features, "rope", "rope", partial(computed, name=name, **kwargs))

    found = []
    for stem in ("apply_rope", "apply_llama31_rope"):
        for name in (stem, f"{stem}_inplace", f"{stem}_pos_ids", f"{stem}_pos_ids_inplace"):
            found.append(case(name, "rotate-half, views of a fused qkv", fused=True))
            found.append(case(name, "interleaved, rotary_dim 64", interleave=True, rotary_dim=64))
    return [
        *found,
        case(
            "apply_rope",
            "scale 4, theta 5e5, head_dim 64, fp16",
            dim=64,
            dtype=torch.float16,
            rope_scale=4,
            rope_theta=5e5,
        ),
        case("apply_rope_pos_ids", "int64 positions, head_dim 256", dim=256, index=torch.int64),
        case(
            "apply_llama31_rope",
            "factors",
            rope_scale=16,
            rope_theta=1e5,
            low_freq_factor=2,
            high_freq_factor=8,
            old_context_len=256,
        ),
    ]


def _cached_cases() -> list[Case]:
    found = []
    for inplace, name in ((False, "apply_rope_with_cos_sin_cache"), (True, "apply_rope_with_cos_sin_cache_inplace")):
        for features, kwargs in (
            ("neox", {}),
            ("neox, rotary 32, views of a fused qkv", {"rotary": 32, "fused": True}),
            ("interleaved, head_dim 64, fp16", {"neox": False, "dim": 64, "dtype": torch.float16}),
            ("interleaved, rotary 64, int32 positions", {"neox": False, "rotary": 64, "index": torch.int32}),
        ):
            found.append(Case(name, features, "rope", "elementwise", partial(cached, inplace=inplace, **kwargs)))
    return found


def cases() -> list[Case]:
    def case(name: str, features: str, run: partial) -> Case:
        return Case(name, features, "rope", "elementwise", run)

    append = "rope_quantize_fp8_append_paged_kv_cache"
    return [
        *_computed_cases(),
        *_cached_cases(),
        case("rope_quantize_fp8", "GQA, scales", partial(quantised, quant_scale_q=0.7, quant_scale_kv=30.0)),
        case("rope_quantize_fp8", "GQA, interleaved", partial(quantised, neox=False)),
        case("rope_quantize_fp8", "GQA without nope", partial(quantised, nope=0)),
        case("rope_quantize_fp8", "MLA", partial(quantised, mla=True)),
        case("rope_quantize_fp8", "saturating", partial(quantised, quant_scale_q=400.0)),
        case(
            "mla_rope_quantize_fp8",
            "scales",
            partial(quantised, name="mla_rope_quantize_fp8", mla=True, quant_scale_q=0.7),
        ),
        case(append, "GQA NHD", partial(appended, mla=False)),
        case(append, "GQA HND", partial(appended, mla=False, layout="HND")),
        case(append, "MLA", partial(appended, mla=True)),
    ]
