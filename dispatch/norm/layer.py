"""layernorm."""

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from kernelmux.capabilities import Request
from kernelmux.dispatch.arguments import check_floats, needs_grad
from kernelmux.dispatch.norm import reference
from kernelmux.dispatch.norm.describe import DIMS, FEATURES, norm_request
from kernelmux.dispatch.op import PREFER, Op


def _describe(input: Tensor, gemma: Tensor, beta: Tensor, eps: float, out: Tensor | None) -> Request:
    check_floats("layernorm", {"out": out})
    return norm_request("layernorm", input, {"gemma": gemma, "beta": beta}, {"out": out})


LAYERNORM = Op(
    "layernorm", "norm", reference.layernorm, _describe,
    growing=("rows",), dims=DIMS, roles=("input", "gemma", "beta", "out"), features=FEATURES,
    schema="(Tensor input, Tensor gemma, Tensor beta, float eps, Tensor(a!) out) -> ()",
)  # fmt: skip


def layernorm(input: Tensor, gemma: Tensor, beta: Tensor, eps: float = 1e-6) -> Tensor:
    """Subtract each row's mean, divide by its standard deviation, multiply by gemma and add beta.

    In torch: `torch.nn.functional.layer_norm(input.float(), gemma.shape, gemma.float(), beta.float(), eps)`, rounded
    once to input's dtype. float64 inputs are computed in float64.

    Args:
        input: [rows, hidden] or [rows, heads, hidden], any strides.
        gemma: [hidden], a floating dtype: the factor (commonly called gamma).
        beta: [hidden], a floating dtype: what is added.
        eps: added to the variance.

    Returns:
        A new tensor of input's shape and dtype.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.

    Source: Ba, Kiros and Hinton, "Layer Normalization" (2016); FlashInfer's `layernorm`.

    >>> import torch
    >>> layernorm(torch.tensor([[1.0, 3.0]]), torch.tensor([1.0, 2.0]), torch.tensor([0.0, 5.0]))
    tensor([[-1.0000,  7.0000]])
    """
    if is_compiling():
        if needs_grad(input, gemma, beta):
            return reference.layernorm(input, gemma, beta, eps)
        out = torch.empty_like(input)
        torch.ops.kernelmux.layernorm(input, gemma, beta, eps, out)
        return out
    return _layernorm(input, gemma, beta, eps, None)


def _layernorm(input: Tensor, gemma: Tensor, beta: Tensor, eps: float, out: Tensor | None) -> Tensor:
    shape, op = input.shape, LAYERNORM
    key = (
        input.dtype, input.device, shape[1] if len(shape) == 2 else shape[1:], input.stride(),
        gemma.dtype, gemma.device, gemma.ndim, gemma.numel(), gemma.is_contiguous(),
        beta.dtype, beta.device, beta.ndim, beta.numel(), beta.is_contiguous(),
        out is None or (out.dtype, out.stride(), out.data_ptr() & 15 == 0),
        (input.data_ptr() | gemma.data_ptr() | beta.data_ptr()) & 15 == 0,
        is_grad_enabled() and (input.requires_grad or gemma.requires_grad or beta.requires_grad),
        op.bucket(shape[0] if shape else 0), PREFER.get(),
    )  # fmt: skip
    run = op.cache.get(key) or op.pick(key, (input, gemma, beta, eps, out))
    return run(input, gemma, beta, eps, out)  # type: ignore[no-any-return]


def _eager(input: Tensor, gemma: Tensor, beta: Tensor, eps: float, out: Tensor) -> None:
    _layernorm(input, gemma, beta, eps, out)


LAYERNORM.eager = _eager
