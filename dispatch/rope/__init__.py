"""Rotary position embedding: from angles or a table, in place or not, and fused with 8-bit quantisation."""

from kernelmux.dispatch.rope.cos_sin_cache import apply_rope_with_cos_sin_cache, apply_rope_with_cos_sin_cache_inplace
from kernelmux.dispatch.rope.offsets import (
    apply_llama31_rope,
    apply_llama31_rope_inplace,
    apply_rope,
    apply_rope_inplace,
)
from kernelmux.dispatch.rope.pos_ids import (
    apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace,
    apply_rope_pos_ids,
    apply_rope_pos_ids_inplace,
)
from kernelmux.dispatch.rope.quantize import mla_rope_quantize_fp8, rope_quantize_fp8
from kernelmux.dispatch.rope.quantize_append import rope_quantize_fp8_append_paged_kv_cache

__all__ = [
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "mla_rope_quantize_fp8",
    "rope_quantize_fp8",
    "rope_quantize_fp8_append_paged_kv_cache",
]
