"""RoPE of a batch of requests with an offset each: apply_rope, apply_llama31_rope, and their in-place forms."""

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from kernelmux.capabilities import Request
from kernelmux.dispatch.arguments import needs_grad, refuse_grad
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.page.check_offsets import check_offsets
from kernelmux.dispatch.rope import reference
from kernelmux.dispatch.rope.describe import (
    DIMS,
    FEATURES,
    check_requests,
    check_tokens,
    computed_request,
    last_dim,
    smoothing,
)

Pair = tuple[Tensor, Tensor]


def _describe(
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
    q_rope: Tensor | None,
    k_rope: Tensor | None,
) -> Request:
    scaling = rope_scale, rope_theta, smooth_a, smooth_b
    parts, indices = {"q": q, "k": k}, {"indptr": indptr, "offsets": offsets}
    return computed_request("apply_rope", parts, indices, rotary_dim, interleave, scaling, (q_rope, k_rope))


def _describe_inplace(
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
) -> Request:
    scaling = rope_scale, rope_theta, smooth_a, smooth_b
    parts, indices = {"q": q, "k": k}, {"indptr": indptr, "offsets": offsets}
    return computed_request("apply_rope_inplace", parts, indices, rotary_dim, interleave, scaling, None)


def _check(q: Tensor, k: Tensor, indptr: Tensor, *others: object) -> None:
    check_offsets("indptr", indptr, q.shape[0])


_ROLES = ("q", "k", "positions")
_NUMBERS = "int rotary_dim, bool interleave, float rope_scale, float rope_theta, float smooth_a, float smooth_b"
_INDICES = "Tensor indptr, Tensor offsets"
APPLY_ROPE = Op(
    "apply_rope", "rope", reference.apply_rope, _describe,
    growing=("tokens",), dims=DIMS, roles=_ROLES, features=(*FEATURES, "llama31"),
    schema=f"(Tensor q, Tensor k, {_INDICES}, {_NUMBERS}, Tensor(a!) q_rope, Tensor(b!) k_rope) -> ()", check=_check,
)  # fmt: skip
APPLY_ROPE_INPLACE = Op(
    "apply_rope_inplace", "rope", reference.apply_rope_inplace, _describe_inplace,
    growing=("tokens",), dims=DIMS, roles=_ROLES, features=(*FEATURES, "llama31"), in_place=True,
    schema=f"(Tensor(a!) q, Tensor(b!) k, {_INDICES}, {_NUMBERS}) -> ()", check=_check,
)  # fmt: skip


