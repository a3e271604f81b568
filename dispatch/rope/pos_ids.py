"""RoPE with a position per token: apply_rope_pos_ids, apply_llama31_rope_pos_ids, and their in-place forms."""

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from kernelmux.capabilities import Request
from kernelmux.dispatch.arguments import needs_grad, refuse_grad
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.rope import reference
from kernelmux.dispatch.rope.describe import DIMS, FEATURES, check_tokens, computed_request, last_dim, smoothing

Pair = tuple[Tensor, Tensor]


def _describe(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
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
    parts, indices = {"q": q, "k": k}, {"pos_ids": pos_ids}
    return computed_request("apply_rope_pos_ids", parts, indices, rotary_dim, interleave, scaling, (q_rope, k_rope))


def _describe_inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int,
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    smooth_a: float,
    smooth_b: float,
) -> Request:
    scaling = rope_scale, rope_theta, smooth_a, smooth_b
    parts, indices = {"q": q, "k": k}, {"pos_ids": pos_ids}
    return computed_request("apply_rope_pos_ids_inplace", parts, indices, rotary_dim, interleave, scaling, None)


_ROLES = ("q", "k", "positions")
_NUMBERS = "int rotary_dim, bool interleave, float rope_scale, float rope_theta, float smooth_a, float smooth_b"
APPLY_ROPE_POS_IDS = Op(
    "apply_rope_pos_ids", "rope", reference.apply_rope_pos_ids, _describe,
    growing=("tokens",), dims=DIMS, roles=_ROLES, features=(*FEATURES, "llama31"),
    schema=f"(Tensor q, Tensor k, Tensor pos_ids, {_NUMBERS}, Tensor(a!) q_rope, Tensor(b!) k_rope) -> ()",
)  # fmt: skip
APPLY_ROPE_POS_IDS_INPLACE = Op(
    "apply_rope_pos_ids_inplace", "rope", reference.apply_rope_pos_ids_inplace, _describe_inplace,
    growing=("tokens",), dims=DIMS, roles=_ROLES, features=(*FEATURES, "llama31"), in_place=True,
    schema=f"(Tensor(a!) q, Tensor(b!) k, Tensor pos_ids, {_NUMBERS}) -> ()",
)  # fmt: skip


