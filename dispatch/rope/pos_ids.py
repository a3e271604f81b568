"""RoPE with a position per token: apply_rope_pos_ids, apply_llama31_rope_pos_ids, and their in-place forms."""

from torch import Tensor

from kernelmux.dispatch.rope.computed import APPLY_ROPE_POS_IDS, APPLY_ROPE_POS_IDS_INPLACE, Pair, rotate
from kernelmux.dispatch.rope.describe import smoothing


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
    return rotate(APPLY_ROPE_POS_IDS, q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta)


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
    return rotate(APPLY_ROPE_POS_IDS, q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, *smooth)


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
    rotate(APPLY_ROPE_POS_IDS_INPLACE, q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta)


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
    rotate(APPLY_ROPE_POS_IDS_INPLACE, q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, *smooth)
