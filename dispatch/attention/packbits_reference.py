"""Packing booleans into bytes in plain torch."""

import torch
from torch import Tensor


def packbits(x: Tensor, bitorder: str, y: Tensor | None = None) -> Tensor:
    """Pack x [n] (non-zero = 1) into uint8 [ceil(n/8)]; the last byte is padded with zeros."""
    bits = torch.nn.functional.pad((x != 0).to(torch.uint8), (0, -x.shape[0] % 8)).view(-1, 8)
    packed = (bits << _shifts(bitorder, x.device)).sum(-1, dtype=torch.uint8)
    return packed if y is None else y.copy_(packed)


def segment_packbits(x: Tensor, indptr: Tensor, packed_indptr: Tensor, bitorder: str, y: Tensor) -> Tensor:
    """Pack each segment x[indptr[i]:indptr[i+1]] on its own, to y[packed_indptr[i]:packed_indptr[i+1]].

    `indptr` counts bits and is int64, `packed_indptr` counts bytes and is int32.
    """
    at = torch.arange(x.shape[0], device=x.device)
    segment = torch.searchsorted(indptr, at, right=True) - 1
    inside = (segment >= 0) & (segment < indptr.shape[0] - 1)
    segment = segment.clamp(0, max(0, indptr.shape[0] - 2))
    local = at - indptr[segment]
    byte = torch.where(inside, packed_indptr[segment].long() + local // 8, 0)
    bits = ((x != 0) & inside).to(torch.uint8) << _shifts(bitorder, x.device)[local % 8]
    y.zero_()
    return y if y.numel() == 0 else y.index_add_(0, byte, bits)


def _shifts(bitorder: str, device: torch.device) -> Tensor:
    """How far bit i of a byte is shifted."""
    bit = torch.arange(8, dtype=torch.uint8, device=device)
    return bit if bitorder == "little" else 7 - bit