def apply_rope(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> Pair:
    """Rotate the queries and keys of a batch of requests, each of which begins at an offset.

    Token t of request b, indptr[b] <= t < indptr[b + 1], is at position offsets[b] + t - indptr[b]. A token outside
    of every request is copied. All else is as in `apply_rope_pos_ids`.

    Args:
        q: [tokens, num_qo_heads, head_dim], any strides (views of a fused qkv too).
        k: [tokens, num_kv_heads, head_dim], of q's dtype.
        indptr: int32 or int64 [batch + 1], where each request's tokens begin and end, ascending.
        offsets: [batch], of indptr's dtype: the position of each request's first token.
        rotary_dim: how many dims of a head are turned, even; None means all of head_dim.
        interleave: False for rotate-half (NeoX, Llama), True for adjacent pairs (GPT-J).
        rope_scale: divides the frequencies.
        rope_theta: the base of the frequencies.

    Returns:
        (q, k), new tensors of the same shapes and dtypes.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.

    Source: Su et al., "RoFormer" (2021); FlashInfer's `apply_rope`.

    >>> import torch
    >>> x = torch.tensor([1.0, 0.0]).expand(3, 1, 2)
    >>> apply_rope(x, x, torch.tensor([0, 2, 3]), torch.tensor([0, 1]))[0].flatten(1)
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415],
            [0.5403, 0.8415]])
    """
    dim = last_dim(q) if rotary_dim is None else rotary_dim
    return _apply(q, k, indptr, offsets, dim, interleave, float(rope_scale), float(rope_theta), 0.0, 0.0)


def apply_llama31_rope(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> Pair:
    """Rotate the queries and keys of a batch of requests, with the frequency scaling of Llama 3.1.

    Positions and the first eight Args are those of `apply_rope`, the scaling and its three Args those of
    `apply_llama31_rope_pos_ids`; Returns and Raises are those of `apply_rope`.

    Source: Llama 3.1's reference code; FlashInfer's `apply_llama31_rope`.

    >>> import torch
    >>> x = torch.tensor([1.0, 0.0]).expand(2, 1, 2)
    >>> apply_llama31_rope(x, x, torch.tensor([0, 2]), torch.tensor([0]))[0].flatten(1)
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415]])
    """
    dim = last_dim(q) if rotary_dim is None else rotary_dim
    smooth = smoothing(low_freq_factor, high_freq_factor, old_context_len)
    return _apply(q, k, indptr, offsets, dim, interleave, float(rope_scale), float(rope_theta), *smooth)


def apply_rope_inplace(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """Rotate the queries and keys of a batch of requests, in place.

    Args and Raises are those of `apply_rope`; NoKernelError when q or k requires grad.

    Source: FlashInfer's `apply_rope_inplace`.

    >>> import torch
    >>> q, k = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0]]])
    >>> apply_rope_inplace(q, k, torch.tensor([0, 1]), torch.tensor([1]))
    >>> q, k
    (tensor([[[0.5403, 0.8415]]]), tensor([[[-0.8415,  0.5403]]]))
    """
    dim = last_dim(q) if rotary_dim is None else rotary_dim
    _inplace(q, k, indptr, offsets, dim, interleave, float(rope_scale), float(rope_theta), 0.0, 0.0)


def apply_llama31_rope_inplace(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """Rotate the queries and keys of a batch of requests, in place, with the frequency scaling of Llama 3.1.

    Args and Raises are those of `apply_llama31_rope`; NoKernelError when q or k requires grad.

    Source: FlashInfer's `apply_llama31_rope_inplace`.

    >>> import torch
    >>> q, k = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0]]])
    >>> apply_llama31_rope_inplace(q, k, torch.tensor([0, 1]), torch.tensor([1]))
    >>> q, k
    (tensor([[[0.5403, 0.8415]]]), tensor([[[-0.8415,  0.5403]]]))
    """
    dim = last_dim(q) if rotary_dim is None else rotary_dim
    smooth = smoothing(low_freq_factor, high_freq_factor, old_context_len)
    _inplace(q, k, indptr, offsets, dim, interleave, float(rope_scale), float(rope_theta), *smooth)


def _apply(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    dim: int,
    interleave: bool,
    scale: float,
    theta: float,
    a: float,
    b: float,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
) -> Pair:
    if is_compiling():
        return _compiled(q, k, indptr, offsets, dim, interleave, scale, theta, a, b)
    op, written = APPLY_ROPE, None
    if q_rope is not None and k_rope is not None:
        written = (q_rope.stride(), k_rope.stride(), (q_rope.data_ptr() | k_rope.data_ptr()) & 15 == 0)
    indptr, offsets = indptr.contiguous(), offsets.contiguous()
    key = (_key(op, q, k, indptr, offsets), dim, interleave, scale, theta, a, b, written)
    args = (q, k, indptr, offsets, dim, interleave, scale, theta, a, b, q_rope, k_rope)
    run = op.cache.get(key) or op.pick(key, args)
    return run(*args)  # type: ignore[no-any-return]


def _compiled(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    dim: int,
    interleave: bool,
    scale: float,
    theta: float,
    a: float,
    b: float,
) -> Pair:
    args = (q, k, indptr, offsets, dim, interleave, scale, theta, a, b)
    if needs_grad(q, k):
        return reference.apply_rope(*args)
    q_rope, k_rope = torch.empty_like(q), torch.empty_like(k)
    torch.ops.kernelmux.apply_rope(*args, q_rope, k_rope)
    return q_rope, k_rope


def _inplace(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    dim: int,
    interleave: bool,
    scale: float,
    theta: float,
    a: float,
    b: float,
) -> None:
    if is_compiling():
        refuse_grad("apply_rope_inplace", q, k)
        torch.ops.kernelmux.apply_rope_inplace(q, k, indptr, offsets, dim, interleave, scale, theta, a, b)
        return
    op = APPLY_ROPE_INPLACE
    indptr, offsets = indptr.contiguous(), offsets.contiguous()
    key = (_key(op, q, k, indptr, offsets), dim, interleave, scale, theta, a, b)
    args = (q, k, indptr, offsets, dim, interleave, scale, theta, a, b)
    run = op.cache.get(key) or op.pick(key, args)
    run(*args)


def _key(op: Op, q: Tensor, k: Tensor, indptr: Tensor, offsets: Tensor) -> tuple[object, ...]:
    rows, columns = q.shape, k.shape
    if len(rows) != 3 or len(columns) != 3 or rows[0] != columns[0]:
        check_tokens(op.name, {"q": q, "k": k}, {})
    if indptr.ndim != 1 or offsets.ndim != 1 or indptr.numel() != offsets.numel() + 1:
        check_requests(op.name, indptr, offsets)
    return (
        q.dtype, k.dtype is q.dtype, indptr.dtype, offsets.dtype is indptr.dtype,
        q.device, k.device, indptr.device, offsets.device,
        rows[1], rows[2], columns[1], columns[2], q.stride(), k.stride(), (q.data_ptr() | k.data_ptr()) & 15 == 0,
        is_grad_enabled() and (q.requires_grad or k.requires_grad), op.bucket(rows[0]), PREFER.get(),
    )  # fmt: skip


def _eager(*args: object) -> None:
    _apply(*args)  # type: ignore[arg-type]


APPLY_ROPE.eager = _eager
APPLY_ROPE_INPLACE.eager = _inplace
