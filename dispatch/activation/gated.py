"""silu_and_mul, gelu_and_mul, gelu_tanh_and_mul: an activation of one half of the last dim, times the other half."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from kernelmux.capabilities import Request
from kernelmux.dispatch.activation import reference
from kernelmux.dispatch.arguments import (
    check_device,
    check_floats,
    check_writable,
    layout_features,
    needs_grad,
    shape_error,
)
from kernelmux.dispatch.op import PREFER, Op


def _request(op: str, input: Tensor, out: Tensor | None) -> Request:
    width = input.shape[-1]
    if width % 2:
        raise ValueError(f"{op}: input's last dim is {width}, it must be even; it holds two halves of equal size")
    check_floats(op, {"input": input, "out": out})
    check_device(op, input.device, {"out": out})
    check_writable(op, {"out": out})
    half = width // 2
    features = layout_features(input[..., :half], input[..., half:], out)
    if _scattered(input) or (out is not None and _scattered(out)):
        features.add("rows_scattered")
    return Request(
        op=op,
        family="activation",
        device=input.device,
        dtypes={"input": input.dtype} | ({} if out is None else {"out": out.dtype}),
        dims={"rows": input.numel() // width if width else 0, "half": half},
        features=frozenset(features),
        empty=input.numel() == 0,
        grad=needs_grad(input, out),
    )


def _scattered(t: Tensor) -> bool:
    """Whether the leading dims are not one dim of rows of one stride. The first dim counts as if it had many."""
    outer = [d for d in range(t.ndim - 1) if d == 0 or t.shape[d] > 1]
    return any(t.stride(a) != t.shape[b] * t.stride(b) for a, b in pairwise(outer))


def _describe_silu(input: Tensor, out: Tensor | None) -> Request:
    return _request("silu_and_mul", input, out)


def _describe_gelu(input: Tensor, out: Tensor | None) -> Request:
    return _request("gelu_and_mul", input, out)


def _describe_gelu_tanh(input: Tensor, out: Tensor | None) -> Request:
    return _request("gelu_tanh_and_mul", input, out)


_ROLES, _FEATURES = ("input", "out"), ("inner_strided", "unaligned", "rows_scattered")
_SCHEMA = "(Tensor input, Tensor(a!) out) -> ()"
SILU_AND_MUL = Op(
    "silu_and_mul", "activation", reference.silu_and_mul, _describe_silu,
    growing=("rows",), dims=("half",), roles=_ROLES, features=_FEATURES, schema=_SCHEMA,
)  # fmt: skip
GELU_AND_MUL = Op(
    "gelu_and_mul", "activation", reference.gelu_and_mul, _describe_gelu,
    growing=("rows",), dims=("half",), roles=_ROLES, features=_FEATURES, schema=_SCHEMA,
)  # fmt: skip
GELU_TANH_AND_MUL = Op(
    "gelu_tanh_and_mul", "activation", reference.gelu_tanh_and_mul, _describe_gelu_tanh,
    growing=("rows",), dims=("half",), roles=_ROLES, features=_FEATURES, schema=_SCHEMA,
)  # fmt: skip


def silu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    """Apply SiLU to the first half of the last dim and multiply by the second half (SwiGLU).

    In torch, with gate, up = input.float().chunk(2, -1): `torch.nn.functional.silu(gate) * up`, rounded once to the
    dtype of the result. float64 inputs are computed in float64.

    Args:
        input: [..., 2 * half], any number of leading dims, any strides, any half (odd ones too).
        out: None, or where to write the result: [..., half], a floating dtype of 16 bits or more, any strides.
        enable_pdl: accepted for compatibility; it changes no result.

    Returns:
        `out`, or a new tensor [..., half] of input's dtype.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020); FlashInfer's `silu_and_mul`.

    >>> import torch
    >>> silu_and_mul(torch.tensor([[0.0, 1.0, 5.0, 2.0]]))
    tensor([[0.0000, 1.4621]])
    """
    return _gated(SILU_AND_MUL, input, out)


def gelu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    """Apply GELU, in its exact erf form, to the first half of the last dim and multiply by the second half.

    In torch, with gate, up = input.float().chunk(2, -1): `torch.nn.functional.gelu(gate) * up`. Args, Returns and
    Raises are those of `silu_and_mul`.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016); FlashInfer's `gelu_and_mul`.

    >>> import torch
    >>> gelu_and_mul(torch.tensor([[0.0, 1.0, 5.0, 2.0]]))
    tensor([[0.0000, 1.6827]])
    """
    return _gated(GELU_AND_MUL, input, out)


def gelu_tanh_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    """Apply GELU, in its tanh form, to the first half of the last dim and multiply by the second half.

    In torch, with gate, up = input.float().chunk(2, -1): `torch.nn.functional.gelu(gate, approximate="tanh") * up`,
    that is 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x³))). Args, Returns and Raises are those of `silu_and_mul`.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016); FlashInfer's `gelu_tanh_and_mul`.

    >>> import torch
    >>> gelu_tanh_and_mul(torch.tensor([[0.0, 1.0, 5.0, 2.0]]))
    tensor([[0.0000, 1.6824]])
    """
    return _gated(GELU_TANH_AND_MUL, input, out)


def _gated(op: Op, input: Tensor, out: Tensor | None) -> Tensor:
    shape = input.shape
    if not shape:
        raise shape_error(op.name, "input", input, "[..., 2 * half]", "give it a last dim of two halves")
    if is_compiling():
        return _compiled(op, input, out)
    width, address, written = shape[-1], input.data_ptr(), None
    if out is not None:
        if out.shape != (*shape[:-1], width // 2):
            raise shape_error(op.name, "out", out, [*shape[:-1], width // 2], "halve input's last dim")
        address |= out.data_ptr()
        written = (out.dtype, out.device, out.stride(), out.requires_grad)
    key = (
        input.dtype, input.device, width if len(shape) <= 2 else shape[1:], input.stride(), written,
        address & 15 == 0, is_grad_enabled() and input.requires_grad,
        op.bucket(input.numel() // (width or 1)), PREFER.get(),
    )  # fmt: skip
    run = op.cache.get(key) or op.pick(key, (input, out))
    return run(input, out)  # type: ignore[no-any-return]


def _compiled(op: Op, input: Tensor, out: Tensor | None) -> Tensor:
    if needs_grad(input, out):
        return op.function(input, out)  # type: ignore[no-any-return]
    if out is None:
        out = input.new_empty((*input.shape[:-1], input.shape[-1] // 2))
    getattr(torch.ops.kernelmux, op.name)(input, out)
    return out


def _eager(op: Op) -> Callable[..., None]:
    def run(input: Tensor, out: Tensor) -> None:
        _gated(op, input, out)

    return run


for _op in (SILU_AND_MUL, GELU_AND_MUL, GELU_TANH_AND_MUL):
    _op.eager = _eager(_op)