def apply_rope_pos_ids(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> Pair:
    """Rotate queries and keys by their positions.

    The pair i of a head of token t turns by the angle pos_ids[t] * rope_theta^(-2i / rotary_dim) / rope_scale: (x, y)
    becomes (x cos - y sin, x sin + y cos). Pairs are the dims (i, i + rotary_dim / 2), or (2i, 2i + 1) when
    interleaved. Dims past rotary_dim are copied.

    Args:
        q: [tokens, num_qo_heads, head_dim], any strides (views of a fused qkv too).
        k: [tokens, num_kv_heads, head_dim], of q's dtype.
        pos_ids: int32 or int64 [tokens].
        rotary_dim: how many dims of a head are turned, even; None means all of head_dim.
        interleave: False for rotate-half (NeoX, Llama), True for adjacent pairs (GPT-J).
        rope_scale: divides the frequencies.
        rope_theta: the base of the frequencies.

    Returns:
        (q, k), new tensors of the same shapes and dtypes.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.

    Source: Su et al., "RoFormer" (2021); FlashInfer's `apply_rope_pos_ids`.

    >>> import torch
    >>> x = torch.tensor([1.0, 0.0]).expand(2, 1, 2)
    >>> apply_rope_pos_ids(x, x, torch.tensor([0, 1]))[0].flatten(1)
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415]])
    """
    return _apply(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, 0.0, 0.0)


def apply_llama31_rope_pos_ids(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> Pair:
    """Rotate queries and keys by their positions, with the frequency scaling of Llama 3.1.

    A frequency f = rope_theta^(-2i / rotary_dim) becomes (1 - s) f / rope_scale + s f, with s = clamp((old_context_len
    * f / 2π - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1): short waves are kept, long ones
    stretched. All else is as in `apply_rope_pos_ids`.

    Args:
        low_freq_factor: waves longer than old_context_len / low_freq_factor are divided by rope_scale.
        high_freq_factor: waves shorter than old_context_len / high_freq_factor are kept; above low_freq_factor.
        old_context_len: the context length of the training before the scaling.

    The other Args, Returns and Raises are those of `apply_rope_pos_ids`.

    Source: Llama 3.1's reference code; FlashInfer's `apply_llama31_rope_pos_ids`.

    >>> import torch
    >>> x = torch.tensor([1.0, 0.0]).expand(2, 1, 2)
    >>> apply_llama31_rope_pos_ids(x, x, torch.tensor([0, 1]))[0].flatten(1)
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415]])
    """
    smooth = smoothing(low_freq_factor, high_freq_factor, old_context_len)
    return _apply(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, *smooth)


def apply_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """Rotate queries and keys by their positions, in place.

    Args and Raises are those of `apply_rope_pos_ids`; NoKernelError when q or k requires grad.

    Source: FlashInfer's `apply_rope_pos_ids_inplace`.

    >>> import torch
    >>> q, k = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0]]])
    >>> apply_rope_pos_ids_inplace(q, k, torch.tensor([1]))
    >>> q, k
    (tensor([[[0.5403, 0.8415]]]), tensor([[[-0.8415,  0.5403]]]))
    """
    _inplace(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, 0.0, 0.0)


def apply_llama31_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """Rotate queries and keys by their positions, in place, with the frequency scaling of Llama 3.1.

    Args and Raises are those of `apply_llama31_rope_pos_ids`; NoKernelError when q or k requires grad.

    Source: FlashInfer's `apply_llama31_rope_pos_ids_inplace`.

    >>> import torch
    >>> q, k = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0]]])
    >>> apply_llama31_rope_pos_ids_inplace(q, k, torch.tensor([1]))
    >>> q, k
    (tensor([[[0.5403, 0.8415]]]), tensor([[[-0.8415,  0.5403]]]))
    """
    smooth = smoothing(low_freq_factor, high_freq_factor, old_context_len)
    _inplace(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, *smooth)


def _apply(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    dim: int | None,
    interleave: bool,
    scale: float,
    theta: float,
    a: float,
    b: float,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
) -> Pair:
    if is_compiling():
        return _compiled(q, k, pos_ids, last_dim(q) if dim is None else dim, interleave, scale, theta, a, b)
    op, written = APPLY_ROPE_POS_IDS, None
    if q_rope is not None and k_rope is not None:
        written = (q_rope.stride(), k_rope.stride(), (q_rope.data_ptr() | k_rope.data_ptr()) & 15 == 0)
    if not pos_ids.is_contiguous():
        pos_ids = pos_ids.contiguous()
    known, width = _key(op, q, k, pos_ids)
    dim = width if dim is None else dim
    key = (known, dim, interleave, scale, theta, a, b, written)
    args = (q, k, pos_ids, dim, interleave, scale, theta, a, b, q_rope, k_rope)
    run = op.cache.get(key) or op.pick(key, args)
    return run(*args)  # type: ignore[no-any-return]


def _compiled(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    dim: int,
    interleave: bool,
    scale: float,
    theta: float,
    a: float,
    b: float,
) -> Pair:
    args = (q, k, pos_ids, dim, interleave, scale, theta, a, b)
    if needs_grad(q, k):
        return reference.apply_rope_pos_ids(*args)
    q_rope, k_rope = torch.empty_like(q), torch.empty_like(k)
    torch.ops.kernelmux.apply_rope_pos_ids(*args, q_rope, k_rope)
    return q_rope, k_rope


def _inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    dim: int | None,
    interleave: bool,
    scale: float,
    theta: float,
    a: float,
    b: float,
) -> None:
    if is_compiling():
        dim = last_dim(q) if dim is None else dim
        refuse_grad("apply_rope_pos_ids_inplace", q, k)
        torch.ops.kernelmux.apply_rope_pos_ids_inplace(q, k, pos_ids, dim, interleave, scale, theta, a, b)
        return
    op = APPLY_ROPE_POS_IDS_INPLACE
    if not pos_ids.is_contiguous():
        pos_ids = pos_ids.contiguous()
    known, width = _key(op, q, k, pos_ids)
    dim = width if dim is None else dim
    key = (known, dim, interleave, scale, theta, a, b)
    args = (q, k, pos_ids, dim, interleave, scale, theta, a, b)
    run = op.cache.get(key) or op.pick(key, args)
    run(*args)


def _key(op: Op, q: Tensor, k: Tensor, pos_ids: Tensor) -> tuple[tuple[object, ...], int]:
    """What a decision depends on of the tensors, and their head_dim."""
    rows, columns = q.shape, k.shape
    if len(rows) != 3 or len(columns) != 3 or rows[0] != columns[0] or pos_ids.numel() != rows[0] or pos_ids.ndim != 1:
        check_tokens(op.name, {"q": q, "k": k}, {"pos_ids": pos_ids})
    return (
        q.dtype, k.dtype, pos_ids.dtype, q.device, k.get_device(), pos_ids.get_device(),
        rows[1], rows[2], columns[1], columns[2], q.stride(), k.stride(), (q.data_ptr() | k.data_ptr()) & 15 == 0,
        is_grad_enabled() and (q.requires_grad or k.requires_grad), op.bucket(rows[0]), PREFER.get(),
    ), rows[2]  # fmt: skip


def _eager(*args: object) -> None:
    _apply(*args)  # type: ignore[arg-type]


APPLY_ROPE_POS_IDS.eager = _eager
APPLY_ROPE_POS_IDS_INPLACE.eager = _inplace
