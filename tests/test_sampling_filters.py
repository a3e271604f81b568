"""softmax, the renormalising filters and the logit mask, against plain Python floats."""

import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import kernelmux
from kernelmux.dispatch.sampling import (
    reference,
    softmax,
    top_k_mask_logits,
    top_k_renorm_prob,
    top_k_renorm_probs,
    top_p_renorm_prob,
    top_p_renorm_probs,
)

naive = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("naive_sampling.py"))))
INF = math.inf
# rows with ties at every boundary (multiples of 1/16 sum exactly), a peak, all equal, one-hot, and zeros inside
TIES = torch.tensor(
    [
        [4, 2, 2, 2, 2, 1, 1, 1, 1, 0],
        [7, 3, 3, 1, 1, 1, 0, 0, 0, 0],
        [16, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 8, 0, 0, 8, 0, 0, 0, 0],
        [1.6] * 10,
    ]
) / 16  # fmt: skip


def random_probs(rows: int = 6, vocab: int = 37) -> Tensor:
    return torch.softmax(2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)), -1)


def strided(x: Tensor, fill: float = math.nan) -> Tensor:
    """The same values in every second row and column of a larger tensor that holds `fill` elsewhere."""
    wide = torch.full((2 * x.shape[0], 2 * x.shape[1]), fill, dtype=x.dtype)
    wide[::2, ::2] = x
    return wide[::2, ::2]


@pytest.mark.parametrize("temperature", [None, 1.0, 0.7, 2, 1e-3, torch.tensor([0.5, 2.0, 1e-3, 1.0])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_softmax(temperature: float | Tensor | None, dtype: torch.dtype) -> None:
    logits = (5 * torch.randn(4, 33, generator=torch.Generator().manual_seed(0))).to(dtype)
    logits[1, 3:30] = -INF
    t = torch.as_tensor(1.0 if temperature is None else temperature).double().expand(4)[:, None]
    got = softmax(strided(logits), temperature)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), torch.softmax(logits.double() / t, -1), rtol=3e-5, atol=1e-9)
    torch.testing.assert_close(got.sum(-1), torch.ones(4))


def test_softmax_of_a_tiny_temperature_sums_to_one() -> None:
    logits = torch.full((2, 1000), -20.0)
    logits[0, 7] = 42.0
    got = softmax(logits, 1e-3)
    assert got[0, 7] == 1
    assert (got.sum(-1) - 1).abs().max() < 1e-5
    assert softmax(torch.tensor([[1e30, -1e30, 1e30]]), 1e-30).tolist() == [[0.5, 0, 0.5]]


