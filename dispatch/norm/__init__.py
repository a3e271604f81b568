"""Norms: RMS and layer norms, fused with a residual add, SiLU or quantisation."""

from kernelmux.dispatch.norm.block_quant import fused_add_rmsnorm_fp8_block_quant
from kernelmux.dispatch.norm.fused_add import fused_add_rmsnorm, gemma_fused_add_rmsnorm
from kernelmux.dispatch.norm.layer import layernorm
from kernelmux.dispatch.norm.quant import fused_add_rmsnorm_quant, layernorm_quant, rmsnorm_quant
from kernelmux.dispatch.norm.rms import fused_rmsnorm_silu, gemma_rmsnorm, rmsnorm

__all__ = [
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_fp8_block_quant",
    "fused_add_rmsnorm_quant",
    "fused_rmsnorm_silu",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "layernorm",
    "layernorm_quant",
    "rmsnorm",
    "rmsnorm_quant",
]
