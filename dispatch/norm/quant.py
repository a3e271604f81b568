"""rmsnorm_quant, fused_add_rmsnorm_quant and layernorm_quant: norms that write 8-bit floats with one scale."""

from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from kernelmux.capabilities import Request
from kernelmux.dispatch.arguments import refuse_grad
from kernelmux.dispatch.norm import reference
from kernelmux.dispatch.norm.describe import DIMS, FEATURES, one_scale, quant_request, same_shape, tensor_scale
from kernelmux.dispatch.op import PREFER, Op


def _describe(out: Tensor, input: Tensor, weight: Tensor, scale: Tensor | float, eps: float) -> Request:
    return quant_request("rmsnorm_quant", input, {"weight": weight}, out, scale)


def _describe_add(
    out: Tensor, input: Tensor, residual: Tensor, weight: Tensor, scale: Tensor | float, eps: float
) -> Request:
    return quant_request("fused_add_rmsnorm_quant", input, {"weight": weight}, out, scale, residual)


def _describe_layer(
    out: Tensor, input: Tensor, gemma: Tensor, beta: Tensor, scale: Tensor | float, eps: float
) -> Request:
    return quant_request("layernorm_quant", input, {"gemma": gemma, "beta": beta}, out, scale)


RMSNORM_QUANT = Op(
    "rmsnorm_quant", "norm", reference.rmsnorm_quant, _describe,
    growing=("rows",), dims=DIMS, roles=("input", "weight", "out"), features=FEATURES, in_place=True,
    schema="(Tensor(a!) out, Tensor input, Tensor weight, Tensor scale, float eps) -> ()",
)  # fmt: skip
FUSED_ADD_RMSNORM_QUANT = Op(
    "fused_add_rmsnorm_quant", "norm", reference.fused_add_rmsnorm_quant, _describe_add,
    growing=("rows",), dims=DIMS, roles=("input", "weight", "out", "residual"), features=FEATURES, in_place=True,
    schema="(Tensor(a!) out, Tensor input, Tensor(b!) residual, Tensor weight, Tensor scale, float eps) -> ()",
)  # fmt: skip
LAYERNORM_QUANT = Op(
    "layernorm_quant", "norm", reference.layernorm_quant, _describe_layer,
    growing=("rows",), dims=DIMS, roles=("input", "gemma", "beta", "out"), features=FEATURES, in_place=True,
    schema="(Tensor(a!) out, Tensor input, Tensor gemma, Tensor beta, Tensor scale, float eps) -> ()",
)  # fmt: skip


def rmsnorm_quant(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    scale: Tensor | float,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Norm each row as `rmsnorm` does and write it as 8-bit floats: out = rmsnorm(input) / scale.

    The norm is not rounded before it is divided; what lies beyond the largest finite number of out's dtype becomes
    that number; NaN stays NaN.

    Args:
        out: input's shape, float8_e4m3fn or float8_e5m2, any strides; is written.
        input: [rows, hidden] or [rows, heads, hidden], any strides.
        weight: [hidden], a floating dtype.
        scale: the dequantisation factor of out: a float, or a tensor of one element on input's device.
        eps: added to the mean square.
        enable_pdl: accepted for compatibility; it changes no result.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.
        NoKernelError: when an input requires grad.

    Source: FlashInfer's `rmsnorm_quant`.

    >>> import torch
    >>> out = torch.empty(1, 2, dtype=torch.float8_e4m3fn)
    >>> rmsnorm_quant(out, torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 1e4]), scale=0.1)
    >>> out.float()
    tensor([[  8., 448.]])
    """
    _run(RMSNORM_QUANT, (out, input, weight, scale, eps), weight)


def fused_add_rmsnorm_quant(
    out: Tensor,
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    scale: Tensor | float,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Add input to the residual in place, norm the sum, and write it as 8-bit floats: out = norm / scale.

    The norm is that of the sum before it is rounded to residual's dtype; input is left alone. Values beyond the
    largest finite number of out's dtype become that number.

    Args:
        out: input's shape, float8_e4m3fn or float8_e5m2, any strides; is written.
        input: [rows, hidden] or [rows, heads, hidden], any strides.
        residual: input's shape, a floating dtype; becomes input + residual.
        weight: [hidden], a floating dtype.
        scale: the dequantisation factor of out: a float, or a tensor of one element on input's device.
        eps: added to the mean square.
        enable_pdl: accepted for compatibility; it changes no result.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.
        NoKernelError: when an input requires grad.

    Source: FlashInfer's `fused_add_rmsnorm_quant`.

    >>> import torch
    >>> out, residual = torch.empty(1, 2, dtype=torch.float8_e4m3fn), torch.tensor([[2.0, 1.0]])
    >>> fused_add_rmsnorm_quant(out, torch.tensor([[1.0, 3.0]]), residual, torch.ones(2), scale=0.1)
    >>> out.float(), residual
    (tensor([[ 8., 11.]]), tensor([[3., 4.]]))
    """
    if residual.shape != input.shape:
        same_shape("fused_add_rmsnorm_quant", "residual", residual, input)
    _run(FUSED_ADD_RMSNORM_QUANT, (out, input, residual, weight, scale, eps), weight, residual)


