"""Dense matrix products."""

from kernelmux.dispatch.gemm.dense import bmm_bf16, mm_bf16

__all__ = ["bmm_bf16", "mm_bf16"]
