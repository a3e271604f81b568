"""Merging attention states: against one softmax over all keys, and against plain loops."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import kernelmux
from kernelmux.capabilities import NoKernelError
from kernelmux.dispatch.attention.merge import (
    MERGE_STATE,
    MERGE_STATES,
    merge_state,
    merge_state_in_place,
    merge_states,
)

INF = math.inf


def states(
    n: int, rows: int = 3, heads: int = 2, dim: int = 5, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(n)
    v = torch.randn(rows, n, heads, dim, generator=g, dtype=torch.float64).to(dtype)
    return v, torch.randn(rows, n, heads, generator=g, dtype=torch.float64) * 4


def plain(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Row by row and head by head."""
    out = torch.zeros(v.shape[0], *v.shape[2:], dtype=torch.float64)
    lse = torch.full((v.shape[0], v.shape[2]), -INF, dtype=torch.float64)
    for r, h in itertools.product(range(v.shape[0]), range(v.shape[2])):
        held = [i for i in range(v.shape[1]) if s[r, i, h] > -INF]
        if held:
            weights = [2.0 ** float(s[r, i, h]) for i in held]
            out[r, h] = sum(w * v[r, i, h].double() for w, i in zip(weights, held, strict=True)) / sum(weights)
            lse[r, h] = math.log2(sum(weights))
    return out, lse


