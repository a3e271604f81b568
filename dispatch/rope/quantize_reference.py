"""RoPE, then 8-bit floats, in plain torch: float32 (float64 for float64 inputs), rounded once and saturated."""

import torch
from torch import Tensor

from kernelmux.dispatch.page.reference import page_slots, write_slots
from kernelmux.dispatch.rope.reference import rotate


def rope_quantize_fp8(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool,
    quantize_dtype: torch.dtype,
    quant_scale_q: float,
    quant_scale_kv: float,
    q_rope_out: Tensor | None = None,
    k_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    k_nope_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rope parts turned and multiplied by their scale, the nope parts multiplied; a missing part gives width 0.

    q_rope is [tokens, heads, dim], k_rope that or [tokens, dim].
    """
    cos, sin = cos_sin_cache[pos_ids.long()].chunk(2, -1)
    turned = rotate(q_rope, cos[:, None], sin[:, None], not is_neox)
    heads = (slice(None), None) if k_rope.ndim == 3 else (slice(None),)
    turned_k = rotate(k_rope, cos[heads], sin[heads], not is_neox)
    q_rest = q_rope[..., :0] if q_nope is None else q_nope
    k_rest = k_rope[..., :0] if k_nope is None else k_nope
    return (
        quantised(turned, quant_scale_q, quantize_dtype, q_rope_out),
        quantised(turned_k, quant_scale_kv, quantize_dtype, k_rope_out),
        quantised(q_rest, quant_scale_q, quantize_dtype, q_nope_out),
        quantised(k_rest, quant_scale_kv, quantize_dtype, k_nope_out),
    )


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    v: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    is_neox: bool,
    quant_scale_q: float,
    quant_scale_kv: float,
    q_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As rope_quantize_fp8, with the keys and values written to their pages.

    With v: k_cache [pages, page_size, heads, dim] receives [rope | nope], v_cache v times quant_scale_kv. Without v:
    k_cache [pages, page_size, dim] receives the nope part (ckv), v_cache the rope part (kpe).
    """
    q_rope_out, k_rope_new, q_nope_out, k_nope_new = rope_quantize_fp8(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, k_cache.dtype, quant_scale_q, quant_scale_kv,
        q_rope_out, None, q_nope_out, None,
    )  # fmt: skip
    slots = page_slots(batch_indices, positions, kv_indices, kv_indptr, k_cache.shape[1])
    if v is None:
        write_slots(k_cache, slots, k_nope_new)
        write_slots(v_cache, slots, k_rope_new)
    else:
        joined = torch.cat((k_rope_new.view(torch.uint8), k_nope_new.view(torch.uint8)), -1)
        write_slots(k_cache, slots, joined.view(k_cache.dtype))
        write_slots(v_cache, slots, quantised(v, quant_scale_kv, v_cache.dtype))
    return q_rope_out, q_nope_out


def quantised(x: Tensor, scale: float, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """x * scale, clamped to the finite range of an 8-bit float dtype."""
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    limit = torch.finfo(dtype).max
    result = (x.to(work) * scale).clamp(-limit, limit)
    return result.to(dtype) if out is None else out.copy_(result)
