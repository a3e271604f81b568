"""RoPE that computes its angles: the ops behind apply_rope and apply_rope_pos_ids, and one way into all of them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from kernelmux.capabilities import Request
from kernelmux.dispatch.arguments import needs_grad, refuse_grad
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.page.check import check_offsets
from kernelmux.dispatch.rope import reference
from kernelmux.dispatch.rope.describe import (
    DIMS,
    FEATURES,
    check_requests,
    check_tokens,
    computed_request,
    last_dim,
)

Pair = tuple[Tensor, Tensor]

_NUMBERS = "int rotary_dim, bool interleave, float rope_scale, float rope_theta, float smooth_a, float smooth_b"
_POS_IDS, _REQUESTS = ("pos_ids",), ("indptr", "offsets")


def _op(run: Callable[..., Any], indices: Sequence[str], in_place: bool, check: Callable[..., None] | None) -> Op:
    """The op of one reference function; `indices` names its tensors of positions."""
    name = run.__name__

    def describe(q: Tensor, k: Tensor, *others: Any) -> Request:
        where, numbers = others[: len(indices)], others[len(indices) :]
        (dim, interleave), scaling, outs = numbers[:2], numbers[2:6], None if in_place else numbers[6:]
        named = dict(zip(indices, where, strict=True))
        return computed_request(name, {"q": q, "k": k}, named, dim, interleave, scaling, outs)

    tensors = "".join(f", Tensor {index}" for index in indices)
    schema = f"(Tensor q, Tensor k{tensors}, {_NUMBERS}, Tensor(a!) q_rope, Tensor(b!) k_rope) -> ()"
    if in_place:
        schema = f"(Tensor(a!) q, Tensor(b!) k{tensors}, {_NUMBERS}) -> ()"
    return Op(
        name, "rope", run, describe, growing=("tokens",), dims=DIMS, roles=("q", "k", "positions"),
        features=(*FEATURES, "llama31"), schema=schema, check=check, in_place=in_place,
    )  # fmt: skip


def _check(q: Tensor, k: Tensor, indptr: Tensor, *others: object) -> None:
    check_offsets("indptr", indptr, q.shape[0], "q")


APPLY_ROPE = _op(reference.apply_rope, _REQUESTS, in_place=False, check=_check)
APPLY_ROPE_INPLACE = _op(reference.apply_rope_inplace, _REQUESTS, in_place=True, check=_check)
APPLY_ROPE_POS_IDS = _op(reference.apply_rope_pos_ids, _POS_IDS, in_place=False, check=None)
APPLY_ROPE_POS_IDS_INPLACE = _op(reference.apply_rope_pos_ids_inplace, _POS_IDS, in_place=True, check=None)


def rotate(
    op: Op,
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    dim: int | None,
    interleave: bool,
    scale: float,
    theta: float,
    a: float = 0.0,
    b: float = 0.0,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
) -> Any:
    """Call an op with a position per token. Its key has fewer than 20 entries: Python keeps such tuples for reuse."""
    if is_compiling():
        return _compiled(op, q, k, (pos_ids,), dim, interleave, scale, theta, a, b)
    rows, columns = q.shape, k.shape
    if len(rows) != 3 or len(columns) != 3:
        check_tokens(op.name, {"q": q, "k": k}, {})
    tokens, heads, width = rows
    count, kv_heads, kv_width = columns
    if count != tokens or pos_ids.numel() != tokens or pos_ids.ndim != 1:
        check_tokens(op.name, {"q": q, "k": k}, {"pos_ids": pos_ids})
    if not pos_ids.is_contiguous():
        pos_ids = pos_ids.contiguous()
    if dim is None:
        dim = width
    written = None
    if q_rope is not None and k_rope is not None:
        written = q_rope.stride(), k_rope.stride(), (q_rope.data_ptr() | k_rope.data_ptr()) & 15 == 0
    key = (
        q.dtype, k.dtype, pos_ids.dtype, q.device, k.device, pos_ids.device, heads, kv_heads,
        width if width == kv_width else (width, kv_width), dim, interleave, q.stride(), k.stride(),
        (q.data_ptr() | k.data_ptr()) & 15 == 0, not (a or b), scale > 0 < theta and written,
        op.bucket(tokens), PREFER.get(), is_grad_enabled() and (q.requires_grad or k.requires_grad),
    )  # fmt: skip
    run = op.cache.get(key)
    if op.in_place:
        run = run or op.pick(key, (q, k, pos_ids, dim, interleave, scale, theta, a, b))
        return run(q, k, pos_ids, dim, interleave, scale, theta, a, b)
    run = run or op.pick(key, (q, k, pos_ids, dim, interleave, scale, theta, a, b, q_rope, k_rope))
    return run(q, k, pos_ids, dim, interleave, scale, theta, a, b, q_rope, k_rope)


def rotate_requests(
    op: Op,
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    dim: int | None,
    interleave: bool,
    scale: float,
    theta: float,
    a: float = 0.0,
    b: float = 0.0,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
) -> Any:
    """Call an op with an offset per request."""
    if is_compiling():
        return _compiled(op, q, k, (indptr, offsets), dim, interleave, scale, theta, a, b)
    rows, columns = q.shape, k.shape
    if len(rows) != 3 or len(columns) != 3 or rows[0] != columns[0]:
        check_tokens(op.name, {"q": q, "k": k}, {})
    tokens, heads, width = rows
    _, kv_heads, kv_width = columns
    if indptr.ndim != 1 or offsets.ndim != 1 or indptr.numel() != offsets.numel() + 1:
        check_requests(op.name, indptr, offsets)
    if not (indptr.is_contiguous() and offsets.is_contiguous()):
        indptr, offsets = indptr.contiguous(), offsets.contiguous()
    if dim is None:
        dim = width
    written = None
    if q_rope is not None and k_rope is not None:
        written = q_rope.stride(), k_rope.stride(), (q_rope.data_ptr() | k_rope.data_ptr()) & 15 == 0
    known = (
        q.dtype, k.dtype, indptr.dtype, offsets.dtype, q.device, k.device, indptr.device,
        offsets.device, heads, kv_heads, width if width == kv_width else (width, kv_width),
    )  # fmt: skip
    key = (
        known, dim, interleave, q.stride(), k.stride(), (q.data_ptr() | k.data_ptr()) & 15 == 0, not (a or b),
        scale > 0 < theta and written, op.bucket(tokens), PREFER.get(),
        is_grad_enabled() and (q.requires_grad or k.requires_grad),
    )  # fmt: skip
    run = op.cache.get(key)
    if op.in_place:
        run = run or op.pick(key, (q, k, indptr, offsets, dim, interleave, scale, theta, a, b))
        return run(q, k, indptr, offsets, dim, interleave, scale, theta, a, b)
    run = run or op.pick(key, (q, k, indptr, offsets, dim, interleave, scale, theta, a, b, q_rope, k_rope))
    return run(q, k, indptr, offsets, dim, interleave, scale, theta, a, b, q_rope, k_rope)


def _compiled(op: Op, q: Tensor, k: Tensor, indices: tuple[Tensor, ...], dim: int | None, *rest: Any) -> Any:
    args = (q, k, *indices, last_dim(q) if dim is None else dim, *rest)
    run = getattr(torch.ops.kernelmux, op.name)
    if op.in_place:
        refuse_grad(op.name, q, k)
        return run(*args)
    if needs_grad(q, k):
        return op.function(*args)
    outs = torch.empty_like(q), torch.empty_like(k)
    run(*args, *outs)
    return outs


for _each in (APPLY_ROPE_POS_IDS, APPLY_ROPE_POS_IDS_INPLACE):
    _each.eager = partial(rotate, _each)
for _each in (APPLY_ROPE, APPLY_ROPE_INPLACE):
    _each.eager = partial(rotate_requests, _each)
