"""Gated activations against float64 formulas: dtypes, strides, odd halves, out, errors, gradients."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelmux as km

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5, torch.float64: 1e-13}
FUNCTIONS = (km.silu_and_mul, km.gelu_and_mul, km.gelu_tanh_and_mul)


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def formula(function: Callable[..., Tensor], input: Tensor) -> Tensor:
    half = input.shape[-1] // 2
    x, up = input[..., :half].double(), input[..., half:].double()
    if function is km.silu_and_mul:
        return x / (1 + (-x).exp()) * up
    if function is km.gelu_and_mul:
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2 * up
    return x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3))) / 2 * up


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "shape", [(2, 128), (3, 2 * 3420), (2, 24), (4, 2468), (2, 3, 2 * 7), (2, 3, 4, 6), (2,), (3, 2)]
)
def test_values(function: Callable[..., Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = rand(*shape, dtype=dtype)
    got = function(x)
    assert got.dtype == dtype and got.shape == (*shape[:-1], shape[-1] // 2)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), formula(function, x), rtol=tolerance, atol=tolerance)


def test_the_two_gelus_and_the_halves_differ() -> None:
    x = rand(2, 64)
    assert not torch.equal(km.gelu_and_mul(x), km.gelu_tanh_and_mul(x))
    assert not torch.equal(km.silu_and_mul(x), km.silu_and_mul(x.roll(32, -1)))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_extremes(function: Callable[..., Tensor]) -> None:
    x = torch.tensor([[-6e4, 6e4, 0.0, 2.0, 1.0, 5.0]] * 2, dtype=torch.float16)
    assert function(x).tolist() == [[-0.0, 6e4, 0.0]] * 2


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_views_and_out(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    room = rand(6, 5, 201, dtype=dtype)
    for x in (
        room[::2, 1:4, 1:181],
        room[::3, :, 3:183:2],
        room.transpose(0, 1)[..., 1:25],
        room[:1].expand(2, 5, 201)[..., 1:],
    ):
        want = function(x.contiguous())
        torch.testing.assert_close(function(x), want)
        target = torch.full((*want.shape[:-1], 2 * want.shape[-1]), 9.0, dtype=dtype)
        out = target[..., 1::2]
        assert function(x, out=out) is out
        torch.testing.assert_close(out, want)
        assert bool((target[..., ::2] == 9).all())
    wide = function(room[..., 1:], out=torch.empty(6, 5, 100, dtype=torch.float64))
    torch.testing.assert_close(wide.to(dtype), function(room[..., 1:]))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_empty_inputs(function: Callable[..., Tensor]) -> None:
    assert function(torch.empty(0, 64)).shape == (0, 32)
    assert function(torch.empty(3, 0)).shape == (3, 0)
    assert function(torch.empty(2, 0, 8)).shape == (2, 0, 4)
    out = torch.empty(0, 4)
    assert function(torch.empty(0, 8), out=out) is out


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: km.silu_and_mul(x[:, :5]), ValueError, "silu_and_mul: input's last dim is 5, it must be even"),
        (
            lambda x: km.gelu_and_mul(x[0, 0]),
            ValueError,
            "gelu_and_mul: input has shape [], it must be [..., 2 * half]",
        ),
        (lambda x: km.gelu_tanh_and_mul(x.int()), TypeError, "gelu_tanh_and_mul: input is int32, it must be float16"),
        (lambda x: km.silu_and_mul(x, x), ValueError, "silu_and_mul: out has shape [2, 6], it must be [2, 3]"),
        (lambda x: km.silu_and_mul(x, x[:1, :3]), ValueError, "silu_and_mul: out has shape [1, 3], it must be [2, 3]"),
        (lambda x: km.silu_and_mul(x, x[:, :3].int()), TypeError, "silu_and_mul: out is int32"),
        (lambda x: km.silu_and_mul(x, x[:, :3].to("meta")), ValueError, "silu_and_mul: out is on meta"),
        (lambda x: km.silu_and_mul(x, x[:1, :3].expand(2, 3)), ValueError, "out has the strides (0, 1)"),
    ],
)
def test_errors(call: Callable[[Tensor], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call(rand(2, 6))
    assert text in str(caught.value)
    assert str(caught.value)[0].islower()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients(function: Callable[..., Tensor]) -> None:
    x = rand(3, 10, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(function, (x,))
    with torch.no_grad():
        assert not function(x).requires_grad


@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled(function: Callable[..., Tensor]) -> None:
    x = rand(2, 3, 10)
    run = torch.compile(
        lambda x: function(x) + function(x, out=torch.empty(2, 3, 5)), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(run(x), 2 * function(x))
    x.requires_grad_()
    function(x).sum().backward()
    want, x.grad = x.grad, None
    torch.compile(lambda x: function(x).sum(), backend="aot_eager", fullgraph=True)(x).backward()
    torch.testing.assert_close(x.grad, want)