def layernorm_quant(
    out: Tensor, input: Tensor, gemma: Tensor, beta: Tensor, scale: Tensor | float, eps: float = 1e-6
) -> None:
    """Norm each row as `layernorm` does and write it as 8-bit floats: out = layernorm(input) / scale.

    Args:
        out: input's shape, float8_e4m3fn or float8_e5m2, any strides; is written, saturated.
        input: [rows, hidden] or [rows, heads, hidden], any strides.
        gemma: [hidden], a floating dtype: the factor (commonly called gamma).
        beta: [hidden], a floating dtype: what is added.
        scale: the dequantisation factor of out: a float, or a tensor of one element on input's device.
        eps: added to the variance.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.
        NoKernelError: when an input requires grad.

    Source: FlashInfer's `layernorm_quant`.

    >>> import torch
    >>> out = torch.empty(1, 2, dtype=torch.float8_e4m3fn)
    >>> layernorm_quant(out, torch.tensor([[1.0, 3.0]]), torch.ones(2), torch.zeros(2), scale=0.5)
    >>> out.float()
    tensor([[-2.,  2.]])
    """
    _run(LAYERNORM_QUANT, (out, input, gemma, beta, scale, eps), gemma, beta)


def _run(op: Op, args: tuple[Any, ...], weight: Tensor, other: Tensor | None = None) -> None:
    """`args` begin with out and input and end with scale and eps; `other` is the residual or beta."""
    out, input, scale = args[0], args[1], args[-2]
    if is_compiling():
        refuse_grad(op.name, out, input, weight, other)
        getattr(torch.ops.kernelmux, op.name)(*args[:-2], tensor_scale(op.name, scale, input), args[-1])
        return
    if scale.__class__ is not float and (not isinstance(scale, Tensor) or scale.dtype is not torch.float32):
        scale = one_scale(op.name, scale)
        args = (*args[:-2], scale, args[-1])
    shape, address = input.shape, out.data_ptr() | input.data_ptr() | weight.data_ptr()
    if out.shape != shape:
        same_shape(op.name, "out", out, input)
    extra = None
    if other is not None:
        extra = (other.dtype, other.device, other.ndim, other.shape[-1], other.stride(), other.requires_grad)
        address |= other.data_ptr()
    key = (
        input.dtype, input.device, shape[1] if len(shape) == 2 else shape[1:], input.stride(),
        out.dtype, out.device, out.stride(),
        weight.dtype, weight.device, weight.ndim, weight.numel(), weight.is_contiguous(),
        extra, (scale.device, scale.numel()) if isinstance(scale, Tensor) else None, address & 15 == 0,
        is_grad_enabled() and (input.requires_grad or weight.requires_grad or out.requires_grad),
        op.bucket(shape[0] if shape else 0), PREFER.get(),
    )  # fmt: skip
    run = op.cache.get(key) or op.pick(key, args)
    run(*args)


def _eager_rmsnorm(out: Tensor, input: Tensor, weight: Tensor, scale: Tensor, eps: float) -> None:
    _run(RMSNORM_QUANT, (out, input, weight, scale, eps), weight)


def _eager_add(out: Tensor, input: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float) -> None:
    _run(FUSED_ADD_RMSNORM_QUANT, (out, input, residual, weight, scale, eps), weight, residual)


def _eager_layernorm(out: Tensor, input: Tensor, gemma: Tensor, beta: Tensor, scale: Tensor, eps: float) -> None:
    _run(LAYERNORM_QUANT, (out, input, gemma, beta, scale, eps), gemma, beta)


RMSNORM_QUANT.eager = _eager_rmsnorm
FUSED_ADD_RMSNORM_QUANT.eager = _eager_add
LAYERNORM_QUANT.eager = _eager_layernorm
