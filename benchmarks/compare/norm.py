"""Norms: plain, fused with the residual add, gemma's, layer norm, and the quantising forms."""

from functools import partial
from typing import Any

import torch
from compare.case import Case, Results, Side
from compare.kv import BF16
from torch import Tensor

FP16, E4M3, E5M2 = torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
ROWS = 33


def weight(side: Side, hidden: int, dtype: torch.dtype) -> Tensor:
    return side.rand(hidden, seed=2).mul(0.3).add(1).to(dtype)


def rmsnorm(
    side: Side,
    name: str,
    hidden: int = 4096,
    heads: int = 0,
    dtype: torch.dtype = BF16,
    out: bool = False,
    **kwargs: Any,
) -> Results:
    if heads:  # per-head norm of the middle third of a fused qkv
        x = side.rand(ROWS, 3, heads, hidden, seed=1, dtype=dtype)[:, 1]
    else:
        x = side.rand(ROWS, hidden, seed=1, dtype=dtype)
    given = torch.empty_like(x) if out else None
    made = getattr(side, name)(x, weight(side, hidden, dtype), out=given, **kwargs)
    return {"out": given if given is not None else made, "input": x}


def fused_add(side: Side, name: str, hidden: int = 4096, dtype: torch.dtype = BF16, **kwargs: Any) -> Results:
    x, residual = (side.rand(ROWS, hidden, seed=s, dtype=dtype) for s in (1, 3))
    getattr(side, name)(x, residual, weight(side, hidden, dtype), **kwargs)
    return {"out": x, "residual": residual}


def quant(
    side: Side, scale: Any = 0.02, out_dtype: torch.dtype = E4M3, add: bool = False, hidden: int = 4096
) -> Results:
    x, residual = (side.rand(ROWS, hidden, seed=s, dtype=BF16) for s in (1, 3))
    out = torch.empty(ROWS, hidden, dtype=out_dtype, device=side.device)
    if scale == "tensor":
        scale = torch.tensor([0.02], device=side.device)
    if add:
        side.fused_add_rmsnorm_quant(out, x, residual, weight(side, hidden, BF16), scale)
        return {"out": out, "residual": residual}
    side.rmsnorm_quant(out, x, weight(side, hidden, BF16), scale)
    return {"out": out}


def layernorm(side: Side, quantised: bool = False, hidden: int = 4096, **kwargs: Any) -> Results:
    x = side.rand(ROWS, hidden, seed=1, dtype=BF16).add(0.5)
    gamma, beta = weight(side, hidden, torch.float32), side.rand(hidden, seed=4).mul(0.1)
    if quantised:
        out = torch.empty(ROWS, hidden, dtype=E4M3, device=side.device)
        side.layernorm_quant(out, x, gamma, beta, torch.tensor([0.02], device=side.device), **kwargs)
        return {"out": out}
    return {"out": side.layernorm(x, gamma, beta, **kwargs)}


def block_quant(side: Side, hidden: int = 4096) -> Results:
    x, residual = (side.rand(ROWS, hidden, seed=s, dtype=BF16) for s in (1, 3))
    x[2] = residual[2] = 0
    out = torch.empty(ROWS, hidden, dtype=E4M3, device=side.device)
    scale = torch.zeros(hidden // 128, -(-ROWS // 4) * 4, device=side.device)
    normed = torch.empty_like(x)
    side.fused_add_rmsnorm_fp8_block_quant(out, scale, normed, x, residual, weight(side, hidden, BF16))
    return {"out": out, "scale": scale[:, :ROWS], "normed": normed, "residual": residual}


def rmsnorm_silu(side: Side, hidden: int) -> Results:
    x = side.rand(ROWS, hidden, seed=1, dtype=BF16)
    return {"out": side.fused_rmsnorm_silu(x, weight(side, hidden, BF16))}


def cases() -> list[Case]:
    def case(function: str, features: str, run: partial) -> Case:
        return Case(function, features, "norm", "elementwise", run)

    def plain(name: str) -> list[Case]:
        run = partial(rmsnorm, name=name)
        return [
            case(name, "bf16, hidden 4096", run),
            case(name, "fp16, hidden 1152", partial(run, hidden=1152, dtype=FP16)),
            case(name, "per head 8 x 128, strided", partial(run, hidden=128, heads=8)),
            case(name, "eps 0.1, out given", partial(run, hidden=512, eps=0.1, out=True)),
        ]

    def fused(name: str) -> list[Case]:
        run = partial(fused_add, name=name)
        return [
            case(name, "bf16, hidden 4096", run),
            case(name, "fp16, hidden 896, eps 0.1", partial(run, hidden=896, dtype=FP16, eps=0.1)),
        ]

    return [
        *plain("rmsnorm"),
        *plain("gemma_rmsnorm"),
        *fused("fused_add_rmsnorm"),
        *fused("gemma_fused_add_rmsnorm"),
        case("rmsnorm_quant", "e4m3, scale as a tensor", partial(quant, scale="tensor")),
        case("rmsnorm_quant", "e4m3, scale as a float", partial(quant)),
        case("rmsnorm_quant", "e4m3, saturating", partial(quant, scale=0.004)),
        case("rmsnorm_quant", "e5m2", partial(quant, out_dtype=E5M2)),
        case("fused_add_rmsnorm_quant", "e4m3, scale as a tensor", partial(quant, scale="tensor", add=True)),
        case("layernorm", "bf16, hidden 4096", partial(layernorm)),
        case("layernorm", "bf16, hidden 768, eps 0.1", partial(layernorm, hidden=768, eps=0.1)),
        case("layernorm_quant", "e4m3", partial(layernorm, quantised=True)),
        case("fused_add_rmsnorm_fp8_block_quant", "bf16, a zero row", partial(block_quant)),
        case("fused_rmsnorm_silu", "hidden 1024", partial(rmsnorm_silu, hidden=1024)),
        case("fused_rmsnorm_silu", "hidden 384", partial(rmsnorm_silu, hidden=384)),
    ]