def test_softmax_of_temperature_zero_is_uniform() -> None:
    logits = torch.tensor([[5.0, -INF, 1.0, 2.0], [5.0, -INF, 1.0, 2.0]])
    third = 1 / 3
    expected = torch.tensor([[third, 0, third, third]]).expand(2, 4)
    torch.testing.assert_close(softmax(logits, 0.0), expected)
    got = softmax(logits, torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(got[0], expected[0])
    torch.testing.assert_close(got[1], torch.softmax(logits[1], -1))


def test_softmax_without_anything_to_choose() -> None:
    logits = torch.tensor([[-INF, -INF], [0.0, 0.0], [math.nan, 1.0]])
    for temperature in (None, 0.5, torch.tensor([0.0, 1.0, 2.0])):
        got = softmax(logits, temperature)
        assert got[:2].tolist() == [[0, 0], [0.5, 0.5]]
        assert got[2].isnan().all()


def test_softmax_is_differentiable() -> None:
    logits = torch.tensor([[1.0, 2.0, -INF], [-INF, -INF, -INF], [0.0, 1.0, 2.0]], requires_grad=True)
    (softmax(logits, torch.tensor([0.5, 1.0, 0.0])) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    p = torch.softmax(torch.tensor([2.0, 4.0]), -1)
    assert torch.allclose(logits.grad[0, 0], 2 * p[0] * (1 - (p[0] + 2 * p[1])))


def test_softmax_arguments() -> None:
    logits = torch.zeros(2, 3)
    with pytest.raises(TypeError, match="temperature is True, it must be a number or a tensor"):
        softmax(logits, True)
    with pytest.raises(TypeError, match="temperature is int64, it must be a floating dtype"):
        softmax(logits, torch.ones(2, dtype=torch.int64))
    with pytest.raises(TypeError, match="temperature is 'hot', it must be a number"):
        softmax(logits, "hot")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"temperature has shape \[3\], it must be \[2\]; give one value per row"):
        softmax(logits, torch.ones(3))
    with pytest.raises(ValueError, match="temperature has shape"):
        softmax(logits, torch.ones(2, 1))
    with pytest.raises(ValueError, match="temperature is on meta, the distributions are on cpu; move it"):
        softmax(logits, torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match=r"temperature is -1\.0, at least 0"):
        softmax(logits, -1)
    with pytest.raises(ValueError, match=r"logits has shape \[3\], it must be \[rows, vocab\]"):
        softmax(logits[0])
    with pytest.raises(TypeError, match="logits is int64, it must be float16"):
        softmax(logits.long())


@pytest.mark.parametrize("top_p", [0.0, -1.0, 1e-6, 0.25, 0.4375, 0.5, 0.625, 0.9, 0.99, 1.0, 1.5])
@pytest.mark.parametrize("make", [lambda: TIES, random_probs], ids=["ties", "random"])
def test_top_p_renorm(top_p: float, make: object) -> None:
    probs = make()  # type: ignore[operator]
    expected = torch.tensor([naive.filtered(row, top_p=naive.single(top_p)) for row in probs.tolist()])
    for argument in (top_p, torch.full((len(probs),), top_p, dtype=torch.float64)):
        got = top_p_renorm_probs(strided(probs), argument)
        assert got.dtype == torch.float32
        assert torch.equal(got > 0, expected > 0)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("top_k", [-1, 0, 1, 2, 3, 5, 9, 10, 36, 37, 50, 2**30])
@pytest.mark.parametrize("make", [lambda: TIES, random_probs], ids=["ties", "random"])
def test_top_k_renorm_and_mask(top_k: int, make: object) -> None:
    probs = make()  # type: ignore[operator]
    expected = torch.tensor([naive.filtered(row, top_k=top_k) for row in probs.tolist()])
    kept = torch.zeros_like(probs, dtype=torch.bool)
    for i, row in enumerate(probs.tolist()):
        kept[i, list(naive.top_k_set(row, top_k))] = True
    for dtype in (torch.int32, torch.int64, None):
        argument = top_k if dtype is None else torch.full((len(probs),), top_k, dtype=dtype)
        got = top_k_renorm_probs(strided(probs), argument)
        assert torch.equal(got > 0, expected > 0)
        torch.testing.assert_close(got, expected)
        masked = top_k_mask_logits(strided(probs), argument)
        assert torch.equal(masked, probs.masked_fill(~kept, -INF))


def test_each_row_has_its_own_parameter() -> None:
    probs = random_probs()
    top_k = torch.tensor([1, 0, 3, 40, -1, 2])
    got = top_k_renorm_probs(probs, top_k)
    assert torch.equal(got, torch.cat([top_k_renorm_probs(probs[i : i + 1], int(k)) for i, k in enumerate(top_k)]))
    top_p = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0, 2.0])
    got = top_p_renorm_probs(probs, top_p)
    assert torch.equal(got, torch.cat([top_p_renorm_probs(probs[i : i + 1], float(p)) for i, p in enumerate(top_p)]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    probs = random_probs().to(dtype)
    assert top_k_renorm_probs(probs, 4).dtype == dtype
    assert top_k_mask_logits(probs, 4).dtype == dtype
    assert top_p_renorm_probs(probs, 0.5).dtype == torch.float32
    assert (top_k_mask_logits(probs, 4) > -INF).sum(-1).min() >= 4
    exact = torch.tensor([naive.filtered(row, top_k=4) for row in probs.double().tolist()]).to(dtype)
    torch.testing.assert_close(top_k_renorm_probs(probs, 4), exact)


def test_rows_need_not_sum_to_one() -> None:
    probs = torch.tensor([[0.1, 0.3, 0.1], [1.0, 2.0, 3.0]])
    torch.testing.assert_close(top_p_renorm_probs(probs, 0.9), torch.tensor([[0.2, 0.6, 0.2], [0.0, 0.0, 1.0]]))


def test_zero_and_nan_rows() -> None:
    probs = torch.tensor([[0.0, 0.0, 0.0], [0.2, math.nan, 0.8], [0.5, 0.5, 0.0]])
    for got in (top_p_renorm_probs(probs, 0.9), top_k_renorm_probs(probs, 2)):
        assert got[0].tolist() == [0, 0, 0]
        assert got[1].isnan().all()
        assert got[2].tolist() == [0.5, 0.5, 0]
    masked = top_k_mask_logits(torch.tensor([[1.0, math.nan, 3.0, 2.0], [-INF, -INF, 1.0, 0.0]]), 2)
    assert masked[0, 1].isnan()
    assert masked[0, [0, 2, 3]].tolist() == [-INF, 3, -INF]
    assert masked[1].tolist() == [-INF, -INF, 1, 0]


def test_inputs_are_left_alone_and_outputs_are_new() -> None:
    probs = random_probs()
    before = probs.clone()
    results = [
        top_k_mask_logits(probs, 0),
        top_k_renorm_probs(probs, 0),
        top_p_renorm_probs(probs, 1.0),
        softmax(probs),
    ]
    for result in results:
        result.zero_()
    assert torch.equal(probs, before)


def test_filters_are_differentiable() -> None:
    probs = random_probs().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda p: reference.top_k_mask_logits(p, 5).nan_to_num(neginf=0), (probs,))
    total = top_k_renorm_probs(probs, 5)[:, ::2].sum() + top_p_renorm_probs(probs, 0.5)[:, ::2].double().sum()
    total.backward()
    assert probs.grad is not None
    assert probs.grad.isfinite().all()
    assert probs.grad.abs().sum() > 0


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows: int) -> None:
    probs = random_probs(rows)
    empty = torch.empty(rows)
    assert softmax(probs, 0.5).shape == softmax(probs, empty.fill_(0.5)).shape == (rows, 37)
    assert top_p_renorm_probs(probs, 0.5).shape == top_k_renorm_probs(probs, 3).shape == (rows, 37)
    assert top_k_mask_logits(probs, torch.full((rows,), 3)).shape == (rows, 37)


