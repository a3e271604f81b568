"""fused_add_rmsnorm_fp8_block_quant: add, norm, and quantise in groups of 128 elements."""

from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from kernelmux.capabilities import Request, dtype_name
from kernelmux.dispatch.arguments import check_floats, check_writable, refuse_grad, shape_error
from kernelmux.dispatch.norm import reference
from kernelmux.dispatch.norm.describe import DIMS, FEATURES, norm_request, same_shape
from kernelmux.dispatch.op import PREFER, Op

GROUP = 128


def _describe(
    out: Tensor, block_scale: Tensor, normed_out: Tensor, input: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> Request:
    op = "fused_add_rmsnorm_fp8_block_quant"
    hidden = input.shape[-1] if input.ndim else 0
    if input.ndim != 2:
        raise shape_error(op, "input", input, "[rows, hidden]", "reshape it")
    if hidden % GROUP:
        raise ValueError(f"{op}: hidden is {hidden}, a multiple of {GROUP}; pad it to {-(-hidden // GROUP) * GROUP}")
    if out.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{op}: out is {dtype_name(out.dtype)}, it must be float8_e4m3fn; allocate it so")
    if block_scale.dtype != torch.float32:
        raise TypeError(f"{op}: block_scale is {dtype_name(block_scale.dtype)}, it must be float32; allocate it so")
    if normed_out.dtype != input.dtype:
        got, want = dtype_name(normed_out.dtype), dtype_name(input.dtype)
        raise TypeError(f"{op}: normed_out is {got}, input {want}; allocate it with input's dtype")
    if block_scale.device != input.device:
        raise ValueError(f"{op}: block_scale is on {block_scale.device}, input on {input.device}; move it there")
    check_floats(op, {"residual": residual})
    check_writable(op, {"block_scale": block_scale})
    written = {"out": out, "normed_out": normed_out, "residual": residual}
    return norm_request(op, input, {"weight": weight}, written, features=_scale_features(block_scale))


def _scale_features(block_scale: Tensor) -> set[str]:
    return set() if block_scale.stride(1) == 1 else {"scale_strided"}


FUSED_ADD_RMSNORM_FP8_BLOCK_QUANT = Op(
    "fused_add_rmsnorm_fp8_block_quant", "norm", reference.fused_add_rmsnorm_fp8_block_quant, _describe,
    growing=("rows",), dims=DIMS, roles=("input", "weight", "out", "normed_out", "residual"),
    features=(*FEATURES, "scale_strided"), in_place=True,
    schema="(Tensor(a!) out, Tensor(b!) block_scale, Tensor(c!) normed_out, Tensor input, Tensor(d!) residual, "
    "Tensor weight, float eps) -> ()",
)  # fmt: skip


def fused_add_rmsnorm_fp8_block_quant(
    out: Tensor,
    block_scale: Tensor,
    normed_out: Tensor,
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Add input to the residual in place, norm the sum, and quantise the norm in groups of 128 elements of a row.

    With x = input + residual in float32: residual becomes x, rounded; normed_out is the rmsnorm of x (not rounded
    before), rounded to its dtype; each group of 128 elements of normed_out has the scale max(amax, 1e-4) / 448, and
    out = normed_out / scale. So normed_out is about out * scale. input is left alone.

    Args:
        out: float8_e4m3fn [rows, hidden], any strides; is written.
        block_scale: float32 [hidden / 128, rows or more], commonly with rows rounded up to a multiple of 4; is
            written, but for the columns past the rows.
        normed_out: [rows, hidden] of input's dtype; is written.
        input: [rows, hidden], a floating dtype; hidden is a multiple of 128.
        residual: [rows, hidden], a floating dtype; becomes input + residual.
        weight: [hidden], a floating dtype.
        eps: added to the mean square.
        enable_pdl: accepted for compatibility; it changes no result.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.
        NoKernelError: when an input requires grad.

    Source: the 1x128 scaling of DeepSeek-V3; FlashInfer's `fused_add_rmsnorm_fp8_block_quant`.

    >>> import torch
    >>> x = torch.ones(2, 128)
    >>> out, scale = torch.empty(2, 128, dtype=torch.float8_e4m3fn), torch.zeros(1, 4)
    >>> normed = torch.empty_like(x)
    >>> fused_add_rmsnorm_fp8_block_quant(out, scale, normed, x, torch.ones(2, 128), torch.full((128,), 4.48))
    >>> out[0, 0].item(), scale
    (448.0, tensor([[0.0100, 0.0100, 0.0000, 0.0000]]))
    """
    args = (out, block_scale, normed_out, input, residual, weight, eps)
    if is_compiling():
        refuse_grad("fused_add_rmsnorm_fp8_block_quant", *args[:-1])
        torch.ops.kernelmux.fused_add_rmsnorm_fp8_block_quant(*args)
    else:
        _run(*args)


def _run(
    out: Tensor, block_scale: Tensor, normed_out: Tensor, input: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> None:
    op, shape = FUSED_ADD_RMSNORM_FP8_BLOCK_QUANT, input.shape
    _check_rows(op.name, out, block_scale, normed_out, input, residual)
    key: tuple[Any, ...] = (
        input.dtype, input.device, shape[1:], input.stride(),
        out.dtype, out.device, out.stride(), residual.dtype, residual.device, residual.stride(),
        normed_out.dtype, normed_out.device, normed_out.stride(),
        block_scale.dtype, block_scale.device, block_scale.stride()[1] == 1, 0 in block_scale.stride(),
        weight.dtype, weight.device, weight.ndim, weight.numel(), weight.is_contiguous(),
        (out.data_ptr() | input.data_ptr() | residual.data_ptr() | normed_out.data_ptr() | weight.data_ptr()) & 15 == 0,
        is_grad_enabled() and any(t.requires_grad for t in (input, residual, weight, out, normed_out)),
        op.bucket(shape[0]), PREFER.get(),
    )  # fmt: skip
    run = op.cache.get(key) or op.pick(key, (out, block_scale, normed_out, input, residual, weight, eps))
    run(out, block_scale, normed_out, input, residual, weight, eps)


def _check_rows(op: str, out: Tensor, block_scale: Tensor, normed_out: Tensor, input: Tensor, residual: Tensor) -> None:
    """What a key cannot hold: sizes that must agree with the number of rows."""
    shape = input.shape
    for name, tensor in (("out", out), ("normed_out", normed_out), ("residual", residual)):
        if tensor.shape != shape:
            same_shape(op, name, tensor, input)
    rows, groups = shape[0] if shape else 0, -(-shape[-1] // GROUP) if shape else 0
    if block_scale.ndim != 2 or block_scale.shape[0] != groups or block_scale.shape[1] < rows:
        want = [groups, -(-rows // 4) * 4]
        raise shape_error(op, "block_scale", block_scale, want, "give one scale per group of 128 elements and row")


FUSED_ADD_RMSNORM_FP8_BLOCK_QUANT.eager = _run
