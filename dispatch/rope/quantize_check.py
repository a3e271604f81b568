"""Validation of the arguments of the quantising forms of RoPE, and what a Request says of them."""

from collections.abc import Mapping, Sequence

import torch
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
from kernelmux.dispatch.rope.describe import check_cache

ROLES = ("input", "positions", "out")
DIMS = ("num_qo_heads", "num_kv_heads", "rope_dim", "q_nope_dim", "k_nope_dim")
FEATURES = ("interleave", "mla", "inner_strided", "unaligned")


def quantize_request(
    op: str,
    parts: Mapping[str, Tensor | None],
    cache: Tensor,
    indices: Mapping[str, Tensor],
    is_neox: bool,
    quantize_dtype: torch.dtype,
    outs: Mapping[str, Tensor | None],
    caches: Mapping[str, Tensor] | None = None,
    per_token: Sequence[str] = ("pos_ids",),
) -> Request:
    """`parts` by name: q_rope, k_rope, q_nope, k_nope, perhaps v. `outs`: where they go, named with "_out" at the end.

    `caches`: k_cache and v_cache [pages, page_size, ...], which are written too. `per_token`: those of `indices` that
    hold a value per token.
    """
    q_rope, k_rope = _required(op, parts)
    check_counts(op, {**parts, **{name: indices[name] for name in per_token}, **outs})
    check_cache(op, cache)
    check_floats(op, parts)
    check_integers(op, indices)
    for name, index in indices.items():
        if index.ndim != 1:
            raise shape_error(op, name, index, "[length]", "flatten it")
    if len({t.dtype for t in parts.values() if t is not None}) != 1:
        got = ", ".join(f"{name} {dtype_name(t.dtype)}" for name, t in parts.items() if t is not None)
        raise TypeError(f"{op}: parts are {got}; give them one dtype")
    dim = q_rope.shape[-1]
    if k_rope.shape[-1] != dim or cache.shape[1] != dim or dim % 2 or not dim:
        got = f"q_rope {dim}, k_rope {k_rope.shape[-1]}, cos_sin_cache {cache.shape[1]}"
        raise ValueError(f"{op}: widths are {got}; all must be the same even number above 0")
    pages = dict(caches or {})
    check_device(op, q_rope.device, {**parts, "cos_sin_cache": cache, **indices, **outs, **pages})
    _check_outs(op, parts, outs, quantize_dtype)
    check_writable(op, pages)
    features = layout_features(*parts.values(), *outs.values(), *pages.values())
    if len({t.stride() for t in pages.values()}) > 1:
        features.add("kv_strides_differ")
    features |= (set() if is_neox else {"interleave"}) | ({"mla"} if k_rope.ndim == 2 else set())
    q_nope, k_nope = parts["q_nope"], parts["k_nope"]
    return Request(
        op=op,
        family="rope",
        device=q_rope.device,
        dtypes={"input": q_rope.dtype, "positions": indices["pos_ids"].dtype, "out": quantize_dtype},
        dims={
            "tokens": q_rope.shape[0],
            "num_qo_heads": q_rope.shape[1],
            "num_kv_heads": k_rope.shape[1] if k_rope.ndim == 3 else 1,
            "rope_dim": dim,
            "q_nope_dim": 0 if q_nope is None else q_nope.shape[-1],
            "k_nope_dim": 0 if k_nope is None else k_nope.shape[-1],
            **_cache_dims(pages),
        },
        features=frozenset(features),
        empty=q_rope.shape[0] == 0,
        grad=needs_grad(*parts.values()),
    )


def _cache_dims(caches: Mapping[str, Tensor]) -> dict[str, int]:
    if not caches:
        return {}
    return {"page_size": caches["k_cache"].shape[1], "head_dim_vo": caches["v_cache"].shape[-1]}


def _required(op: str, parts: Mapping[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    q_rope, k_rope = parts["q_rope"], parts["k_rope"]
    if q_rope is None or q_rope.ndim != 3:
        got = "None" if q_rope is None else list(q_rope.shape)
        raise ValueError(f"{op}: q_rope is {got}, it must be [tokens, heads, rope_dim]; reshape it")
    if k_rope is None or k_rope.ndim not in (2, 3):
        got = "None" if k_rope is None else list(k_rope.shape)
        raise ValueError(f"{op}: k_rope is {got}, it must be [tokens, heads, rope_dim] or [tokens, rope_dim]")
    for rope, name in ((q_rope, "q_nope"), (k_rope, "k_nope")):
        nope = parts[name]
        if nope is not None and (nope.ndim != rope.ndim or nope.shape[1:-1] != rope.shape[1:-1]):
            raise shape_error(op, name, nope, [*rope.shape[:-1], "nope_dim"], "give it the heads of its rope part")
    return q_rope, k_rope


def _check_outs(
    op: str, parts: Mapping[str, Tensor | None], outs: Mapping[str, Tensor | None], dtype: torch.dtype
) -> None:
    check_writable(op, outs)
    for name, out in outs.items():
        if out is None:
            continue
        if out.dtype != dtype:
            got, want = dtype_name(out.dtype), dtype_name(dtype)
            raise TypeError(f"{op}: {name} is {got}, the quantised dtype is {want}; make them equal")
        part = parts[name.removesuffix("_out")]
        if part is None and out.shape[-1]:
            raise ValueError(f"{op}: {name} is given, {name.removesuffix('_out')} is None; give both or neither")
        if part is not None and out.shape[1:] != part.shape[1:]:
            raise shape_error(op, name, out, list(part.shape), "give it the shape of its input")


def check_counts(op: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Every tensor has one row per token, of which the first tensor has as many as there are."""
    tokens = next(t.shape[0] for t in tensors.values() if t is not None)
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.ndim == 0 or tensor.shape[0] != tokens):
            raise ValueError(
                f"{op}: {name} has shape {list(tensor.shape)}, there are {tokens} tokens; give one row each"
            )


def facts(t: Tensor | None, tokens: int) -> tuple[object, ...] | None:
    """What a key holds of a tensor with a row per token: also whether it is so, which describe() insists on."""
    if t is None:
        return None
    shape = t.shape
    return t.dtype, t.device, shape[1:], t.stride(), t.data_ptr() & 15 == 0, shape[0] == tokens


def still(t: Tensor) -> tuple[object, ...]:
    """What a key holds of a tensor whose first dim does not matter to a decision."""
    return t.dtype, t.device, t.shape[1:], t.stride(), t.data_ptr() & 15 == 0
