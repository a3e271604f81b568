"""NVFP4 KV caches: quantise, append, read back."""

from collections.abc import Callable
from functools import partial

import torch
from compare.case import Case, Results, Side
from compare.kv import BF16, Paged, paged
from compare.page import APPENDED, KV_LENS, indices
from torch import Tensor

E4M3 = torch.float8_e4m3fn


def dequantize(side: Side, dtype: torch.dtype) -> Results:
    """All 256 bytes, that is every pair of E2M1 values."""
    bytes_ = torch.arange(256, dtype=torch.uint8).repeat(8).view(16, 128).to(side.device)
    scales = side.rand(16, 16, seed=1).abs().add(0.05).to(E4M3)
    return {"out": side.nvfp4_kv_dequantize(bytes_, scales, torch.tensor([0.37], device=side.device), dtype)}


def quantize(side: Side) -> Results:
    x = side.rand(16, 256, seed=1, dtype=BF16)
    packed, scales = side.nvfp4_kv_quantize(x, torch.tensor([0.01], device=side.device))
    return {"packed": packed, "scales": scales}


def caches(side: Side, layout: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Paged]:
    p = paged(side, APPENDED, KV_LENS, layout=layout)
    shape = p.k.shape[:-1]
    empty = [torch.zeros(*shape, p.dim // 2, dtype=torch.uint8, device=side.device) for _ in "kv"]
    scales = [torch.zeros(*shape, p.dim // 16, device=side.device).to(E4M3) for _ in "kv"]
    return tuple(empty), tuple(scales), p


def append(side: Side, layout: str = "NHD", slots: bool = False) -> Results:
    cache, scales, p = caches(side, layout)
    n = sum(APPENDED)
    k, v = side.rand(n, 2, 128, seed=8, dtype=BF16), side.rand(n, 2, 128, seed=9, dtype=BF16)
    batch, position = indices(side)
    factors = torch.tensor([0.01], device=side.device), torch.tensor([0.02], device=side.device)
    if slots:
        page = p.indices[(p.indptr[batch.long()] + position // 16).long()]
        slot = (page * 16 + position % 16).long()
        side.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(k, v, slot, cache, scales, *factors, layout)
    else:
        side.nvfp4_quantize_append_paged_kv_cache(
            k, v, batch, position, cache, scales, p.indices, p.indptr, p.last_page_len, *factors, layout
        )
    names = ("k", "v", "k scales", "v scales")
    return dict(zip(names, (*cache, *scales), strict=True))


def dequantize_paged(side: Side, layout: str = "NHD") -> Results:
    """Sequences of 37 and 20 tokens; what lies past them stays."""
    lens = (37, 20)
    p = paged(side, lens, lens, layout=layout)
    generator = torch.Generator().manual_seed(3)
    shape = (*p.k.shape[:-1], p.dim // 2)
    cache = tuple(torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(side.device) for _ in "kv")
    scales = tuple(side.rand(*p.k.shape[:-1], p.dim // 16, seed=s).abs().add(0.05).to(E4M3) for s in (5, 6))
    counts = (p.indptr[1:] - p.indptr[:-1]).tolist()
    table = torch.zeros(2, max(counts), dtype=torch.int32, device=side.device)
    for row, (first, count) in enumerate(zip(p.indptr.tolist(), counts, strict=False)):
        table[row, :count] = p.indices[first : first + count]
    k, v = (torch.full((2, 40, p.k.shape[1 if layout == "HND" else 2], p.dim), 7.0).to(p.k) for _ in "kv")
    factors = torch.tensor([0.3], device=side.device), torch.tensor([0.5], device=side.device)
    side.nvfp4_kv_dequantize_paged(cache, scales, table, p.seq_lens, *factors, k, v, layout)
    return {"k": k, "v": v}


def quantize_cache(side: Side, layout: str = "HND") -> Results:
    p = paged(side, APPENDED, KV_LENS, layout=layout)
    factors = torch.tensor([0.01], device=side.device), torch.tensor([0.02], device=side.device)
    (k, v), (ks, vs), k_scale, v_scale = side.nvfp4_quantize_paged_kv_cache(p.k, p.v, layout, *factors)
    return {
        "k": k,
        "v": v,
        "k scales": ks,
        "v scales": vs,
        "k_scale": torch.as_tensor(k_scale),
        "v_scale": torch.as_tensor(v_scale),
    }


def cases() -> list[Case]:
    def case(name: str, features: str, run: Callable[[Side], Results]) -> Case:
        return Case(name, features, "nvfp4", "elementwise", run)

    add = "nvfp4_quantize_append_paged_kv_cache"
    return [
        case("nvfp4_kv_dequantize", "bf16", partial(dequantize, dtype=BF16)),
        case("nvfp4_kv_dequantize", "fp16", partial(dequantize, dtype=torch.float16)),
        case("nvfp4_kv_quantize", "bf16", quantize),
        case("nvfp4_kv_dequantize_paged", "NHD", dequantize_paged),
        case("nvfp4_kv_dequantize_paged", "HND", partial(dequantize_paged, layout="HND")),
        case("nvfp4_quantize_paged_kv_cache", "HND", quantize_cache),
        case(add, "NHD", append),
        case(add, "HND", partial(append, layout="HND")),
        case(f"{add}_with_slot_mapping", "NHD", partial(append, slots=True)),
    ]
