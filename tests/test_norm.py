"""The norms against float64 formulas: dtypes, strides, odd sizes, in-place forms, 8-bit outputs, errors, gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelmux as km

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6, torch.float64: 1e-14}


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float64, by its definition, not by the reference's operations."""
    x = x.double()
    return x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5 * weight.double()


def close(got: Tensor, want: Tensor, dtype: torch.dtype | None = None) -> None:
    tolerance = TOLERANCE[dtype or got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def to_fp8(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearest value of a dtype by search among all its finite values, ties to the even code."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    codes = codes[codes.isfinite()]
    ordered = codes.unique()
    at = torch.searchsorted(ordered, values.double()).clamp(1, len(ordered) - 1)
    low, high = ordered[at - 1], ordered[at]
    down, up = values.double() - low, high - values.double()
    even = low.float().to(dtype).view(torch.uint8) % 2 == 0
    return torch.where((down < up) | ((down == up) & even), low, high)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "hidden"), [(2, 64), (3, 3584), (4, 3420), (2, 24), (5, 1234), (2, 1)])
def test_rmsnorm(dtype: torch.dtype, rows: int, hidden: int) -> None:
    x, w = rand(rows, hidden, dtype=dtype), rand(hidden, dtype=dtype, seed=1)
    close(km.rmsnorm(x, w), rms(x, w, 1e-6))
    close(km.gemma_rmsnorm(x, w, 0.3), rms(x, 1 + w.double(), 0.3))


@pytest.mark.parametrize("function", [km.rmsnorm, km.gemma_rmsnorm, km.fused_rmsnorm_silu])
def test_views_per_head_and_out(function: Callable[..., Tensor]) -> None:
    qkv = rand(5, 8, 6, 16, dtype=torch.bfloat16)
    w = rand(32, dtype=torch.bfloat16, seed=1)[::2]
    x = qkv[::2, 1:6, 3]  # [3, 5, 16], rows, heads of their own strides
    want = function(x.contiguous(), w.contiguous())
    assert want.shape == (3, 5, 16)
    room = torch.full((3, 5, 32), 7.0, dtype=torch.bfloat16)
    out = room[..., ::2]
    assert function(x, w, out=out) is out
    assert torch.equal(out, want) and torch.equal(function(x, w), want)
    assert bool((room[..., 1::2] == 7).all())
    wide = function(x, w, out=torch.empty(3, 5, 16))
    assert wide.dtype == torch.float32 and torch.equal(wide.bfloat16(), want)


def test_rows_do_not_depend_on_their_number() -> None:
    x, w = rand(9, 96), rand(96, seed=1)
    assert torch.equal(km.rmsnorm(x, w)[3:4], km.rmsnorm(x[3:4], w))


def test_huge_values_do_not_overflow_in_float16() -> None:
    x, w = torch.full((2, 512), 6e4, dtype=torch.float16), torch.ones(512, dtype=torch.float16)
    close(km.rmsnorm(x, w), torch.ones(2, 512))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("gemma", [False, True])
def test_fused_add(dtype: torch.dtype, gemma: bool) -> None:
    x, residual, w = rand(4, 96, dtype=dtype), rand(4, 96, dtype=dtype, seed=1), rand(96, dtype=dtype, seed=2)
    total = x.double() + residual.double()
    function = km.gemma_fused_add_rmsnorm if gemma else km.fused_add_rmsnorm
    assert function(x, residual, w, 0.1) is None
    assert torch.equal(residual, total.to(dtype) if dtype == torch.float64 else total.float().to(dtype))
    close(x, rms(total, w.double() + gemma, 0.1))


@pytest.mark.parametrize("function", [km.fused_add_rmsnorm, km.gemma_fused_add_rmsnorm])
def test_fused_add_norms_the_sum_before_it_is_rounded(function: Callable[..., None]) -> None:
    x = torch.full((2, 8), 2.0**-9, dtype=torch.bfloat16)  # lost when 1 + x is rounded to bfloat16
    x[:, 0] = 1
    residual = torch.ones(2, 8, dtype=torch.bfloat16)
    residual[:, 0] = 2.0**-9
    residual[:, 1:3] = 0
    w = torch.arange(8.0).bfloat16()
    want = rms(x.double() + residual.double(), w.double() + (function is km.gemma_fused_add_rmsnorm), 1e-6)
    function(x, residual, w)
    assert torch.equal(residual[:, 0], torch.ones(2).bfloat16())
    assert torch.equal(x, want.float().bfloat16())


