"""Positions inside attention: rotary embedding of unrotated caches, and ALiBi slopes."""

import math

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, rope_scale: float, rope_theta: float) -> Tensor:
    """Rotate x [n, heads, dim] at `positions` [n], pairing element i with i + dim/2 over the whole dim.

    Angles are taken in float64: at position 131071 float32 would be off by a hundredth of a radian.
    """
    half = x.shape[-1] // 2
    exponent = torch.arange(half, dtype=torch.float64, device=x.device) / half
    frequency = rope_theta**-exponent / rope_scale
    angle = positions.to(torch.float64)[:, None, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def alibi_slopes(num_heads: int) -> list[float]:
    """One slope per query head.

    >>> alibi_slopes(3)
    [0.0625, 0.00390625, 0.25]
    """
    n = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8 * (i + 1) / n) for i in range(n)]
    return slopes + [2.0 ** (-4 * (2 * i + 1) / n) for i in range(num_heads - n)]
