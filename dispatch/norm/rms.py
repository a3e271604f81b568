"""rmsnorm, gemma_rmsnorm and fused_rmsnorm_silu: norms that return a new tensor or fill `out`."""

from collections.abc import Callable

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from kernelmux.capabilities import Request
from kernelmux.dispatch.arguments import check_floats, check_fp8, needs_grad
from kernelmux.dispatch.norm import reference
from kernelmux.dispatch.norm.describe import DIMS, FEATURES, norm_request, same_shape
from kernelmux.dispatch.op import PREFER, Op


def _request(op: str, input: Tensor, weight: Tensor, out: Tensor | None) -> Request:
    check_floats(op, {"out": out})
    return norm_request(op, input, {"weight": weight}, {"out": out})


def _describe(input: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Request:
    return _request("rmsnorm", input, weight, out)


def _describe_gemma(input: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Request:
    return _request("gemma_rmsnorm", input, weight, out)


def _describe_silu(input: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Request:
    if out is None or out.dtype.itemsize > 1:
        return _request("fused_rmsnorm_silu", input, weight, out)
    check_fp8("fused_rmsnorm_silu", "out", out.dtype)
    return norm_request("fused_rmsnorm_silu", input, {"weight": weight}, {"out": out})


_ROLES = ("input", "weight", "out")
_SCHEMA = "(Tensor input, Tensor weight, float eps, Tensor(a!) out) -> ()"
RMSNORM = Op(
    "rmsnorm", "norm", reference.rmsnorm, _describe,
    growing=("rows",), dims=DIMS, roles=_ROLES, features=FEATURES, schema=_SCHEMA,
)  # fmt: skip
GEMMA_RMSNORM = Op(
    "gemma_rmsnorm", "norm", reference.gemma_rmsnorm, _describe_gemma,
    growing=("rows",), dims=DIMS, roles=_ROLES, features=FEATURES, schema=_SCHEMA,
)  # fmt: skip
FUSED_RMSNORM_SILU = Op(
    "fused_rmsnorm_silu", "norm", reference.fused_rmsnorm_silu, _describe_silu,
    growing=("rows",), dims=DIMS, roles=_ROLES, features=FEATURES, schema=_SCHEMA,
)  # fmt: skip


def rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """Divide each row by its root mean square and multiply it by a weight.

    In torch, with x = input.float(): `x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()`,
    rounded once to the dtype of the result. float64 inputs are computed in float64.

    Args:
        input: [rows, hidden], or [rows, heads, hidden] for a norm per head; any strides.
        weight: [hidden], a floating dtype.
        eps: added to the mean square.
        out: None, or where to write the result: input's shape, a floating dtype of 16 bits or more, any strides.
        enable_pdl: accepted for compatibility; it changes no result.

    Returns:
        `out`, or a new tensor of input's shape and dtype.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019); FlashInfer's `rmsnorm`.

    >>> import torch
    >>> rmsnorm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([1.0, 2.0])).tolist()
    [[0.8485280871391296, 2.2627415657043457], [0.0, 0.0]]
    """
    return _norm(RMSNORM, input, weight, eps, out)


def gemma_rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """Norm each row as `rmsnorm` does, with 1 + weight in the place of weight.

    Args, Returns and Raises are those of `rmsnorm`; 1 + weight is formed in float32 (float64 for a float64 input).

    Source: the norm of the Gemma models; FlashInfer's `gemma_rmsnorm`.

    >>> import torch
    >>> gemma_rmsnorm(torch.ones(2, 4), torch.full((4,), 0.5)).tolist()[0]
    [1.4999992847442627, 1.4999992847442627, 1.4999992847442627, 1.4999992847442627]
    """
    return _norm(GEMMA_RMSNORM, input, weight, eps, out)


def fused_rmsnorm_silu(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    block_scale: Tensor | None = None,
) -> Tensor:
    """Norm each row as `rmsnorm` does, and apply SiLU: `silu(rmsnorm(input, weight, eps))`, rounded once at the end.

    Args:
        input: [rows, hidden] or [rows, heads, hidden], any strides.
        weight: [hidden], a floating dtype.
        eps: added to the mean square.
        out: None, or where to write: input's shape; an 8-bit float dtype is written saturated.
        block_scale: must be None. It belongs to block-scaled 4-bit outputs, which are not provided.

    Returns:
        `out`, or a new tensor of input's shape and dtype.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together, or a block_scale.

    Source: FlashInfer's `fused_rmsnorm_silu`.

    >>> import torch
    >>> fused_rmsnorm_silu(torch.tensor([[1.0, -1.0]]), torch.ones(2), eps=0.0)
    tensor([[ 0.7311, -0.2689]])
    """
    if block_scale is not None:
        raise ValueError(
            "fused_rmsnorm_silu: block_scale is given, block-scaled outputs are not provided; "
            "pass None and quantise the result"
        )
    return _norm(FUSED_RMSNORM_SILU, input, weight, eps, out)


def _norm(op: Op, input: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
    if is_compiling():
        return _compiled(op, input, weight, eps, out)
    shape, address, written = input.shape, input.data_ptr() | weight.data_ptr(), None
    if out is not None:
        same_shape(op.name, "out", out, input)
        address |= out.data_ptr()
        written = (out.dtype, out.device, out.stride(), out.requires_grad)
    key = (
        input.dtype, input.device, shape[1] if len(shape) == 2 else shape[1:], input.stride(),
        weight.dtype, weight.device, weight.numel(), weight.stride(),
        written, address & 15 == 0, is_grad_enabled() and (input.requires_grad or weight.requires_grad),
        op.bucket(shape[0] if shape else 0), PREFER.get(),
    )  # fmt: skip
    run = op.cache.get(key) or op.pick(key, (input, weight, eps, out))
    return run(input, weight, eps, out)  # type: ignore[no-any-return]


def _compiled(op: Op, input: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
    if needs_grad(input, weight, out):
        return op.function(input, weight, eps, out)  # type: ignore[no-any-return]
    out = torch.empty_like(input) if out is None else out
    getattr(torch.ops.kernelmux, op.name)(input, weight, eps, out)
    return out


def _eager(op: Op) -> Callable[..., None]:
    def run(input: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        _norm(op, input, weight, eps, out)

    return run


for _op in (RMSNORM, GEMMA_RMSNORM, FUSED_RMSNORM_SILU):
    _op.eager = _eager(_op)
