"""RoPE against complex numbers in float64: every form, views of a fused qkv, long positions, errors, gradients."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelmux as km

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6, torch.float64: 1e-10}
LENS, OFFSETS = (5, 0, 3, 1), (0, 3, 131071 - 2, 511)
INDPTR = (0, 5, 5, 8, 9)
POSITIONS = [first + i for n, first in zip(LENS, OFFSETS, strict=True) for i in range(n)]
Scaling = dict[str, Any]


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def turn(x: Tensor, angles: Tensor, interleave: bool) -> Tensor:
    """Multiply each pair, as a complex number, by exp(i angle). x [tokens, heads, dim], angles [tokens, pairs]."""
    return times(x, torch.exp(1j * angles.double()), interleave)


def times(x: Tensor, factors: Tensor, interleave: bool) -> Tensor:
    x, pairs = x.double().clone(), factors.shape[-1]
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleave else (slice(pairs), slice(pairs, 2 * pairs))
    )
    z = torch.complex(x[..., first], x[..., second]) * factors[:, None]
    x[..., first], x[..., second] = z.real, z.imag
    return x


def frequencies(rotary: int, scale: float, theta: float, low: float = 0, high: float = 0, old: float = 0) -> Tensor:
    """Pair by pair, as Llama 3.1 words it: by wavelength; without factors, all are divided by the scale."""
    found = []
    for pair in range(rotary // 2):
        f = theta ** (-2 * pair / rotary)
        wave = 2 * math.pi / f
        if not high or wave > old / low:
            found.append(f / scale)
        elif wave < old / high:
            found.append(f)
        else:
            smooth = (old / wave - low) / (high - low)
            found.append((1 - smooth) * f / scale + smooth * f)
    return torch.tensor(found, dtype=torch.float64)


def close(got: Tensor, want: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def fused(dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """q of 6 heads and k of 2, views of one fused qkv, and the qkv."""
    qkv = rand(len(POSITIONS), 10, dim, dtype=dtype)
    return qkv[:, :6], qkv[:, 6:8], qkv


PLAIN: list[tuple[Scaling, Tensor]] = [
    ({}, frequencies(64, 1, 1e4)),
    ({"rope_scale": 4, "rope_theta": 5e5}, frequencies(64, 4, 5e5)),
]
LLAMA31: list[tuple[Scaling, Tensor]] = [
    ({}, frequencies(64, 8, 5e5, 1, 4, 8192)),
    (
        {"rope_scale": 16, "rope_theta": 1e5, "low_freq_factor": 2, "high_freq_factor": 8, "old_context_len": 256},
        frequencies(64, 16, 1e5, 2, 8, 256),
    ),
]
FORMS = [("rope", kwargs, f) for kwargs, f in PLAIN] + [("llama31_rope", kwargs, f) for kwargs, f in LLAMA31]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize(("name", "kwargs", "freqs"), FORMS)
def test_computed_forms(name: str, kwargs: Scaling, freqs: Tensor, interleave: bool, dtype: torch.dtype) -> None:
    angles = torch.tensor(POSITIONS, dtype=torch.float64)[:, None] * freqs
    for dim in (64, 80):
        for index in (torch.int32, torch.int64):
            flat = torch.tensor(POSITIONS, dtype=index)
            spread = flat[:, None].expand(-1, 2).contiguous()[:, 0]
            batch = torch.tensor(INDPTR, dtype=index), torch.tensor(OFFSETS, dtype=index)
            for suffix, where in (("", batch), ("_pos_ids", (flat,)), ("_pos_ids", (spread,))):
                q, k, qkv = fused(dim, dtype)
                before = qkv.clone()
                given = {"rotary_dim": None if dim == 64 else 64, "interleave": interleave, **kwargs}
                q_rope, k_rope = getattr(km, f"apply_{name}{suffix}")(q, k, *where, **given)
                assert torch.equal(qkv, before) and q_rope.dtype == k_rope.dtype == dtype
                close(q_rope, turn(q, angles, interleave))
                close(k_rope, turn(k, angles, interleave))
                assert torch.equal(q_rope[..., 64:], q[..., 64:])
                assert getattr(km, f"apply_{name}{suffix}_inplace")(q, k, *where, **given) is None
                assert torch.equal(q, q_rope) and torch.equal(k, k_rope) and torch.equal(qkv[:, 8:], before[:, 8:])


def table(rotary: int, rows: int = 131072) -> Tensor:
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * frequencies(rotary, 1, 1e4)
    return torch.cat((angles.cos(), angles.sin()), -1).float()


@pytest.fixture(scope="module")
def cache() -> Tensor:
    return table(32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("heads", [(6, 2), (64, 1)])
@pytest.mark.parametrize("dim", [32, 128])
def test_cached_forms(cache: Tensor, dim: int, heads: tuple[int, int], is_neox: bool, dtype: torch.dtype) -> None:
    where = [0, 1, 131071, 77, 77]
    hq, hk = heads
    cos, sin = cache[where].double().chunk(2, -1)
    factors = torch.complex(cos, sin)
    strided = torch.cat((cache, cache), -1)[:, :32]
    for index, given in ((torch.int32, cache), (torch.int64, strided)):
        positions = torch.tensor(where, dtype=index)
        qkv = rand(5, (hq + 2 * hk) * dim, dtype=dtype)
        before = qkv.clone()
        q, k = qkv[:, : hq * dim], qkv[:, hq * dim : (hq + hk) * dim]
        made = km.apply_rope_with_cos_sin_cache(positions, q, k, dim, given, is_neox)
        assert torch.equal(qkv, before)
        for got, x in zip(made, (q, k), strict=True):
            assert got.shape == x.shape and got.dtype == dtype
            close(got.view(5, -1, dim), times(x.reshape(5, -1, dim), factors, not is_neox))
            assert torch.equal(got.view(5, -1, dim)[..., 32:], x.view(5, -1, dim)[..., 32:])
        by_head = km.apply_rope_with_cos_sin_cache(positions, q.view(5, hq, dim), k, dim, given, is_neox)
        assert torch.equal(by_head[0].flatten(1), made[0]) and torch.equal(by_head[1], made[1])
        assert km.apply_rope_with_cos_sin_cache_inplace(positions, q, k, dim, given, is_neox) is None
        assert torch.equal(q, made[0]) and torch.equal(k, made[1])
        assert torch.equal(qkv[:, (hq + hk) * dim :], before[:, (hq + hk) * dim :])


def test_long_positions_lose_nothing() -> None:
    positions = torch.tensor([0, 1, 131071, 10_000_001])
    x = torch.tensor([1.0, 0.0]).repeat(64).expand(4, 1, 128).double()
    got, _ = km.apply_rope_pos_ids(x, x, positions, interleave=True)
    angles = positions.double()[:, None] * frequencies(128, 1, 1e4)
    torch.testing.assert_close(got[:, 0, ::2], angles.cos(), rtol=0, atol=1e-8)
    single, _ = km.apply_rope_pos_ids(x.float(), x.float(), positions, interleave=True)
    torch.testing.assert_close(single[:, 0, ::2].double(), angles.cos(), rtol=0, atol=1e-7)


def test_strides_of_every_dim() -> None:
    room = rand(18, 12, 160)
    q, k = room[::2, ::2, ::2], room[1::2, 1::3, 1::2]
    positions = torch.arange(9)
    want = km.apply_rope_pos_ids(q.contiguous(), k.contiguous(), positions)
    got = km.apply_rope_pos_ids(q, k, positions)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    km.apply_rope_pos_ids_inplace(q, k, positions)
    assert torch.equal(q, want[0]) and torch.equal(k, want[1])


def test_tokens_outside_of_every_request_are_copied() -> None:
    q, k = rand(6, 2, 8), rand(6, 1, 8, seed=1)
    got, _ = km.apply_rope(q, k, torch.tensor([1, 3, 4]), torch.tensor([10, 20]))
    want, _ = km.apply_rope_pos_ids(q, k, torch.tensor([0, 10, 11, 20, 0, 0]))
    assert torch.equal(got, want) and torch.equal(got[[0, 4, 5]], q[[0, 4, 5]])
    none = torch.zeros(1, dtype=torch.int32)
    assert torch.equal(km.apply_rope(q, k, none, none[:0])[0], q)


def test_each_argument_changes_the_answer(cache: Tensor) -> None:
    q, positions = rand(3, 2, 32), torch.tensor([5, 6, 70])
    base = km.apply_llama31_rope_pos_ids(q, q, positions)[0]
    changes: list[Scaling] = [
        {"rotary_dim": 16}, {"interleave": True}, {"rope_scale": 16}, {"rope_theta": 1e4}, {"low_freq_factor": 2},
        {"high_freq_factor": 8}, {"old_context_len": 64},
    ]  # fmt: skip
    for change in changes:
        assert not torch.equal(base, km.apply_llama31_rope_pos_ids(q, q, positions, **change)[0]), change
    assert not torch.equal(base, km.apply_rope_pos_ids(q, q, positions, None, False, 8, 5e5)[0])
    flat = q.flatten(1)
    cached = km.apply_rope_with_cos_sin_cache(positions, flat, flat, 32, cache)[0]
    assert not torch.equal(cached, km.apply_rope_with_cos_sin_cache(positions, flat, flat, 32, cache, False)[0])
    assert not torch.equal(cached, km.apply_rope_with_cos_sin_cache(positions, flat, flat, 64, cache)[0])
    assert not torch.equal(cached, km.apply_rope_with_cos_sin_cache(positions + 1, flat, flat, 32, cache)[0])


def test_empty_inputs(cache: Tensor) -> None:
    q, k, none = torch.empty(0, 4, 32), torch.empty(0, 2, 32), torch.empty(0, dtype=torch.int32)
    one = torch.zeros(1, dtype=torch.int32)
    for name in ("apply_rope", "apply_llama31_rope"):
        for suffix, where in (("", (one, none)), ("_pos_ids", (none,))):
            made = getattr(km, name + suffix)(q, k, *where)
            assert made[0].shape == q.shape and made[1].shape == k.shape
            assert getattr(km, f"{name}{suffix}_inplace")(q, k, *where) is None
    made = km.apply_rope_with_cos_sin_cache(none, q.view(0, 128), k.view(0, 64), 32, cache)
    assert made[0].shape == (0, 128) and made[1].shape == (0, 64)
    km.apply_rope_with_cos_sin_cache_inplace(none, q.view(0, 128), k.view(0, 64), 32, cache)
    no_heads = km.apply_rope_pos_ids(rand(2, 4, 32), rand(2, 0, 32), torch.arange(2))
    assert no_heads[1].shape == (2, 0, 32)


P, Q = torch.arange(3), torch.zeros(3, 2, 8)
C = torch.zeros(16, 8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: km.apply_rope_pos_ids(Q[0], Q, P), ValueError, "apply_rope_pos_ids: q has shape [2, 8], it must be"),
        (lambda: km.apply_rope_pos_ids(Q, Q[:2], P), ValueError, "apply_rope_pos_ids: k has shape [2, 2, 8], it must"),
        (lambda: km.apply_rope_pos_ids(Q, Q, P[:2]), ValueError, "pos_ids has shape [2], it must be [3]"),
        (lambda: km.apply_rope_pos_ids(Q, Q, P.float()), TypeError, "pos_ids is float32, it must be int32 or int64"),
        (lambda: km.apply_rope_pos_ids(Q, Q[..., :4], P), ValueError, "give q and k the same head_dim"),
        (lambda: km.apply_rope_pos_ids(Q, Q.half(), P), TypeError, "dtypes are q float32, k float16"),
        (lambda: km.apply_rope_pos_ids(Q.int(), Q.int(), P), TypeError, "q is int32, it must be float16"),
        (lambda: km.apply_rope_pos_ids(Q, Q, P, 7), ValueError, "rotary_dim is 7, it must be even and 2..8"),
        (lambda: km.apply_rope_pos_ids(Q, Q, P, 10), ValueError, "rotary_dim is 10, it must be even and 2..8"),
        (lambda: km.apply_rope_pos_ids(Q, Q, P, rope_theta=-1), ValueError, "rope_theta -1.0, both must be above 0"),
        (lambda: km.apply_rope_pos_ids(Q, Q, P, rope_scale=0), ValueError, "rope_scale is 0.0"),
        (lambda: km.apply_rope_pos_ids(Q, Q.to("meta"), P), ValueError, "k is on meta"),
        (lambda: km.apply_rope_pos_ids(Q, Q, P.to("meta")), ValueError, "pos_ids is on meta"),
        (
            lambda: km.apply_rope_pos_ids_inplace(Q[:1].expand(3, 2, 8), Q, P),
            ValueError,
            "apply_rope_pos_ids_inplace: q has the strides (0, 8, 1), it is written to",
        ),
        (
            lambda: km.apply_llama31_rope_pos_ids(Q, Q, P, low_freq_factor=4),
            ValueError,
            "low_freq_factor is 4, high_freq_factor 4; the high one must be larger",
        ),
        (lambda: km.apply_rope(Q, Q, P, P), ValueError, "indptr has shape [3], offsets [3], they must be [batch + 1]"),
        (lambda: km.apply_rope(Q, Q, P, P[:2].int()), TypeError, "indptr int64, offsets int32"),
        (lambda: km.apply_rope(Q, Q[:1], P, P[:2]), ValueError, "apply_rope: k has shape [1, 2, 8]"),
        (
            lambda: km.apply_rope_with_cos_sin_cache(P, Q.view(3, 16), Q.view(3, 16), 8, C.half()),
            ValueError,
            "cos_sin_cache is float16, it must be float32",
        ),
        (
            lambda: km.apply_rope_with_cos_sin_cache_inplace(P, Q.view(3, 16), Q.view(3, 16), 8, C.double()),
            ValueError,
            "cos_sin_cache is float64, it must be float32",
        ),
        (
            lambda: km.apply_rope_with_cos_sin_cache(P, Q.view(3, 16), Q.view(3, 16), 8, C[0]),
            ValueError,
            "cos_sin_cache has shape [8], it must be [max_position, rotary_dim]",
        ),
        (
            lambda: km.apply_rope_with_cos_sin_cache(P, Q.view(3, 16), Q.view(3, 16), 5, C),
            ValueError,
            "query has shape [3, 16], it must be [tokens, heads * head_size] or [tokens, heads, head_size]; head_size",
        ),
        (
            lambda: km.apply_rope_with_cos_sin_cache(P, Q.view(3, 16), Q.view(3, 16), 4, C),
            ValueError,
            "rotary_dim is 8, it must be even and 2..4",
        ),
        (
            lambda: km.apply_rope_with_cos_sin_cache(P, Q, Q, 4, C),
            ValueError,
            "query has shape [3, 2, 8], it must be",
        ),
        (
            lambda: km.apply_rope_with_cos_sin_cache(P[:2], Q, Q, 8, C),
            ValueError,
            "positions has shape [2], it must be [3]",
        ),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
    assert str(caught.value)[0].islower()


def test_deep_check_of_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELMUX_CHECK", "1")
    km.reload()
    with pytest.raises(ValueError, match=r"positions\[1\] is 16, cos_sin_cache has positions 0\.\.15"):
        km.apply_rope_with_cos_sin_cache(torch.tensor([1, 16, 0]), Q, Q, 8, C)
    km.apply_rope_with_cos_sin_cache(torch.tensor([1, 15, 0]), Q, Q, 8, C)


def test_gradients(cache: Tensor) -> None:
    q, k = (
        rand(3, 2, 6, dtype=torch.float64).requires_grad_(),
        rand(3, 1, 6, dtype=torch.float64, seed=1).requires_grad_(),
    )
    where = torch.tensor([0, 3]), torch.tensor([4])
    for interleave in (False, True):
        assert torch.autograd.gradcheck(lambda q, k: km.apply_rope_pos_ids(q, k, P, 4, interleave), (q, k))  # noqa: B023
        assert torch.autograd.gradcheck(lambda q, k: km.apply_llama31_rope(q, k, *where, 4, interleave), (q, k))  # noqa: B023
        assert torch.autograd.gradcheck(
            lambda q, k: km.apply_rope_with_cos_sin_cache(P, q, k, 6, table(4, 9), interleave),  # noqa: B023
            (q, k),
        )
    calls: list[Callable[[], None]] = [
        lambda: km.apply_rope_pos_ids_inplace(q, k, P),
        lambda: km.apply_rope_inplace(q, k, *where),
        lambda: km.apply_rope_with_cos_sin_cache_inplace(P, q, k, 6, table(4, 9)),
    ]
    for call in calls:
        with pytest.raises(km.NoKernelError, match="grad"):
            call()
        with torch.no_grad():
            call()


def test_compiled() -> None:
    small = table(8, 16)

    def everything(qkv: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        q, k = qkv[:, :4], qkv[:, 4:6]
        where = torch.tensor([0, 3]), torch.tensor([7])
        made = [*km.apply_rope_pos_ids(q, k, positions), *km.apply_llama31_rope(q, k, *where, interleave=True)]
        made += km.apply_rope_with_cos_sin_cache(positions, q.flatten(1), k.flatten(1), 8, small)
        km.apply_rope_pos_ids_inplace(q, k, positions)
        km.apply_llama31_rope_inplace(q, k, *where)
        km.apply_rope_with_cos_sin_cache_inplace(positions, q, k, 8, small, False)
        return tuple(made)

    left, right = rand(3, 8, 8), rand(3, 8, 8)
    want = everything(left, P)
    got = torch.compile(everything, backend="aot_eager", fullgraph=True)(right, P)
    torch.testing.assert_close(left, right)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    q = rand(3, 2, 8).requires_grad_()
    torch.compile(lambda q: km.apply_rope_pos_ids(q, q, P)[0].sum(), backend="aot_eager", fullgraph=True)(q).backward()
    assert q.grad is not None and bool((q.grad != 1).any())
