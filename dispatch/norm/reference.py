"""The norms in plain torch: float64 for float64 inputs, else float32, rounded once at the end."""

import torch
from torch import Tensor
from torch.nn.functional import silu


def rmsnorm(input: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """input / sqrt(mean(input²) + eps) * weight, over the last dim."""
    return _into(_rms(widen(input), widen(weight, input), eps), input.dtype, out)


def gemma_rmsnorm(input: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """As rmsnorm with 1 + weight."""
    return _into(_rms(widen(input), 1 + widen(weight, input), eps), input.dtype, out)


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """x = input + residual; residual becomes x, rounded; input becomes rmsnorm of x, not rounded."""
    x = _add(input, residual)
    input.copy_(_rms(x, widen(weight, input), eps))


def gemma_fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """As fused_add_rmsnorm with 1 + weight."""
    x = _add(input, residual)
    input.copy_(_rms(x, 1 + widen(weight, input), eps))


def rmsnorm_quant(out: Tensor, input: Tensor, weight: Tensor, scale: Tensor | float, eps: float) -> None:
    """out = rmsnorm(input) / scale, saturated to the range of out's dtype."""
    saturate(out, _rms(widen(input), widen(weight, input), eps) / scale)


def fused_add_rmsnorm_quant(
    out: Tensor, input: Tensor, residual: Tensor, weight: Tensor, scale: Tensor | float, eps: float
) -> None:
    """residual becomes input + residual, rounded; out is rmsnorm of the sum, not rounded, / scale, saturated."""
    x = _add(input, residual)
    saturate(out, _rms(x, widen(weight, input), eps) / scale)


def layernorm(input: Tensor, gemma: Tensor, beta: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """(input - mean) / sqrt(variance + eps) * gemma + beta, over the last dim."""
    return _into(_centred(input, gemma, beta, eps), input.dtype, out)


def layernorm_quant(out: Tensor, input: Tensor, gemma: Tensor, beta: Tensor, scale: Tensor | float, eps: float) -> None:
    """out = layernorm(input) / scale, saturated to the range of out's dtype."""
    saturate(out, _centred(input, gemma, beta, eps) / scale)


def fused_rmsnorm_silu(input: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """silu(rmsnorm(input)), not rounded in between; saturated when out is an 8-bit float."""
    y = silu(_rms(widen(input), widen(weight, input), eps))
    if out is not None and out.dtype.itemsize == 1:
        return saturate(out, y)
    return _into(y, input.dtype, out)


def fused_add_rmsnorm_fp8_block_quant(
    out: Tensor, block_scale: Tensor, normed_out: Tensor, input: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> None:
    """residual becomes input + residual; normed_out is rmsnorm of the sum, rounded; out = normed_out / scale.

    Each group of 128 elements of a row has its scale, max(amax of its rounded values, 1e-4) / 448. block_scale is
    [hidden / 128, rows or more]; entries past the rows are left alone.
    """
    x = _add(input, residual)
    normed_out.copy_(_rms(x, widen(weight, input), eps))
    groups = widen(normed_out).unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1).clamp(min=1e-4) / 448
    saturate(out, (groups / scale[..., None]).flatten(-2))
    block_scale[:, : scale.shape[0]] = scale.T


def widen(t: Tensor, like: Tensor | None = None) -> Tensor:
    """In the precision that is computed in: float64 for a float64 tensor (or `like`), else float32."""
    return t.to(torch.float64 if (t if like is None else like).dtype == torch.float64 else torch.float32)


def saturate(out: Tensor, values: Tensor) -> Tensor:
    """Write values, clamped to the finite range of out's dtype; NaN stays NaN."""
    limit = torch.finfo(out.dtype).max
    return out.copy_(values.clamp(-limit, limit))


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _add(input: Tensor, residual: Tensor) -> Tensor:
    """The sum, not rounded; residual receives it, rounded."""
    x = widen(input) + widen(residual, input)
    residual.copy_(x)
    return x


def _centred(input: Tensor, gemma: Tensor, beta: Tensor, eps: float) -> Tensor:
    x = widen(input)
    x = x - x.mean(-1, keepdim=True)
    return _rms(x, widen(gemma, input), eps) + widen(beta, input)


def _into(values: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return values.to(dtype) if out is None else out.copy_(values)
