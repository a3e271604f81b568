"""Paged and ragged batches, the same on both sides: shuffled pages, and live values past each sequence's end."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from compare.case import Side
from torch import Tensor

BF16 = torch.bfloat16


@dataclass(slots=True)
class Paged:
    q: Tensor
    k: Tensor  # NHD or HND pages
    v: Tensor
    cache: Tensor | tuple[Tensor, Tensor]
    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    seq_lens: Tensor
    heads: tuple[int, int]
    dim: int
    page_size: int

    @property
    def table(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.indptr, self.indices, self.last_page_len


def paged(
    side: Side,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    heads: tuple[int, int] = (8, 2),
    dim: int = 128,
    page_size: int = 16,
    layout: str = "NHD",
    form: str = "tuple",
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Paged:
    """`form`: "tuple", "single" (K and V in one tensor) or "flat" (page size 1 without a page dimension)."""
    counts = [-(-n // page_size) for n in kv_lens]
    pool = sum(counts) + 5
    order = torch.randperm(pool, generator=torch.Generator().manual_seed(seed))[: sum(counts)]
    shape = (pool, 2, page_size, heads[1], dim) if layout == "NHD" else (pool, 2, heads[1], page_size, dim)
    both = side.rand(*shape, seed=seed + 1, dtype=dtype).to(kv_dtype or dtype)
    k, v = both[:, 0], both[:, 1]
    page_dim = 2 if layout == "NHD" else 3
    if form == "flat":
        k, v = k.squeeze(page_dim - 1).contiguous(), v.squeeze(page_dim - 1).contiguous()
    elif form == "tuple":
        k, v = k.contiguous(), v.contiguous()
    return Paged(
        q=side.rand(sum(q_lens), heads[0], dim, seed=seed + 2).mul(2).to(dtype),
        k=k,
        v=v,
        cache=both if form == "single" else (k, v),
        qo_indptr=indptr(side, q_lens),
        indptr=indptr(side, counts),
        indices=order.to(torch.int32).to(side.device),
        last_page_len=side.ints([(n - 1) % page_size + 1 if n else 0 for n in kv_lens]),
        seq_lens=side.ints(list(kv_lens)),
        heads=heads,
        dim=dim,
        page_size=page_size,
    )


def indptr(side: Side, lens: Sequence[int]) -> Tensor:
    return side.ints([0, *accumulate(lens)])


def masks(side: Side, q_lens: Sequence[int], kv_lens: Sequence[int], seed: int = 9) -> Tensor:
    """Flat bool masks of all sequences, 60 % True, with the first row of each all False."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        mask = torch.rand(q_len, kv_len, generator=generator) < 0.6
        mask[:1] = False
        parts.append(mask.flatten())
    return torch.cat(parts).to(side.device)


def fp8(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return x.float().clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
