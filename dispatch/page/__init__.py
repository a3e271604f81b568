"""Paged caches: appending to them, quantised or not, and the positions of what is appended."""

from kernelmux.dispatch.page.append import append_paged_kv_cache
from kernelmux.dispatch.page.append_mla import append_paged_mla_kv_cache
from kernelmux.dispatch.page.nvfp4_append import nvfp4_quantize_append_paged_kv_cache
from kernelmux.dispatch.page.nvfp4_append_mla import nvfp4_quantize_append_paged_mla_kv_cache
from kernelmux.dispatch.page.nvfp4_dequantize import nvfp4_kv_dequantize_paged
from kernelmux.dispatch.page.nvfp4_slots import nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
from kernelmux.dispatch.page.positions import get_batch_indices_positions, get_seq_lens

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "nvfp4_kv_dequantize_paged",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "nvfp4_quantize_append_paged_mla_kv_cache",
]
