"""Packing of bool masks."""

from functools import partial

import torch
from compare.case import Case, Results, Side


def bits(n: int, seed: int = 1) -> torch.Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.5


def packbits(side: Side, n: int, order: str) -> Results:
    return {"out": side.packbits(bits(n).to(side.device), order)}


def segments(side: Side, order: str, lens: tuple[int, ...] = (7, 0, 16, 33, 1)) -> Results:
    starts = side.ints([0, *torch.tensor(lens).cumsum(0).tolist()])
    packed, offsets = side.segment_packbits(bits(sum(lens)).to(side.device), starts, order)
    return {"packed": packed, "indptr": offsets}


def cases() -> list[Case]:
    found = []
    for order in ("big", "little"):
        found += [
            Case("packbits", f"{order}, {n} bits", "quantization", "exact", partial(packbits, n=n, order=order))
            for n in (64, 999)
        ]
        found.append(
            Case("segment_packbits", f"{order}, 5 segments", "quantization", "exact", partial(segments, order=order))
        )
    return found
