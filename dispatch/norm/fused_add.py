"""fused_add_rmsnorm and gemma_fused_add_rmsnorm: add a residual and norm the sum, both in place."""

from collections.abc import Callable

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from kernelmux.capabilities import Request
from kernelmux.dispatch.arguments import check_floats, refuse_grad
from kernelmux.dispatch.norm import reference
from kernelmux.dispatch.norm.describe import DIMS, FEATURES, norm_request, same_shape
from kernelmux.dispatch.op import PREFER, Op


def _request(op: str, input: Tensor, residual: Tensor, weight: Tensor) -> Request:
    check_floats(op, {"residual": residual})
    return norm_request(op, input, {"weight": weight}, {"residual": residual}, in_place=True)


def _describe(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Request:
    return _request("fused_add_rmsnorm", input, residual, weight)


def _describe_gemma(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Request:
    return _request("gemma_fused_add_rmsnorm", input, residual, weight)


_ROLES = ("input", "residual", "weight")
_SCHEMA = "(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps) -> ()"
FUSED_ADD_RMSNORM = Op(
    "fused_add_rmsnorm", "norm", reference.fused_add_rmsnorm, _describe,
    growing=("rows",), dims=DIMS, roles=_ROLES, features=FEATURES, schema=_SCHEMA, in_place=True,
)  # fmt: skip
GEMMA_FUSED_ADD_RMSNORM = Op(
    "gemma_fused_add_rmsnorm", "norm", reference.gemma_fused_add_rmsnorm, _describe_gemma,
    growing=("rows",), dims=DIMS, roles=_ROLES, features=FEATURES, schema=_SCHEMA, in_place=True,
)  # fmt: skip


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """Add input to the residual and norm the sum, in place.

    In torch, with x = input.float() + residual.float(): `residual.copy_(x)`, then
    `input.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float())`. The norm is that of the
    sum before it is rounded to residual's dtype. float64 inputs are computed in float64.

    Args:
        input: [rows, hidden] or [rows, heads, hidden], any strides; becomes the norm.
        residual: input's shape, a floating dtype; becomes the sum.
        weight: [hidden], a floating dtype.
        eps: added to the mean square.
        enable_pdl: accepted for compatibility; it changes no result.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.
        NoKernelError: when an input requires grad; add, and use `rmsnorm`.

    Source: FlashInfer's `fused_add_rmsnorm`.

    >>> import torch
    >>> x, residual = torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 1.0]])
    >>> fused_add_rmsnorm(x, residual, torch.tensor([1.0, 2.0]))
    >>> x, residual
    (tensor([[0.8485, 2.2627]]), tensor([[3., 4.]]))
    """
    _fused_add(FUSED_ADD_RMSNORM, input, residual, weight, eps)


def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """Add input to the residual and norm the sum in place, with 1 + weight in the place of weight.

    Args and Raises are those of `fused_add_rmsnorm`.

    Source: the norm of the Gemma models; FlashInfer's `gemma_fused_add_rmsnorm`.

    >>> import torch
    >>> x, residual = torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 1.0]])
    >>> gemma_fused_add_rmsnorm(x, residual, torch.tensor([0.0, 1.0]))
    >>> x, residual
    (tensor([[0.8485, 2.2627]]), tensor([[3., 4.]]))
    """
    _fused_add(GEMMA_FUSED_ADD_RMSNORM, input, residual, weight, eps)


def _fused_add(op: Op, input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    if is_compiling():
        refuse_grad(op.name, input, residual, weight)
        getattr(torch.ops.kernelmux, op.name)(input, residual, weight, eps)
        return
    shape = input.shape
    if residual.shape != shape:
        same_shape(op.name, "residual", residual, input)
    rows, hidden = shape if len(shape) == 2 else (shape[0] if shape else 0, shape[1:])
    several = rows > 1  # the shape of a contiguous tensor of several rows tells its strides, for less than they cost
    key = (
        input.dtype, input.device, hidden, (several and input.is_contiguous()) or input.stride(),
        residual.dtype, residual.device, (several and residual.is_contiguous()) or residual.stride(),
        weight.dtype, weight.device, weight.numel(), weight.stride(),
        (input.data_ptr() | residual.data_ptr() | weight.data_ptr()) & 15 == 0,
        is_grad_enabled() and (input.requires_grad or residual.requires_grad or weight.requires_grad),
        op.bucket(rows), PREFER.get(),
    )  # fmt: skip
    run = op.cache.get(key) or op.pick(key, (input, residual, weight, eps))
    run(input, residual, weight, eps)


def _eager(op: Op) -> Callable[..., None]:
    def run(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        _fused_add(op, input, residual, weight, eps)

    return run


for _op in (FUSED_ADD_RMSNORM, GEMMA_FUSED_ADD_RMSNORM):
    _op.eager = _eager(_op)
