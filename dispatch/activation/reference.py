"""Gated activations in plain torch: float64 for float64 inputs, else float32, rounded once at the end."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu


def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(first half of the last dim) * second half."""
    return _gated(silu, input, out)


def gelu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """gelu, in its erf form, of the first half of the last dim, * second half."""
    return _gated(gelu, input, out)


def gelu_tanh_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """gelu, in its tanh form, of the first half of the last dim, * second half."""
    return _gated(lambda x: gelu(x, approximate="tanh"), input, out)


def _gated(act: Callable[[Tensor], Tensor], input: Tensor, out: Tensor | None) -> Tensor:
    work = torch.float64 if input.dtype == torch.float64 else torch.float32
    gate, up = input.to(work).chunk(2, -1) if input.shape[-1] else (input.to(work), input.to(work))
    result = act(gate) * up
    return result.to(input.dtype) if out is None else out.copy_(result)
