"""The random numbers of sampling: Philox4x32-10 in integer torch ops, the same bits on every device.

A draw is a pure function of four integers, so it depends on nothing else in the batch and any kernel can make it again:

- `seed` and `offset`, 64 bits each, given by the caller or taken from a generator;
- `sequence`: the output row when all rows share one seed; 0 when each row brings its own (a seed tensor of one value
  per row), so that a request with its own seed draws the same wherever it sits in a batch;
- `index` j = 0, 1, …: which of the row's numbers.

Number j is word p % 4 of the block whose counter and key are, with p = offset + j (mod 2^64),

    counter = (low32(p // 4), high32(p // 4), low32(sequence), high32(sequence)),  key = (low32(seed), high32(seed))

which is also cuRAND's `curand_init(seed, sequence, offset)`. A word w becomes the uniform number (w + 0.5) / 2^32,
never 0 or 1; a kernel that rounds it must keep it below 1. What each sampler does with numbers 0, 1, … stands in its
reference.

Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class Words(NamedTuple):
    """Four 32-bit words, each in an int64 tensor."""

    x: Tensor
    y: Tensor
    z: Tensor
    w: Tensor


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds of Philox 4x32. All tensors are int64 with values in [0, 2^32) and broadcast together.

    >>> zero = torch.zeros(1, dtype=torch.int64)
    >>> " ".join(f"{int(word):08x}" for word in philox4x32(Words(zero, zero, zero, zero), (zero, zero)))
    '6627e8d5 e169c58d bc57ac4c 9b00dbd8'
    """
    x, y, z, w = counter
    k0, k1 = key
    for _ in range(10):
        a, b = x * _MULTIPLIERS[0], z * _MULTIPLIERS[1]  # the low 64 bits, all there are, whatever their sign
        x, y = (b >> 32 & _LOW) ^ y ^ k0, b & _LOW
        z, w = (a >> 32 & _LOW) ^ w ^ k1, a & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return Words(x, y, z, w)


def uniform(seed: int | Tensor, offset: int | Tensor, rows: range, batch: int, count: int, like: Tensor) -> Tensor:
    """The first `count` numbers of some rows of a batch.

    Args:
        seed, offset: an int, or an int64 or uint64 tensor [1] or [batch].
        rows: the output rows wanted, of `batch`.
        like: gives the device.

    Returns:
        float64 [len(rows), count], exact, in (0, 1).

    >>> uniform(seed=42, offset=8, rows=range(2), batch=2, count=3, like=torch.empty(0)).shape
    torch.Size([2, 3])
    """
    own = isinstance(seed, Tensor) and seed.numel() == batch
    sequence = torch.arange(rows.start, rows.stop, device=like.device).mul_(0 if own else 1)[:, None]
    keys, start = _column(seed, rows, like), _column(offset, rows, like)
    block = _shift(start, 2) + torch.arange((count + 6) // 4, device=like.device)
    counter = Words(block & _LOW, block >> 32 & (_LOW >> 2), sequence & _LOW, _shift(sequence, 32))
    words = torch.stack(philox4x32(counter, (keys & _LOW, keys >> 32 & _LOW)), dim=-1).flatten(1)
    at = (start & 3) + torch.arange(count, device=like.device)
    return words.gather(1, at.expand(len(rows), count)).double().add_(0.5).mul_(2.0**-32)


def _column(value: int | Tensor, rows: range, like: Tensor) -> Tensor:
    """A 64-bit value per row as int64 [rows or 1, 1]."""
    if isinstance(value, int):
        signed = (value + 2**63) % 2**64 - 2**63
        return torch.full((1, 1), signed, dtype=torch.int64, device=like.device)
    bits = value.view(torch.int64)
    return bits[:, None] if bits.numel() == 1 else bits[rows.start : rows.stop, None]


def _shift(value: Tensor, by: int) -> Tensor:
    """Shift right with zeros coming in."""
    return value >> by & (2 ** (64 - by) - 1)
