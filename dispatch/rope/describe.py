"""Validation of RoPE's arguments, and what a Request says of them."""

import math
from collections.abc import Mapping

from torch import Tensor

from kernelmux.capabilities import Request, dtype_name
from kernelmux.dispatch.arguments import (
    check_device,
    check_floats,
    check_integers,
    check_writable,
    layout_features,
    needs_grad,
    shape_error,
)

DIMS = ("num_qo_heads", "num_kv_heads", "head_dim", "rotary_dim")
FEATURES = ("interleave", "partial", "inner_strided", "unaligned")
Scaling = tuple[float, float, float, float]  # rope_scale, rope_theta, smooth_a, smooth_b


def computed_request(
    op: str,
    parts: Mapping[str, Tensor],
    indices: Mapping[str, Tensor],
    rotary_dim: int,
    interleave: bool,
    scaling: Scaling,
    outs: tuple[Tensor | None, ...] | None,
) -> Request:
    """A form that computes its angles. `parts` are q and k; `outs` None: they are written."""
    scale, theta, smooth_a, smooth_b = scaling
    if not (scale > 0 and theta > 0):
        got = f"rope_scale is {float(scale)}, rope_theta {float(theta)}"
        raise ValueError(f"{op}: {got}, both must be above 0; correct them")
    features = {"llama31"} if smooth_a or smooth_b else set()
    head_dim = parts["q"].shape[-1]
    if head_dim != parts["k"].shape[-1]:
        want = [*parts["k"].shape[:-1], head_dim]
        raise shape_error(op, "k", parts["k"], want, "give q and k the same head_dim")
    return rope_request(op, parts, indices, head_dim, rotary_dim, interleave, outs, features=features)


def rope_request(
    op: str,
    parts: Mapping[str, Tensor],
    indices: Mapping[str, Tensor],
    head_dim: int,
    rotary_dim: int,
    interleave: bool,
    outs: tuple[Tensor | None, ...] | None,
    *,
    features: set[str],
    cache: Tensor | None = None,
) -> Request:
    """`parts` are the queries and the keys, [tokens, heads, head_dim]; `outs` None: they are written."""
    (_, q), (_, k) = parts.items()
    check_floats(op, {**parts})
    check_integers(op, {**indices})
    if q.dtype != k.dtype or len({i.dtype for i in indices.values()}) != 1:
        got = ", ".join(f"{name} {dtype_name(t.dtype)}" for name, t in {**parts, **indices}.items())
        raise TypeError(f"{op}: dtypes are {got}; give queries and keys one dtype, and the index tensors one")
    check_device(op, q.device, {**parts, **indices, "cos_sin_cache": cache})
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"{op}: rotary_dim is {rotary_dim}, it must be even and 2..{head_dim}; correct it")
    if outs is None:
        check_writable(op, {**parts})
    features = features | layout_features(q, k, *(outs or ()))
    features |= ({"interleave"} if interleave else set()) | ({"partial"} if rotary_dim < head_dim else set())
    return Request(
        op=op,
        family="rope",
        device=q.device,
        dtypes={"q": q.dtype, "k": k.dtype, "positions": next(iter(indices.values())).dtype},
        dims={
            "tokens": q.shape[0],
            "num_qo_heads": q.shape[1],
            "num_kv_heads": k.shape[1],
            "head_dim": head_dim,
            "rotary_dim": rotary_dim,
        },
        features=frozenset(features),
        empty=q.shape[0] == 0 or q.numel() + k.numel() == 0,
        grad=needs_grad(q, k),
    )


def check_tokens(op: str, parts: Mapping[str, Tensor], positions: Mapping[str, Tensor]) -> None:
    """What a key cannot hold: q and k are [tokens, heads, head_dim] of the same tokens, positions [tokens]."""
    for name, part in parts.items():
        if part.ndim != 3:
            raise shape_error(op, name, part, "[tokens, heads, head_dim]", "reshape it")
    check_counts(op, parts, positions)


def last_dim(q: Tensor) -> int:
    """q's head_dim; 0 for a tensor without dims, which is refused later."""
    shape = q.shape
    return shape[-1] if shape else 0


def check_counts(op: str, parts: Mapping[str, Tensor], positions: Mapping[str, Tensor]) -> None:
    for name, part in parts.items():
        if part.ndim == 0:
            raise shape_error(op, name, part, "[tokens, …]", "reshape it")
    tokens = next(iter(parts.values())).shape[0]
    for name, part in parts.items():
        if part.shape[0] != tokens:
            raise shape_error(op, name, part, [tokens, *part.shape[1:]], "give every part the same tokens")
    for name, index in positions.items():
        if index.shape != (tokens,):
            raise shape_error(op, name, index, [tokens], "give one value per token")


def check_requests(op: str, indptr: Tensor, offsets: Tensor) -> None:
    """indptr is [batch + 1], offsets [batch]."""
    if indptr.ndim != 1 or offsets.ndim != 1 or indptr.shape[0] != offsets.shape[0] + 1:
        got = f"indptr has shape {list(indptr.shape)}, offsets {list(offsets.shape)}"
        raise ValueError(f"{op}: {got}, they must be [batch + 1] and [batch]; give one offset per request")


def check_cache(op: str, cache: Tensor) -> None:
    """cos_sin_cache is float32 [max_position, rotary_dim]."""
    if cache.ndim != 2:
        raise shape_error(op, "cos_sin_cache", cache, "[max_position, rotary_dim]", "give cosines, then sines, per row")
    if str(cache.dtype) != "torch.float32":
        got = dtype_name(cache.dtype)
        raise ValueError(f"{op}: cos_sin_cache is {got}, it must be float32; compute it in float32, do not round it")


def smoothing(low_freq_factor: float, high_freq_factor: float, old_context_len: float) -> tuple[float, float]:
    """(a, b) of Llama 3.1's frequency scaling, whose weight of the unscaled frequency f is clamp(a f + b, 0, 1)."""
    width = high_freq_factor - low_freq_factor
    if width <= 0:
        raise ValueError(
            f"low_freq_factor is {low_freq_factor}, high_freq_factor {high_freq_factor}; the high one must be larger"
        )
    return old_context_len / (2 * math.pi * width), -low_freq_factor / width
