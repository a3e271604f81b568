"""Appending to paged caches, and the index helpers."""

from functools import partial
from typing import Any

import torch
from compare.case import Case, Results, Side
from compare.kv import BF16, indptr, paged

APPENDED, KV_LENS = (3, 0, 5, 1), (37, 0, 300, 1)


def indices(side: Side) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch index and position of each appended token, worked out here."""
    batch = [b for b, n in enumerate(APPENDED) for _ in range(n)]
    position = [KV_LENS[b] - n + i for b, n in enumerate(APPENDED) for i in range(n)]
    return side.ints(batch), side.ints(position)


def append(
    side: Side, strided: bool = False, kv_dtype: torch.dtype = BF16, index: torch.dtype = torch.int32, **form: Any
) -> Results:
    p = paged(side, APPENDED, KV_LENS, kv_dtype=kv_dtype, **form)
    n = sum(APPENDED)
    fused = side.rand(n, 3 * 2 * p.dim, seed=8).to(kv_dtype).view(n, 3, 2, p.dim)
    k, v = fused[:, 1], fused[:, 2]
    if not strided:
        k, v = k.contiguous(), v.contiguous()
    batch, position = indices(side)
    side.append_paged_kv_cache(
        k,
        v,
        batch.to(index),
        position.to(index),
        p.cache,
        p.indices,
        p.indptr,
        p.last_page_len,
        form.get("layout", "NHD"),
    )
    return {"k": p.k, "v": p.v}


def append_mla(side: Side, page_size: int, one_buffer: bool = False) -> Results:
    p = paged(side, APPENDED, KV_LENS, page_size=page_size)
    pages = p.k.shape[0]
    whole = side.rand(pages, page_size, 576, seed=3, dtype=BF16)
    ckv, kpe = whole[..., :512], whole[..., 512:]
    if not one_buffer:
        ckv, kpe = ckv.contiguous(), kpe.contiguous()
    n = sum(APPENDED)
    new = side.rand(n, 512, seed=4, dtype=BF16), side.rand(n, 64, seed=5, dtype=BF16)
    side.append_paged_mla_kv_cache(*new, *indices(side), ckv, kpe, p.indices, p.indptr, p.last_page_len)
    return {"ckv": ckv, "kpe": kpe}


def positions(side: Side, nnz: int, given: bool = False) -> Results:
    buffers = {}
    if given:
        buffers = {"batch_indices": side.ints([7] * nnz), "positions": side.ints([0] * nnz)}
    batch, position = side.get_batch_indices_positions(indptr(side, APPENDED), side.ints(list(KV_LENS)), nnz, **buffers)
    return {"batch_indices": batch, "positions": position}


def seq_lens(side: Side, page_size: int) -> Results:
    return {"seq_lens": side.get_seq_lens(side.ints([0, 3, 3, 4, 9]), side.ints([5, 0, page_size, 1]), page_size)}


def cases() -> list[Case]:
    def case(function: str, features: str, run: partial) -> Case:
        return Case(function, features, "page", "exact", run)

    kv, mla, batch = "append_paged_kv_cache", "append_paged_mla_kv_cache", "get_batch_indices_positions"
    return [
        case(kv, "NHD tuple page 16", partial(append)),
        case(kv, "HND single page 16", partial(append, layout="HND", form="single")),
        case(kv, "NHD single page 1", partial(append, page_size=1, form="single")),
        case(kv, "NHD page 1 without a page dimension", partial(append, page_size=1, form="flat")),
        case(kv, "k and v as views of one tensor", partial(append, strided=True)),
        case(kv, "int64 indices", partial(append, index=torch.int64)),
        case(kv, "fp8, head_dim 64", partial(append, kv_dtype=torch.float8_e4m3fn, dim=64)),
        case(kv, "fp16, head_dim 256", partial(append, kv_dtype=torch.float16, dim=256)),
        case(mla, "page 16", partial(append_mla, page_size=16)),
        case(mla, "page 1", partial(append_mla, page_size=1)),
        case(mla, "one buffer of 576", partial(append_mla, page_size=16, one_buffer=True)),
        case(batch, "an empty segment", partial(positions, nnz=9)),
        case(batch, "nnz past the last segment", partial(positions, nnz=12)),
        case(batch, "into given buffers", partial(positions, nnz=9, given=True)),
        case("get_seq_lens", "page 16", partial(seq_lens, page_size=16)),
        case("get_seq_lens", "page 1", partial(seq_lens, page_size=1)),
    ]
