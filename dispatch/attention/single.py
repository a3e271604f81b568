"""Attention of one sequence: single_decode_with_kv_cache and single_prefill_with_kv_cache."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernelmux.dispatch.attention import scales
from kernelmux.dispatch.attention.attend import Result, attend
from kernelmux.dispatch.attention.options import check_backend, dtype_argument
from kernelmux.dispatch.attention.scales import Scale
from kernelmux.dispatch.attention.single_plan import Single, launch
from kernelmux.dispatch.page.cache import LAYOUTS

DType = torch.dtype | str


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Attend with one query, the last token of a sequence, over its keys: `softmax(q @ k.T * sm_scale) @ v`.

    Args:
        q: [H, D]. k, v: [kv_len, Hkv, D] ("NHD") or [Hkv, kv_len, D] ("HND").
        pos_encoding_mode: "NONE", "ROPE_LLAMA" (rotate q and k here) or "ALIBI".
        q_scale, k_scale: multiply the logits. v_scale: multiplies the output. Numbers or one-element tensors.
        window_left: keys before the last that it sees, inclusive; -1 = all.
        logits_soft_cap: c of c * tanh(s / c); None or 0 = off.
        sm_scale: multiplies q·k; None = 1/sqrt(D). rope_scale, rope_theta: None = 1 and 1e4.
        use_tensor_cores: ignored; the choice of a kernel is the dispatcher's.

    Returns:
        [H, Dv] of q's dtype; with return_lse also the base-2 log-sum-exp, float32 [H].

    Raises:
        ValueError: for shapes or dtypes that do not fit.

    Source: FlashInfer's function of that name.

    >>> q, k, v = torch.randn(8, 64), torch.randn(100, 2, 64), torch.randn(100, 2, 64)
    >>> out = single_decode_with_kv_cache(q, k, v)
    >>> keys, values = (x.repeat_interleave(4, 1).transpose(0, 1) for x in (k, v))  # 8 query heads, 2 KV heads
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q[:, None], keys, values)[:, 0]
    >>> torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    """
    if q.ndim != 2:
        raise ValueError(f"q has shape {list(q.shape)}, it must be [num_qo_heads, head_dim]; give one query")
    k, v = _views(k, v, kv_layout)
    single = Single(False, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
    result = Result(q.dtype, q.shape[0], v.shape[-1])
    given = (q_scale, k_scale, v_scale, None)
    found = attend(partial(launch, single), result, (q[None], k, v), None, given, return_lse=return_lse)
    return (found[0][0], found[1][0]) if return_lse else found[0]


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: DType | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> Any:
    """Attend with the queries of one sequence over its keys: `softmax(q @ k.T * sm_scale + mask) @ v`.

    Args:
        q: [qo_len, H, D]. k, v: [kv_len, Hkv, D] ("NHD") or [Hkv, kv_len, D] ("HND").
        scale_q: float32 [H], scale_k, scale_v: float32 [Hkv]; per-head factors of fp8 tensors, None = 1.
        o_dtype: of the output; None = q's.
        custom_mask: bool [qo_len, kv_len], True = keep; replaces causal. packed_custom_mask: the same as bits, lowest
            first; it wins.
        causal: query row i sees keys up to i + kv_len - qo_len.
        pos_encoding_mode: "NONE", "ROPE_LLAMA" (rotate q and k here) or "ALIBI".
        sm_scale: multiplies q·k; None = 1/sqrt(D). rope_scale, rope_theta: None = 1 and 1e4.
        window_left: keys before the query's own that it sees, inclusive; -1 = all.
        logits_soft_cap: c of c * tanh(s / c); None or 0 = off.
        backend: "auto", or a backend of kernelmux, which then must serve the call.
        kv_cache_sf: block scales of NVFP4 (uint8) k and v, in their form with last dim D / 16.
        k_scale: multiplies the logits. v_scale: multiplies the output. Numbers or one-element tensors.
        use_fp16_qk_reduction: ignored; logits are summed in float32.

    Returns:
        [qo_len, H, Dv]; with return_lse also the base-2 log-sum-exp, float32 [qo_len, H], -inf without keys.

    Raises:
        ValueError: for shapes, dtypes or masks that do not fit. NoKernelError: when nothing may serve the call.

    Source: FlashInfer's function of that name.

    >>> q, k, v = torch.randn(3, 8, 64), torch.randn(100, 2, 64), torch.randn(100, 2, 64)
    >>> out, lse = single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([3, 8, 64]), torch.Size([3, 8]))
    """
    if backend != "auto":
        check_backend(backend)
    if q.ndim != 3:
        raise ValueError(f"q has shape {list(q.shape)}, it must be [qo_len, num_qo_heads, head_dim]; reshape it")
    k, v = _views(k, v, kv_layout)
    per_head = None
    if scale_q is not None or scale_k is not None or scale_v is not None:
        per_head = (scale_q, scale_k, scale_v)
    sf = None if kv_cache_sf is None else _views(*kv_cache_sf, kv_layout)
    extras = scales.single_extras(per_head, sf, q, k, v)
    out_dtype = q.dtype if o_dtype is None else dtype_argument("o_dtype", o_dtype)
    single = Single(
        causal,
        pos_encoding_mode,
        window_left,
        logits_soft_cap,
        sm_scale,
        rope_scale,
        rope_theta,
        backend,
        custom_mask,
        packed_custom_mask,
    )
    result = Result(out_dtype, q.shape[1], v.shape[-1] * (2 if v.dtype == torch.uint8 else 1))
    given = (None, k_scale, v_scale, None)
    return attend(partial(launch, single), result, (q, k, v), extras, given, return_lse=return_lse)


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)
single_prefill_with_kv_cache_return_lse.__doc__ = """single_prefill_with_kv_cache with return_lse=True.

Source: FlashInfer's function of that name.

>>> out, lse = single_prefill_with_kv_cache_return_lse(torch.randn(3, 8, 64), *torch.randn(2, 100, 2, 64))
>>> out.shape, lse.shape
(torch.Size([3, 8, 64]), torch.Size([3, 8]))
"""


def _views(k: Tensor, v: Tensor, kv_layout: str) -> tuple[Tensor, Tensor]:
    """Keys and values as [kv_len, heads, dim]."""
    if kv_layout not in LAYOUTS:
        raise ValueError(f"kv_layout is {kv_layout!r}, it must be 'NHD' or 'HND'")
    if k.ndim != 3 or v.ndim != 3:
        raise ValueError(f"k is {list(k.shape)} and v {list(v.shape)}, both must be [kv_len, heads, dim]; reshape them")
    return (k, v) if kv_layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
