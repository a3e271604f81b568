"""Rotary position embedding in plain torch.

Frequencies and angles are float64, so that a large position loses nothing: float32 angles are off by thousandths at
position 131071. Cosines, sines and the rotation are float32 (float64 for float64 inputs); results are rounded once.
"""

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def apply_rope(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int,
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    smooth_a: float,
    smooth_b: float,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
) -> Pair:
    """Rotate q, k [tokens, heads, dim]; token t of request b is at offsets[b] + t - indptr[b]."""
    pos_ids = token_positions(indptr, offsets, q.shape[0])
    return apply_rope_pos_ids(
        q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, smooth_a, smooth_b, q_rope, k_rope
    )


def apply_rope_inplace(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int,
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    smooth_a: float,
    smooth_b: float,
) -> None:
    """As apply_rope, into q and k."""
    apply_rope(q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta, smooth_a, smooth_b, q, k)


def apply_rope_pos_ids(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int,
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    smooth_a: float,
    smooth_b: float,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
) -> Pair:
    """Rotate q, k [tokens, heads, dim] by their positions. Pair i turns by position * f(i).

    f(i) = (1 - s) * f / rope_scale + s * f with f = rope_theta^(-2i / rotary_dim), s = clamp(f * smooth_a + smooth_b,
    0, 1); smooth_a = smooth_b = 0 is the plain form.
    """
    pair = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=q.device)
    frequency = rope_theta ** (-pair / rotary_dim)
    smooth = (frequency * smooth_a + smooth_b).clamp(0, 1)
    frequency = (1 - smooth) * frequency / rope_scale + smooth * frequency
    angle = pos_ids.double()[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return rotated(q, cos, sin, interleave, q_rope), rotated(k, cos, sin, interleave, k_rope)


def apply_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int,
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    smooth_a: float,
    smooth_b: float,
) -> None:
    """As apply_rope_pos_ids, into q and k."""
    apply_rope_pos_ids(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, smooth_a, smooth_b, q, k)


def apply_rope_with_cos_sin_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
) -> Pair:
    """Rotate query, key [tokens, heads * head_size] or [tokens, heads, head_size] by rows of a cache [cos | sin]."""
    cos, sin = cos_sin_cache[positions.long()].chunk(2, -1)
    results = []
    for x, out in ((query, query_rope), (key, key_rope)):
        heads = by_head(x, head_size)
        made = rotated(heads, cos, sin, not is_neox, None if out is None else by_head(out, head_size))
        results.append(made.reshape(x.shape) if out is None else out)
    return results[0], results[1]


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """As apply_rope_with_cos_sin_cache, into query and key."""
    apply_rope_with_cos_sin_cache(positions, query, key, head_size, cos_sin_cache, is_neox, query, key)


def token_positions(indptr: Tensor, offsets: Tensor, tokens: int) -> Tensor:
    """int64 [tokens]: the position of each token; 0, which turns nothing, for a token outside of every request."""
    token = torch.arange(tokens, device=indptr.device)
    if offsets.shape[0] == 0:
        return torch.zeros_like(token)
    starts = indptr.long()
    after = torch.searchsorted(starts, token, right=True)
    inside = (after > 0) & (after < starts.shape[0])
    request = (after - 1).clamp(0, offsets.shape[0] - 1)
    return torch.where(inside, offsets.long()[request] + token - starts[request], 0)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleave: bool, out: Tensor | None = None) -> Tensor:
    """x [tokens, heads, dim] with its first 2 * cos.shape[-1] dims turned, the rest copied; in x's dtype."""
    turned = rotate(x[..., : 2 * cos.shape[-1]], cos[:, None], sin[:, None], interleave).to(x.dtype)
    result = torch.cat((turned, x[..., turned.shape[-1] :]), -1)
    return result if out is None else out.copy_(result)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleave: bool) -> Tensor:
    """Turn all of the last dim, not rounded: pairs (2i, 2i + 1) when interleaved, else (i, i + dim / 2)."""
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    x, cos, sin = x.to(work), cos.to(work), sin.to(work)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleave else x.chunk(2, -1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    return torch.stack(turned, -1).flatten(-2) if interleave else torch.cat(turned, -1)


def by_head(x: Tensor, head_size: int) -> Tensor:
    """A view [tokens, heads, head_size] of [tokens, heads * head_size], or what has that form already."""
    return x if x.ndim == 3 else x.unflatten(-1, (x.shape[-1] // head_size, head_size))
