"""Quantisation: rows of KV caches to NVFP4 and back."""

from kernelmux.dispatch.quantization.nvfp4_kv import nvfp4_kv_dequantize, nvfp4_kv_quantize

__all__ = ["nvfp4_kv_dequantize", "nvfp4_kv_quantize"]
