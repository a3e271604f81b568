"""mm_bf16 and bmm_bf16 against float64: dtypes, layouts, odd sizes, empty sums, backend names, errors, gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelmux as km
from kernelmux.dispatch.gemm.dense import layouts

BF16 = torch.bfloat16
FLOATS = (torch.float16, BF16, torch.float32, torch.float64)
EPS = {torch.float16: 2.0**-11, BF16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def rand(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(got: Tensor, a: Tensor, b: Tensor, bias: Tensor | float = 0.0) -> None:
    """Rounded once to its dtype after a sum in float32 (float64)."""
    bias = bias.double() if isinstance(bias, Tensor) else bias
    want = a.double() @ b.double() + bias
    terms = a.double().abs() @ b.double().abs() + abs(bias)
    work = EPS[torch.float64 if a.dtype == torch.float64 else torch.float32]
    bound = want.abs() * EPS[got.dtype] * 1.01 + terms * work * (a.shape[-1] + 2)
    assert bool(((got.double() - want).abs() <= bound).all())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize(("m", "n", "k"), [(2, 3, 4), (65, 320, 576), (1, 105, 107), (7, 1, 1856), (3, 5, 1)])
def test_mm(dtype: torch.dtype, out_dtype: torch.dtype, m: int, n: int, k: int) -> None:
    a, weight, bias = rand(m, k, dtype=dtype), rand(n, k, dtype=dtype, seed=1), rand(n, dtype=dtype, seed=2)
    got = km.mm_bf16(a, weight.T, out_dtype=out_dtype)
    assert got.shape == (m, n) and got.dtype == out_dtype
    close(got, a, weight.T)
    close(km.mm_bf16(a, weight.T.contiguous(), bias, out_dtype=out_dtype), a, weight.T, bias)


def test_accumulates_in_float32() -> None:
    a = torch.ones(2, 4096, dtype=BF16)
    assert km.mm_bf16(a, torch.ones(4096, 3, dtype=BF16), out_dtype=torch.float32).unique().tolist() == [4096.0]
    assert km.mm_bf16(a, torch.full((4096, 3), 2.0**-6, dtype=BF16)).unique().tolist() == [64.0]


def test_layouts_and_out() -> None:
    a, b = rand(5, 48), rand(48, 24, seed=1)
    want = km.mm_bf16(a, b)
    room_a, room_b, room = (
        torch.zeros(96, 11).bfloat16(),
        torch.zeros(97, 48).bfloat16(),
        torch.zeros(10, 48).bfloat16(),
    )
    room_a[::2, 1::2] = a.T
    room_b[1::2, ::2] = b
    for left in (a, a.T.contiguous().T, room_a[::2, 1::2].T):
        for right in (b, b.T.contiguous().T, room_b[1::2, ::2]):
            assert torch.equal(km.mm_bf16(left, right), want)
            room.fill_(7)
            out = room[::2, 1::2]
            assert km.mm_bf16(left, right, out=out) is out
            assert torch.equal(out, want) and bool((room[1::2] == 7).all()) and bool((room[:, ::2] == 7).all())
    assert km.mm_bf16(a, b, out=torch.empty(5, 24, dtype=torch.float32), out_dtype=torch.float32).dtype == torch.float32


def test_layout_facts_do_not_depend_on_rows() -> None:
    a, weight = rand(5, 48), rand(24, 48)
    assert layouts(a, weight.T, None) == layouts(a[:1], weight.T, None) == set()
    assert layouts(a, weight.T.contiguous(), None) == {"b_row_major"}
    assert layouts(a.T.contiguous().T, weight.T, None) == {"a_column_major", "unaligned"}
    assert layouts(a[:, ::2], weight[:, ::2].T, None) == {"a_strided", "b_strided", "unaligned"}
    assert layouts(a[:1, 1:41], weight[:, 1:41].T, None) == {"unaligned"}
    for rows in (1, 2):
        assert layouts(rand(rows, 107), rand(24, 107).T, None) == {"unaligned"}
    assert layouts(a, weight.T, torch.empty(5, 48).bfloat16()[:, ::2]) == {"out_strided", "unaligned"}


@pytest.mark.parametrize("function", ["mm", "bmm"])
def test_empty_sums_and_results(function: str) -> None:
    lead = () if function == "mm" else (2,)
    call = km.mm_bf16 if function == "mm" else km.bmm_bf16
    for m, n, k in ((0, 4, 3), (3, 0, 4), (0, 0, 0)):
        assert call(rand(*lead, m, k), rand(*lead, k, n)).shape == (*lead, m, n)
    assert not call(rand(*lead, 3, 0), rand(*lead, 0, 4)).any()
    out = torch.full((*lead, 3, 4), 5.0).bfloat16()
    assert not call(rand(*lead, 3, 0), rand(*lead, 0, 4), out=out).any() and not out.any()
    if function == "mm":
        bias = rand(4)
        assert torch.equal(km.mm_bf16(rand(3, 0), rand(0, 4), bias), bias.expand(3, 4))
    else:
        assert km.bmm_bf16(rand(0, 3, 4), rand(0, 4, 5)).shape == (0, 3, 5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_bmm(dtype: torch.dtype) -> None:
    A, weight = rand(3, 48, 130, dtype=dtype), rand(3, 80, 130, dtype=dtype, seed=1)
    B = weight.transpose(1, 2)
    for out_dtype in FLOATS:
        close(km.bmm_bf16(A, B, out_dtype=out_dtype), A, B)
    room = torch.zeros(3, 96, 80, dtype=dtype)
    out = room[:, ::2]
    assert km.bmm_bf16(A, B.contiguous(), out=out, out_dtype=dtype) is out
    close(out, A, B)
    assert not room[:, 1::2].any()
    shared = A[:1].expand(3, 48, 130)  # one matrix for the whole batch
    close(km.bmm_bf16(shared, B, out_dtype=dtype), shared, B)


def test_our_backend_names_bind() -> None:
    a, b = rand(2, 8), rand(8, 4)
    assert torch.equal(km.mm_bf16(a, b, backend="reference"), km.mm_bf16(a, b))
    with pytest.raises(km.SettingError, match="referense"):
        km.mm_bf16(a, b, backend="referense")
    with pytest.raises(km.NoKernelError, match="argument backend asks for it by name"):
        km.mm_bf16(a, b, backend="cudnn")
    with pytest.raises(km.SettingError, match="tinygemm"):
        km.mm_bf16(a, b, backend="tinygemm")
    with pytest.raises(km.SettingError, match="referense"):
        km.bmm_bf16(a[None], b[None], backend="referense")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda a, b: km.mm_bf16(a[0], b), ValueError, "mm_bf16: a has shape [8], it must be [m, k]"),
        (lambda a, b: km.mm_bf16(a, b.T), ValueError, "mm_bf16: a has k = 8, b k = 4; make them equal, b is [k, n]"),
        (lambda a, b: km.mm_bf16(a, b.float()), TypeError, "mm_bf16: a and b are bfloat16 and float32"),
        (lambda a, b: km.mm_bf16(a.int(), b.int()), TypeError, "mm_bf16: a is int32, it must be float16"),
        (lambda a, b: km.mm_bf16(a, b, a[0]), ValueError, "mm_bf16: bias has shape [8], it must be [4]"),
        (lambda a, b: km.mm_bf16(a, b, b[0].int()), TypeError, "mm_bf16: bias is int32"),
        (lambda a, b: km.mm_bf16(a, b, out_dtype=torch.int8), TypeError, "mm_bf16: out_dtype is int8"),
        (lambda a, b: km.mm_bf16(a, b, out=a), ValueError, "mm_bf16: out has shape [2, 8], it must be [2, 4]"),
        (lambda a, b: km.mm_bf16(a, b, out=a[:, :4].float()), TypeError, "out is float32, out_dtype bfloat16"),
        (lambda a, b: km.mm_bf16(a, b.to("meta")), ValueError, "mm_bf16: b is on meta"),
        (lambda a, b: km.mm_bf16(a, b, b[0].to("meta")), ValueError, "mm_bf16: bias is on meta"),
        (lambda a, b: km.mm_bf16(a, b, out=a[:1, :4].expand(2, 4)), ValueError, "out has the strides (0, 1)"),
        (lambda a, b: km.bmm_bf16(a, b[None]), ValueError, "bmm_bf16: A has shape [2, 8], it must be [batch, m, k]"),
        (lambda a, b: km.bmm_bf16(a[None], b[None].expand(2, 8, 4)), ValueError, "A has a batch of 1, B of 2"),
        (lambda a, b: km.bmm_bf16(a[None], b.T[None]), ValueError, "bmm_bf16: A has k = 8, B k = 4"),
        (lambda a, b: km.bmm_bf16(a[None], b[None], out=a[None]), ValueError, "bmm_bf16: out has shape [1, 2, 8]"),
    ],
)
def test_errors(call: Callable[[Tensor, Tensor], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call(rand(2, 8), rand(8, 4, seed=1))
    assert text in str(caught.value)
    assert str(caught.value)[0].islower()


def test_gradients() -> None:
    f64 = torch.float64
    a, b, bias = (rand(*s, dtype=f64).requires_grad_() for s in ((3, 4), (4, 5), (5,)))
    assert torch.autograd.gradcheck(lambda a, b, bias: km.mm_bf16(a, b, bias, out_dtype=f64), (a, b, bias))
    A, B = rand(2, 3, 4, dtype=f64).requires_grad_(), rand(2, 4, 5, dtype=f64).requires_grad_()
    assert torch.autograd.gradcheck(lambda A, B: km.bmm_bf16(A, B, out_dtype=f64), (A, B))
    low = rand(3, 4).requires_grad_()
    km.mm_bf16(low, b.detach().bfloat16()).float().sum().backward()
    assert low.grad is not None and low.grad.dtype == BF16


def test_compiled() -> None:
    a, b, bias = rand(3, 8), rand(8, 4, seed=1), rand(4, seed=2)

    def everything(a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        out = torch.empty(3, 4, dtype=torch.float32)
        km.mm_bf16(a, b, out=out, out_dtype=torch.float32)
        batched = km.bmm_bf16(a[None], b[None], backend="reference")
        return km.mm_bf16(a, b, bias), out, batched, km.bmm_bf16(a[None], b[None], out_dtype=torch.float16)

    run = torch.compile(everything, backend="aot_eager", fullgraph=True)
    for got, want in zip(run(a, b, bias), everything(a, b, bias), strict=True):
        assert torch.equal(got, want)
    a.requires_grad_()
    torch.compile(lambda a: km.mm_bf16(a, b).float().sum(), backend="aot_eager", fullgraph=True)(a).backward()
    torch.testing.assert_close(a.grad, b.float().sum(-1).bfloat16().expand(3, 8))