def test_fused_add_on_views_and_mixed_dtypes() -> None:
    room = torch.zeros(6, 200, dtype=torch.float16)
    x, residual = room[::2, 10:98], room[1::2, 7:183:2]
    x.copy_(rand(3, 88)), residual.copy_(rand(3, 88, seed=1))
    w, total = rand(88, seed=2), x.double() + residual.double()
    km.fused_add_rmsnorm(x, residual, w)
    close(x, rms(total, w, 1e-6))
    close(residual, total)
    assert not room[:, :7].any() and not room[:, 183:].any()
    y, wide = rand(2, 88, dtype=torch.bfloat16), rand(2, 88, seed=3)
    total = y.double() + wide.double()
    km.fused_add_rmsnorm(y, wide, w)
    close(wide, total)
    close(y, rms(total, w, 1e-6))


@pytest.mark.parametrize("out_dtype", FP8)
@pytest.mark.parametrize("scale", [0.02, "float32", "bfloat16", 1e-4, 3])
def test_quantised(out_dtype: torch.dtype, scale: Any) -> None:
    x, residual = rand(3, 160, dtype=torch.bfloat16), rand(3, 160, dtype=torch.bfloat16, seed=1)
    w, beta = rand(160, dtype=torch.bfloat16, seed=2), rand(160, seed=3)
    if isinstance(scale, str):
        scale = torch.tensor([0.02] if scale == "float32" else 0.02, dtype=getattr(torch, scale))
    factor, limit = float(scale), torch.finfo(out_dtype).max
    total = x.double() + residual.double()
    mean = x.double().mean(-1, keepdim=True)
    centred = rms(x.double() - mean, w, 1e-6) + beta.double()
    room = torch.zeros(3, 320, dtype=torch.uint8).view(out_dtype)
    normed_sum = rms(total, w, 1e-6)
    for call, y in (
        (lambda out, sums: km.rmsnorm_quant(out, x, w, scale), rms(x, w, 1e-6)),
        (lambda out, sums: km.fused_add_rmsnorm_quant(out, x, sums, w, scale), normed_sum),
        (lambda out, sums: km.layernorm_quant(out, x, w, beta, scale), centred),
    ):
        for out in (torch.empty(3, 160, dtype=torch.float32).to(out_dtype), room[:, ::2]):
            sums = residual.clone()
            assert call(out, sums) is None
            want = to_fp8((y / factor).clamp(-limit, limit), out_dtype)
            near = (out.double() - want).abs() <= want.abs() / (4 if out_dtype == FP8[1] else 8) + 1e-4
            assert bool(near.all())
            assert (out.double() == want).double().mean() > 0.995  # float32 may differ at a tie
            assert torch.equal(sums, total.float().bfloat16() if y is normed_sum else residual)
    assert bool((out.float().abs() <= limit).all())


def test_quantised_keeps_nan_and_the_input() -> None:
    x = rand(2, 8)
    x[1, 3] = float("nan")
    before, out = x.clone(), torch.empty(2, 8).to(FP8[0])
    km.fused_add_rmsnorm_quant(out, x, torch.zeros(2, 8), torch.ones(8), 1.0)
    assert torch.equal(x[0], before[0]) and bool(out[1].float().isnan().all()) and not out[0].float().isnan().any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("hidden", [64, 3420, 7])
def test_layernorm(dtype: torch.dtype, hidden: int) -> None:
    x = (rand(3, hidden) + 5).to(dtype)
    gamma, beta = rand(hidden, seed=1), rand(hidden, seed=2)
    mean = x.double().sum(-1, keepdim=True) / hidden
    variance = ((x.double() - mean) ** 2).sum(-1, keepdim=True) / hidden
    want = (x.double() - mean) / (variance + 0.2) ** 0.5 * gamma.double() + beta.double()
    got = km.layernorm(x, gamma, beta, 0.2)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=max(TOLERANCE[dtype], 1e-14) * 4)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rmsnorm_silu(dtype: torch.dtype) -> None:
    x, w = rand(3, 384, dtype=dtype), rand(384, dtype=dtype, seed=1)
    y = rms(x, w, 0.01)
    close(km.fused_rmsnorm_silu(x, w, 0.01), y / (1 + (-y).exp()))
    out = torch.empty(3, 384).to(FP8[0])
    km.fused_rmsnorm_silu(x, 1000 * w, out=out)
    assert bool((out.float().abs() <= 448).all()) and not out.float().isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_block_quant(dtype: torch.dtype) -> None:
    x, residual = rand(5, 384, dtype=dtype), rand(5, 384, dtype=dtype, seed=1)
    x[2], residual[2] = 0, 0
    w, total, before = rand(384, dtype=dtype, seed=2), x.double() + residual.double(), x.clone()
    out, normed = torch.empty(5, 384).to(FP8[0]), torch.empty_like(x)
    scale = torch.full((3, 8), -1.0)
    km.fused_add_rmsnorm_fp8_block_quant(out, scale, normed, x, residual, w, 1e-5)
    close(residual, total)
    close(normed, rms(total, w, 1e-5))
    groups = normed.double().view(5, 3, 128)
    want = groups.abs().amax(-1).clamp(min=1e-4) / 448
    torch.testing.assert_close(scale[:, :5].T.double(), want, rtol=1e-6, atol=0)
    assert bool((scale[:, 5:] == -1).all()) and torch.equal(x, before)
    values = to_fp8(groups / scale[:, :5].T.double()[..., None], FP8[0]).view(5, 384)
    assert (out.double() == values).double().mean() > 0.995
    torch.testing.assert_close(out.double(), values, rtol=1 / 8, atol=1e-2)