def test_reference_writes_into_out() -> None:
    probs = random_probs()
    out = torch.empty(37, 6).T
    for function, value in (
        (reference.softmax, 0.5),
        (reference.top_p_renorm_probs, 0.5),
        (reference.top_k_renorm_probs, 3),
        (reference.top_k_mask_logits, 3),
    ):
        assert function(probs, value, out) is out
        assert torch.equal(out, function(probs, value))


def test_wrong_parameters() -> None:
    probs = random_probs()
    with pytest.raises(TypeError, match=r"top_k is 2\.5, it must be an int"):
        top_k_renorm_probs(probs, 2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="top_k is float32, it must be int32 or int64"):
        top_k_mask_logits(probs, torch.ones(6))
    with pytest.raises(ValueError, match=r"top_k has shape \[5\], it must be \[6\]"):
        top_k_mask_logits(probs, torch.ones(5, dtype=torch.int32))
    with pytest.raises(TypeError, match="top_p is int64, it must be a floating dtype"):
        top_p_renorm_probs(probs, torch.ones(6, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"top_p is '0\.5', it must be a number"):
        top_p_renorm_probs(probs, "0.5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="vocab at least 1"):
        top_p_renorm_probs(torch.empty(2, 0), 0.5)


def test_a_huge_int64_top_k_is_off() -> None:
    probs = random_probs(2)
    top_k = torch.tensor([2**40, 2**33 + 1])
    torch.testing.assert_close(top_k_renorm_probs(probs, top_k), probs)


def test_old_names() -> None:
    assert top_k_renorm_prob is top_k_renorm_probs
    assert top_p_renorm_prob is top_p_renorm_probs
    assert not hasattr(kernelmux, "top_k_renorm_prob")


def test_a_parameter_reaches_the_kernel_again_from_the_cache() -> None:
    """Equal keys, other values: the second call must not reuse the first one's parameter."""
    probs = random_probs()
    for value in (0.3, 0.6, 0.9):
        expected = torch.tensor([naive.filtered(row, top_p=naive.single(value)) for row in probs.tolist()])
        torch.testing.assert_close(top_p_renorm_probs(probs, value), expected)