def test_split_and_merge_equals_one_pass() -> None:
    """Softmax over all keys = merged softmax over parts, also when v is narrower than q."""
    g = torch.Generator().manual_seed(0)
    logits, values = torch.randn(4, 3, 70, generator=g).double(), torch.randn(3, 70, 6, generator=g).double()
    parts = [slice(0, 64), slice(64, 64), slice(64, 70)]
    split = [
        ((logits[..., p].softmax(-1)[..., None] * values[:, p]).sum(-2), logits[..., p].logsumexp(-1)) for p in parts
    ]
    v, s = split[0][0], split[0][1] / math.log(2)
    for other, lse in split[1:]:
        v, s = merge_state(v, s, other, lse / math.log(2))
    torch.testing.assert_close(v, (logits.softmax(-1)[..., None] * values).sum(-2))
    torch.testing.assert_close(s, logits.logsumexp(-1) / math.log(2))


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_merge_states(n: int) -> None:
    v, s = states(n)
    if n > 2:
        s[0, 1], s[1] = -INF, -INF
    got = merge_states(v, s)
    torch.testing.assert_close(got, plain(v, s))
    assert n != 0 or ((got[0] == 0).all() and (got[1] == -INF).all())
    assert n != 1 or (torch.equal(got[0], v[:, 0]) and torch.equal(got[1], s[:, 0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    v, s = states(2, dtype=dtype)
    out, lse = merge_state(v[:, 0], s[:, 0].half(), v[:, 1], s[:, 1].bfloat16())
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    want = plain(v, torch.stack((s[:, 0].half().double(), s[:, 1].bfloat16().double()), 1))
    torch.testing.assert_close(out, want[0].to(dtype))
    torch.testing.assert_close(lse, want[1].float())


def test_empty_states_are_the_identity() -> None:
    """Merging with s = -inf is exact, whatever v holds there; two empty states stay empty."""
    v, s = states(2, dtype=torch.float16)
    a, b, s_a, s_b = v[:, 0], torch.full_like(v[:, 1], math.nan), s[:, 0].float(), torch.full((3, 2), -INF)
    for got in (merge_state(a, s_a, b, s_b), merge_state(b, s_b, a, s_a)):
        assert torch.equal(got[0], a) and torch.equal(got[1], s_a)
    out, lse = merge_state(b, s_b, b, s_b)
    assert (out == 0).all() and (lse == -INF).all()


def test_states_far_apart() -> None:
    v = torch.ones(1, 1, 1)
    out, lse = merge_state(v, torch.full((1, 1), 3000.0), -v, torch.full((1, 1), -3000.0))
    assert out.item() == 1 and lse.item() == 3000
    out, lse = merge_state(v, torch.full((1, 1), -3000.0), -v, torch.full((1, 1), -3000.0))
    assert out.item() == 0 and lse.item() == -2999


@pytest.mark.parametrize("mask", [None, [1, 0, 1]])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("s_dtype", [torch.float32, torch.float64, torch.float16])
def test_in_place(mask: list[int] | None, mask_dtype: torch.dtype, s_dtype: torch.dtype) -> None:
    v, s = states(2)
    s = s.to(s_dtype)
    a, s_a = v[:, 0].float().clone(), s[:, 0].clone()
    want = plain(v.float(), s.double())
    kept = torch.tensor([True] * 3 if mask is None else [bool(m) for m in mask])
    merge_state_in_place(
        a, s_a, v[:, 1].float(), s[:, 1], None if mask is None else torch.tensor(mask, dtype=mask_dtype)
    )
    torch.testing.assert_close(a, torch.where(kept[:, None, None], want[0].float(), v[:, 0].float()))
    torch.testing.assert_close(s_a, torch.where(kept[:, None], want[1].to(s_dtype), s[:, 0]))
    assert torch.equal(a[~kept], v[:, 0].float()[~kept])


def test_strides_and_empty_batches() -> None:
    v, s = states(4, rows=6, dim=8)
    v, s = v[::2, ..., ::2], s[::2]
    want = plain(v[:, [0, 2]], s[:, [0, 2]])
    torch.testing.assert_close(merge_state(v[:, 0], s[:, 0], v[:, 2], s[:, 2]), want)
    torch.testing.assert_close(merge_states(v[:, ::2], s[:, ::2]), want)
    out, lse = v.clone()[:, 0], s.clone().transpose(1, 2).contiguous().transpose(1, 2)[:, 0]
    merge_state_in_place(out, lse, v[:, 2], s[:, 2])
    torch.testing.assert_close((out, lse), want)
    for got in (merge_state(v[:0, 0], s[:0, 0], v[:0, 1], s[:0, 1]), merge_states(v[:0], s[:0])):
        assert got[0].shape == (0, 2, 4) and got[1].shape == (0, 2)
    merge_state_in_place(v[:0, 0], s[:0, 0], v[:0, 1], s[:0, 1])


def test_gradients() -> None:
    v, s = states(2)
    inputs = [t.clone().requires_grad_() for t in (v[:, 0], s[:, 0], v[:, 1], s[:, 1])]
    assert torch.autograd.gradcheck(merge_state, inputs)
    with pytest.raises(NoKernelError, match="no gradient"):
        merge_state_in_place(v[:, 0], s[:, 0], *inputs[2:])


def test_compiles_in_one_graph() -> None:
    v, s = states(3, dtype=torch.float32)
    s = s.float()

    def step(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
        merge_state_in_place(out, lse, v[:, 2], s[:, 2])
        return out, lse

    torch.testing.assert_close(torch.compile(step, backend="aot_eager", fullgraph=True)(v, s), merge_states(v, s))
    torch.testing.assert_close(
        torch.compile(merge_states, backend="aot_eager", fullgraph=True)(v, s), merge_states(v, s)
    )


def test_wrong_arguments() -> None:
    v, s = torch.zeros(3, 2, 4), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"merge_state: v has shape \[2, 4\], it must be \[rows, heads, head_dim\]"):
        merge_state(v[0], s, v, s)
    with pytest.raises(ValueError, match=r"v of the other state has shape \[2, 2, 4\], not \[3, 2, 4\]"):
        merge_state(v, s, v[:2], s)
    with pytest.raises(ValueError, match=r"s has shape \[2, 2\], v needs \[3, 2\]; give one value per row and head"):
        merge_state(v, s, v, s[:2])
    with pytest.raises(TypeError, match="the v of the states are float32 and float16; convert one of them"):
        merge_state(v, s, v.half(), s)
    with pytest.raises(TypeError, match="s is int64, it must be a floating dtype"):
        merge_state(v, s.long(), v, s)
    with pytest.raises(TypeError, match="v is int32, it must be float16"):
        merge_states(v[None].int(), s[None])
    with pytest.raises(ValueError, match=r"mask has shape \[2\], v has 3 rows"):
        merge_state_in_place(v, s, v, s, torch.ones(2, dtype=torch.bool))
    with pytest.raises(TypeError, match="mask is float32, it must be bool or uint8; convert it"):
        merge_state_in_place(v, s, v, s, torch.ones(3))
    with pytest.raises(ValueError, match="tensors are on cpu and meta; move them to one device"):
        merge_state(v, s, v.to("meta"), s)


def test_a_cached_decision_does_not_skip_validation() -> None:
    kernelmux.reload()
    v, s = states(2, dtype=torch.float32)
    args = (v[:, 0], s[:, 0].float(), v[:, 1], s[:, 1].float())
    for _ in range(2):
        merge_state(*args)
    assert len(MERGE_STATE.cache) == 1
    with pytest.raises(TypeError):
        merge_state(args[0], args[1], args[2].half(), args[3])
    merge_states(v, s)
    merge_states(v[:2], s[:2])
    assert len(MERGE_STATES.cache) == 1
