"""Attention by its formula, one row and one head at a time in float64, and paged caches to run it on."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def offsets(lengths: Any) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    causal: bool = False,
    window: int = -1,
    cap: float = 0.0,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi: bool = False,
) -> tuple[Tensor, Tensor]:
    """One sequence: q [n, H, D], k and v [m, Hkv, D] to out [n, H, Dv] and base-2 lse [n, H], float64."""
    (n, heads, dim), m = q.shape, k.shape[0]
    q, k, v = q.double(), k.double(), v.double()
    group = heads // k.shape[1]
    out, lse = torch.zeros(n, heads, v.shape[2]).double(), torch.full((n, heads), -math.inf).double()
    scale = 1 / math.sqrt(dim) if scale is None else scale
    for i, h in itertools.product(range(n), range(heads)):
        p = i + m - n
        seen = [
            j
            for j in range(m)
            if (bool(mask[i, j]) if mask is not None else (not causal or j <= p)) and (window < 0 or j >= p - window)
        ]
        s = k[seen, h // group] @ q[i, h] * scale
        if alibi:
            s = s + 2.0 ** (-8 * (h + 1) / heads) * (torch.tensor(seen) - i)
        if cap > 0:
            s = cap * torch.tanh(s / cap)
        terms = s if sinks is None else torch.cat((s, sinks[h : h + 1].double()))
        if len(terms):
            total = torch.logsumexp(terms, 0)
            lse[i, h] = total * math.log2(math.e)
            out[i, h] = torch.exp(s - total) @ v[seen, h // group]
    return out, lse


@dataclass
class Paged:
    """A batch over a paged cache: pages in random order, NaN wherever no key lives."""

    q_lens: tuple[int, ...] = (2, 1, 3)
    kv_lens: tuple[int, ...] = (5, 0, 33)
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    page: int = 16
    layout: str = "NHD"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    spare: int = 3
    tables: tuple[Tensor, Tensor, Tensor] = field(init=False)  # indptr, indices, last_page_len

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        counts = [-(-n // self.page) for n in self.kv_lens]
        ids = torch.randperm(sum(counts) + self.spare, generator=g, dtype=torch.int64)
        self.q = torch.randn(sum(self.q_lens), self.heads[0], self.dims[0], generator=g).to(self.dtype)
        self.ks, self.vs = (
            [torch.randn(n, self.heads[1], d, generator=g).to(self.dtype) for n in self.kv_lens] for d in self.dims
        )
        self.parts = [torch.full((len(ids), self.page, self.heads[1], d), math.nan).to(self.dtype) for d in self.dims]
        for b, pages in enumerate(torch.split(ids[: sum(counts)], counts)):
            for cache, rows in zip(self.parts, (self.ks[b], self.vs[b]), strict=True):
                for i in range(self.kv_lens[b]):
                    cache[pages[i // self.page], i % self.page] = rows[i]
        last = [n - (c - 1) * self.page if c else 0 for n, c in zip(self.kv_lens, counts, strict=True)]
        self.tables = (offsets(counts), ids.to(torch.int32), torch.tensor(last, dtype=torch.int32))
        self.qo_indptr = offsets(self.q_lens)

    @property
    def size(self) -> int:
        return len(self.q_lens)

    def _laid(self) -> list[Tensor]:
        return [c if self.layout == "NHD" else c.transpose(1, 2).contiguous() for c in self.parts]

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        k, v = self._laid()
        return k, v

    @property
    def single(self) -> Tensor:
        return torch.stack(self._laid(), dim=1)

    def expect(self, masks: list[Tensor] | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        found = [
            attend(q, k, v, mask=masks and masks[i], **options)
            for i, (q, k, v) in enumerate(zip(self.q.split(self.q_lens), self.ks, self.vs, strict=True))
        ]
        return torch.cat([o for o, _ in found]), torch.cat([s for _, s in found])


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)