def test_empty_inputs() -> None:
    w, none = torch.ones(128), torch.empty(0, 128)
    for function in (km.rmsnorm, km.gemma_rmsnorm, km.fused_rmsnorm_silu):
        assert function(none, w).shape == (0, 128)
    assert km.rmsnorm(torch.empty(0, 3, 128), w).shape == (0, 3, 128)
    assert km.rmsnorm(torch.empty(2, 0), torch.empty(0)).shape == (2, 0)
    assert km.layernorm(none, w, w).shape == (0, 128)
    km.fused_add_rmsnorm(none, none.clone(), w)
    km.gemma_fused_add_rmsnorm(none, none.clone(), w)
    out = none.to(FP8[0])
    km.rmsnorm_quant(out, none, w, 1.0)
    km.fused_add_rmsnorm_quant(out, none, none.clone(), w, 1.0)
    km.layernorm_quant(out, none, w, w, 1.0)
    km.fused_add_rmsnorm_fp8_block_quant(out, torch.empty(1, 0), none.clone(), none, none.clone(), w)


def test_each_argument_changes_the_answer() -> None:
    x, residual, w = rand(2, 128), rand(2, 128, seed=1), rand(128, seed=2)
    for function in (km.rmsnorm, km.gemma_rmsnorm, km.fused_rmsnorm_silu):
        base = function(x, w)
        assert not torch.equal(base, function(x, w, 0.5)) and not torch.equal(base, function(x, w + 1))
    assert not torch.equal(km.layernorm(x, w, w), km.layernorm(x, w, w, 0.5))
    assert not torch.equal(km.layernorm(x, w, w), km.layernorm(x, w, w + 1))

    def quantised(**changes: Any) -> Tensor:
        out = torch.empty(2, 128).to(FP8[0])
        given = {"out": out, "input": x, "residual": residual.clone(), "weight": w, "scale": 0.1, "eps": 1e-6}
        km.fused_add_rmsnorm_quant(**{**given, **changes})
        return out.float()

    for change in ({"eps": 0.5}, {"scale": 0.2}, {"weight": w + 1}, {"residual": x.clone()}, {"input": x + 1}):
        assert not torch.equal(quantised(), quantised(**change))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x, w: km.rmsnorm(x[0], w), ValueError, "rmsnorm: input has shape [8], it must be [rows, hidden]"),
        (lambda x, w: km.rmsnorm(x, w[:7]), ValueError, "rmsnorm: weight has shape [7], it must be [8]"),
        (lambda x, w: km.rmsnorm(x.int(), w), TypeError, "rmsnorm: input is int32, it must be float16"),
        (lambda x, w: km.rmsnorm(x, w.long()), TypeError, "rmsnorm: weight is int64"),
        (lambda x, w: km.rmsnorm(x, w, out=x[:1]), ValueError, "rmsnorm: out has shape [1, 8], it must be [2, 8]"),
        (lambda x, w: km.rmsnorm(x, w, out=x.int()), TypeError, "rmsnorm: out is int32"),
        (lambda x, w: km.rmsnorm(x, w.to("meta")), ValueError, "rmsnorm: weight is on meta"),
        (lambda x, w: km.gemma_rmsnorm(x, w[None]), ValueError, "gemma_rmsnorm: weight has shape [1, 8]"),
        (lambda x, w: km.fused_add_rmsnorm(x, x[:1], w), ValueError, "fused_add_rmsnorm: residual has shape [1, 8]"),
        (lambda x, w: km.fused_add_rmsnorm(x, x.int(), w), TypeError, "fused_add_rmsnorm: residual is int32"),
        (lambda x, w: km.fused_add_rmsnorm(x, x[:1].expand(2, 8), w), ValueError, "residual has the strides (0, 1)"),
        (lambda x, w: km.fused_add_rmsnorm(x[:1].expand(2, 8), x, w), ValueError, "input has the strides (0, 1)"),
        (
            lambda x, w: km.rmsnorm_quant(x.to(torch.int8), x, w, 1.0),
            TypeError,
            "out is int8, it must be float8",
        ),
        (
            lambda x, w: km.rmsnorm_quant(x.to(FP8[0]), x, w, w),
            ValueError,
            "scale has shape [8], it must be one",
        ),
        (
            lambda x, w: km.rmsnorm_quant(x.to(FP8[0]), x, w, torch.ones(1).int()),
            TypeError,
            "rmsnorm_quant: scale is int32, it must be float32",
        ),
        (
            lambda x, w: km.rmsnorm_quant(x.to(FP8[0]), x, w, torch.ones(1, device="meta")),
            ValueError,
            "rmsnorm_quant: scale is on meta",
        ),
        (lambda x, w: km.layernorm(x, w, w[1:]), ValueError, "layernorm: beta has shape [7], it must be [8]"),
        (lambda x, w: km.layernorm(x, w.int(), w), TypeError, "layernorm: gemma is int32"),
        (lambda x, w: km.layernorm_quant(x, x, w, w, 1.0), TypeError, "layernorm_quant: out is float32"),
        (lambda x, w: km.fused_rmsnorm_silu(x, w, block_scale=w), ValueError, "block_scale is given"),
        (
            lambda x, w: km.fused_add_rmsnorm_fp8_block_quant(x.to(FP8[0]), x[:1, :4], x, x, x, w),
            ValueError,
            "hidden is 8, a multiple of 128; pad it to 128",
        ),
        (
            lambda x, w: km.fused_add_rmsnorm_fp8_block_quant(x.to(FP8[0]), x[:1, :1], x, x, x, w),
            ValueError,
            "block_scale has shape [1, 1], it must be [1, 4]",
        ),
    ],
)
def test_errors(call: Callable[[Tensor, Tensor], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call(rand(2, 8), rand(8, seed=1))
    assert text in str(caught.value)
    assert str(caught.value)[0].islower()


@pytest.mark.parametrize("function", [km.rmsnorm, km.gemma_rmsnorm, km.fused_rmsnorm_silu])
def test_gradients(function: Callable[..., Tensor]) -> None:
    x, w = rand(3, 10, dtype=torch.float64).requires_grad_(), rand(10, dtype=torch.float64, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: function(x, w, 0.1), (x, w))
    with torch.no_grad():
        assert not function(x, w).requires_grad


def test_gradients_of_layernorm() -> None:
    x, w = rand(3, 10, dtype=torch.float64).requires_grad_(), rand(10, dtype=torch.float64, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: km.layernorm(x, w, w, 0.1), (x, w))


def test_in_place_forms_refuse_inputs_that_require_grad() -> None:
    x, w, out = rand(2, 128), torch.ones(128, requires_grad=True), torch.empty(2, 128).to(FP8[0])
    calls: list[Callable[[], None]] = [
        lambda: km.fused_add_rmsnorm(x, x.clone(), w),
        lambda: km.gemma_fused_add_rmsnorm(x, x.clone(), w),
        lambda: km.rmsnorm_quant(out, x, w, 1.0),
        lambda: km.fused_add_rmsnorm_quant(out, x, x.clone(), w, 1.0),
        lambda: km.layernorm_quant(out, x, w, w, 1.0),
        lambda: km.fused_add_rmsnorm_fp8_block_quant(out, torch.empty(1, 2), x.clone(), x, x.clone(), w),
    ]
    for call in calls:
        with pytest.raises(km.NoKernelError, match="grad"):
            call()
        with torch.no_grad():
            call()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager", fullgraph=True)  # type: ignore[no-any-return]


def test_compiled() -> None:
    x, residual, w = rand(3, 128), rand(3, 128, seed=1), rand(128, seed=2)

    def everything(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        outs = [torch.empty(x.shape, dtype=FP8[0]) for _ in range(4)]
        results = [km.rmsnorm(x, w), km.gemma_rmsnorm(x, w), km.fused_rmsnorm_silu(x, w), km.layernorm(x, w, w)]
        km.rmsnorm_quant(outs[0], x, w, 0.5)
        km.layernorm_quant(outs[1], x, w, w, torch.ones(1))
        km.fused_add_rmsnorm_quant(outs[2], x, residual, w, 0.5)
        scale, normed = torch.zeros(1, 4), torch.empty_like(x)
        km.fused_add_rmsnorm_fp8_block_quant(outs[3], scale, normed, x, residual, w)
        y = x + 1
        km.fused_add_rmsnorm(y, residual, w)
        km.gemma_fused_add_rmsnorm(y, residual, w)
        return (*results, *[out.float() for out in outs], scale, normed, y)

    left, right = residual.clone(), residual.clone()
    want, got = everything(x, left, w), compiled(everything)(x, right, w)
    assert torch.equal(left, right)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_keeps_gradients() -> None:
    x, w = rand(3, 16).requires_grad_(), rand(16, seed=1)
    km.rmsnorm(x, w).square().sum().backward()
    want, x.grad = x.grad, None
    compiled(lambda x: km.rmsnorm(x, w).square().sum())(x).backward()
    torch.testing.assert_close(x.grad, want)
