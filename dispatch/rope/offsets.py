"""RoPE of a batch of requests with an offset each: apply_rope, apply_llama31_rope, and their in-place forms."""

from torch import Tensor

from kernelmux.dispatch.rope.computed import APPLY_ROPE, APPLY_ROPE_INPLACE, Pair, rotate_requests
from kernelmux.dispatch.rope.describe import smoothing


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
    return rotate_requests(APPLY_ROPE, q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta)


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
    smooth = smoothing(low_freq_factor, high_freq_factor, old_context_len)
    return rotate_requests(APPLY_ROPE, q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta, *smooth)


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
    rotate_requests(APPLY_ROPE_INPLACE, q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta)


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
    smooth = smoothing(low_freq_factor, high_freq_factor, old_context_len)
    rotate_requests(APPLY_ROPE_INPLACE, q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta, *smooth)
