"""RoPE with 8-bit floats, and its append to a paged cache, against formulas in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelmux as km

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LENS, KV_LENS = (3, 0, 5, 1), (37, 16, 21, 1)
BATCH = [b for b, n in enumerate(LENS) for _ in range(n)]
PLACES = [KV_LENS[b] - n + i for b, n in enumerate(LENS) for i in range(n)]
TOKENS = len(BATCH)


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def table(width: int, rows: int = 64) -> Tensor:
    pair = torch.arange(0, width, 2, dtype=torch.float64)
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * 1e4 ** (-pair / width)
    return torch.cat((angles.cos(), angles.sin()), -1).float()


def turned(x: Tensor, cache: Tensor, positions: list[int], is_neox: bool) -> Tensor:
    cos, sin = cache[positions].double().chunk(2, -1)
    if x.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    half = x.shape[-1] // 2
    y, out = x.double(), torch.empty_like(x, dtype=torch.float64)
    first, second = (slice(half), slice(half, None)) if is_neox else (slice(0, None, 2), slice(1, None, 2))
    out[..., first] = y[..., first] * cos - y[..., second] * sin
    out[..., second] = y[..., second] * cos + y[..., first] * sin
    return out


def rounded(got: Tensor, want: Tensor) -> None:
    """got is want, saturated and rounded to the nearest (a float32 computation may differ at a tie)."""
    limit, ulp = torch.finfo(got.dtype).max, {FP8[0]: 2.0**-3, FP8[1]: 2.0**-2}[got.dtype]
    want = want.clamp(-limit, limit)
    exact = want.float().to(got.dtype)
    assert (got.float() == exact.float()).double().mean() > 0.99
    torch.testing.assert_close(got.double(), want, rtol=ulp / 2 * 1.001, atol=2.0**-9)


def parts(
    mla: bool, nope: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    heads = () if mla else (2,)
    q, k = rand(TOKENS, 6, 32 + nope, dtype=dtype), rand(TOKENS, *heads, 32 + nope, dtype=dtype, seed=1)
    rests = (q[..., 32:], k[..., 32:]) if nope else (None, None)
    return q[..., :32], k[..., :32], *rests


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("out_dtype", FP8)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("mla", "nope"), [(False, 0), (False, 16), (True, 48), (True, 0)])
def test_quantise(mla: bool, nope: int, is_neox: bool, out_dtype: torch.dtype, dtype: torch.dtype) -> None:
    given, cache = parts(mla, nope, dtype), table(32)
    function = km.mla_rope_quantize_fp8 if mla else km.rope_quantize_fp8
    for index in (torch.int32, torch.int64):
        positions = torch.tensor(PLACES, dtype=index)
        scales = {"quant_scale_q": 0.7, "quant_scale_kv": 300.0}
        made = function(*given, cache, positions, is_neox, out_dtype, **scales)
        for got, x, scale, turns in zip(made, given, (0.7, 300, 0.7, 300), (True, True, False, False), strict=True):
            assert got.dtype == out_dtype
            if x is None:
                assert got.shape[-1] == 0 and got.ndim == (2 if mla and got is made[3] else 3)
            else:
                assert got.shape == x.shape
                rounded(got, (turned(x, cache, PLACES, is_neox) if turns else x.double()) * scale)


@pytest.mark.parametrize("mla", [False, True])
def test_outputs_that_are_views(mla: bool) -> None:
    given, cache, positions = parts(mla, 48), table(32), torch.tensor(PLACES)
    want = km.rope_quantize_fp8(*given, cache, positions)
    room = [torch.zeros(*x.shape[:-1], 80, dtype=torch.uint8).view(FP8[0]) for x in given[:2] if x is not None]
    outs = room[0][..., 48:], room[1][..., 48:], room[0][..., :48], room[1][..., :48]
    names = ("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out")
    made = km.rope_quantize_fp8(*given, cache, positions, **dict(zip(names, outs, strict=True)))
    for got, out, expected in zip(made, outs, want, strict=True):
        assert got is out and torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    some = km.rope_quantize_fp8(*given, cache, positions, k_nope_out=torch.empty_like(want[3]).to(FP8[0]))
    assert torch.equal(some[0].float(), want[0].float()) and torch.equal(some[3].float(), want[3].float())
    other = km.rope_quantize_fp8(*given, cache, positions, q_rope_out=torch.empty(TOKENS, 6, 32).to(FP8[1]))
    assert {t.dtype for t in other} == {FP8[1]}


def test_each_argument_changes_the_answer() -> None:
    given, cache, positions = parts(False, 16), table(32), torch.tensor(PLACES)

    def call(**changes: Any) -> Tensor:
        made = km.rope_quantize_fp8(*given, cache, **{"pos_ids": positions, **changes})
        return torch.cat([t.float().flatten() for t in made])

    for change in (
        {"is_neox": False},
        {"quant_scale_q": 0.5},
        {"quant_scale_kv": 0.5},
        {"quantize_dtype": FP8[1]},
        {"pos_ids": positions + 1},
    ):
        assert not torch.equal(call(), call(**change)), change


def paged(
    mla: bool, layout: str, single: bool, dtype: torch.dtype, width: int
) -> tuple[Any, Tensor, Tensor, Tensor, Tensor]:
    """A cache as the caller holds it, [pages, page_size, heads, dim] views of its parts, and the page table."""
    pages, size = 12, 16
    if mla:
        first, second = (torch.zeros(pages, size, w, dtype=torch.uint8).view(dtype) for w in (width, 32))
        held: Any = (first, second)
    else:
        shape = (pages, 2, size, 2, width) if layout == "NHD" else (pages, 2, 2, size, width)
        whole = torch.zeros(shape, dtype=torch.uint8).view(dtype)
        held = whole if single else (whole[:, 0], whole[:, 1])
        first, second = (p if layout == "NHD" else p.transpose(1, 2) for p in (whole[:, 0], whole[:, 1]))
    counts = torch.tensor([-(-n // size) for n in KV_LENS])
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    indices = torch.randperm(pages, generator=torch.Generator().manual_seed(3))[: int(indptr[-1])].int()
    return held, first, second, indices, indptr


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize(
    ("mla", "layout", "single"),
    [(True, "NHD", False), (False, "NHD", False), (False, "NHD", True), (False, "HND", False), (False, "HND", True)],
)
@pytest.mark.parametrize("is_neox", [True, False])
def test_append(mla: bool, layout: str, single: bool, is_neox: bool, dtype: torch.dtype) -> None:
    q_rope, k_rope, q_nope, k_nope = parts(mla, 48)
    v = None if mla else rand(TOKENS, 2, 80, dtype=torch.bfloat16, seed=5)
    held, first, second, indices, indptr = paged(mla, layout, single, dtype, 48 if mla else 80)
    cache, places = table(32), torch.tensor(PLACES, dtype=torch.int32)
    batch = torch.tensor(BATCH, dtype=torch.int32)
    batch[4] = -1  # padding
    positions = torch.tensor(list(range(TOKENS)))  # the angles need not follow the places
    made = km.rope_quantize_fp8_append_paged_kv_cache(
        q_rope, k_rope, q_nope, k_nope, v, cache, positions, held, indices, indptr, batch, places, is_neox, None,
        0.7, 1.5, 16, layout,
    )  # fmt: skip
    four = km.rope_quantize_fp8(q_rope, k_rope, q_nope, k_nope, cache, positions, is_neox, dtype, 0.7, 1.5)
    assert torch.equal(made[0].float(), four[0].float()) and torch.equal(made[1].float(), four[2].float())
    expected = [torch.zeros(t.shape) for t in (first, second)]
    for t, (b, place) in enumerate(zip(BATCH, PLACES, strict=True)):
        page, entry = int(indices[int(indptr[b]) + place // 16]), place % 16
        if t == 4:
            continue
        if v is None:
            expected[0][page, entry], expected[1][page, entry] = four[3][t].float(), four[1][t].float()
        else:
            expected[0][page, entry] = torch.cat((four[1][t].float(), four[3][t].float()), -1)
            expected[1][page, entry] = (v[t].float() * 1.5).to(dtype).float()
    assert torch.equal(first.float(), expected[0]) and torch.equal(second.float(), expected[1])


def test_append_without_nope_and_with_outputs() -> None:
    q_rope, k_rope, _, _ = parts(False, 0)
    v = rand(TOKENS, 2, 32, dtype=torch.bfloat16)
    held, first, second, indices, indptr = paged(False, "NHD", True, FP8[0], 32)
    out = torch.empty(TOKENS, 6, 32).to(FP8[0])
    made = km.rope_quantize_fp8_append_paged_kv_cache(
        q_rope, k_rope, None, None, v, table(32), torch.tensor(PLACES), held, indices, indptr, torch.tensor(BATCH),
        torch.tensor(PLACES), quantize_dtype=FP8[0], q_rope_out=out,
    )  # fmt: skip
    assert made[0] is out and made[1].shape == (TOKENS, 6, 0)
    assert first.float().any() and second.float().any()


def test_empty_inputs() -> None:
    none = torch.empty(0, dtype=torch.int32)
    made = km.rope_quantize_fp8(torch.empty(0, 4, 32), torch.empty(0, 32), torch.empty(0, 4, 8), None, table(32), none)
    assert [tuple(t.shape) for t in made] == [(0, 4, 32), (0, 32), (0, 4, 8), (0, 0)]
    held, first, _, indices, indptr = paged(True, "NHD", False, FP8[0], 48)
    km.rope_quantize_fp8_append_paged_kv_cache(
        torch.empty(0, 4, 32), torch.empty(0, 32), torch.empty(0, 4, 48), torch.empty(0, 48), None, table(32), none,
        held, indices, indptr, none, none,
    )  # fmt: skip
    assert not first.float().any()


def quantise(**changes: Any) -> Any:
    q_rope, k_rope, q_nope, k_nope = parts(False, 16)
    given = {"q_rope": q_rope, "k_rope": k_rope, "q_nope": q_nope, "k_nope": k_nope, "cos_sin_cache": table(32)}
    return km.rope_quantize_fp8(**{**given, "pos_ids": torch.tensor(PLACES), **changes})


def append(**changes: Any) -> Any:
    q_rope, k_rope, q_nope, k_nope = parts(False, 16)
    held, _, _, indices, indptr = paged(False, "NHD", False, FP8[0], 48)
    given = {"q_rope": q_rope, "k_rope": k_rope, "q_nope": q_nope, "k_nope": k_nope, "kv_indices": indices}
    given |= {"v": rand(TOKENS, 2, 48).bfloat16(), "cos_sin_cache": table(32), "pos_ids": torch.tensor(PLACES)}
    given |= {"paged_kv_cache": held, "kv_indptr": indptr}
    given |= {"batch_indices": torch.tensor(BATCH), "positions": torch.tensor(PLACES)}
    return km.rope_quantize_fp8_append_paged_kv_cache(**{**given, **changes})


@pytest.mark.parametrize(
    ("call", "changes", "error", "text"),
    [
        (quantise, {"quantize_dtype": torch.int8}, TypeError, "quantize_dtype is int8, it must be float8_e4m3fn or"),
        (quantise, {"cos_sin_cache": table(32).half()}, ValueError, "cos_sin_cache is float16, it must be float32"),
        (quantise, {"cos_sin_cache": table(16)}, ValueError, "widths are q_rope 32, k_rope 32, cos_sin_cache 16"),
        (quantise, {"q_rope": torch.zeros(TOKENS, 32)}, ValueError, "q_rope is [9, 32], it must be [tokens, heads"),
        (quantise, {"k_rope": torch.zeros(TOKENS)}, ValueError, "k_rope is [9], it must be [tokens, heads"),
        (quantise, {"k_nope": torch.zeros(TOKENS, 3, 16)}, ValueError, "k_nope has shape [9, 3, 16]"),
        (quantise, {"q_nope": torch.zeros(TOKENS, 6, 16)}, TypeError, "q_nope float32"),
        (quantise, {"q_nope": torch.zeros(TOKENS, 6, 16).int()}, TypeError, "q_nope is int32"),
        (quantise, {"pos_ids": torch.zeros(TOKENS)}, TypeError, "pos_ids is float32, it must be int32 or int64"),
        (quantise, {"pos_ids": torch.tensor([0])}, ValueError, "pos_ids has shape [1], there are 9 tokens"),
        (quantise, {"pos_ids": torch.zeros(TOKENS, 1).int()}, ValueError, "pos_ids has shape [9, 1], it must be"),
        (quantise, {"pos_ids": torch.tensor(PLACES, device="meta")}, ValueError, "pos_ids is on meta"),
        (
            quantise,
            {"q_rope_out": torch.empty(TOKENS, 6, 16).to(FP8[0])},
            ValueError,
            "q_rope_out has shape [9, 6, 16], it must be [9, 6, 32]",
        ),
        (
            quantise,
            {"q_rope_out": torch.empty(TOKENS, 6, 32).to(FP8[0]), "quantize_dtype": FP8[1]},
            TypeError,
            "q_rope_out is float8_e4m3fn, the quantised dtype is float8_e5m2",
        ),
        (quantise, {"q_nope": None, "q_nope_out": torch.empty(TOKENS, 6, 16).to(FP8[0])}, ValueError, "q_nope is None"),
        (append, {"page_size": 8}, ValueError, "page_size is 8, the caches have 16"),
        (append, {"kv_layout": "DNH"}, ValueError, "kv_layout is 'DNH'"),
        (append, {"quantize_dtype": FP8[1]}, TypeError, "quantize_dtype is float8_e5m2, the caches are float8_e4m3fn"),
        (append, {"v": None}, TypeError, "paged_kv_cache is a Tensor"),
        (append, {"v": torch.zeros(TOKENS, 3, 48).bfloat16()}, ValueError, "v has shape [9, 3, 48]"),
        (append, {"v": torch.zeros(TOKENS, 2, 40).bfloat16()}, ValueError, "paged_kv_cache has shape [12, 16, 2, 48]"),
        (append, {"k_nope": None}, ValueError, "it must be ['pages', 'page_size', 2, 32]"),
        (append, {"batch_indices": torch.tensor([0])}, ValueError, "batch_indices has shape [1], there are 9 tokens"),
        (append, {"positions": torch.zeros(TOKENS)}, TypeError, "positions is float32"),
        (append, {"paged_kv_cache": torch.zeros(12, 2, 16, 2, 48)}, TypeError, "paged_kv_cache is float32"),
    ],
)  # fmt: skip
def test_errors(call: Callable[..., Any], changes: dict[str, Any], error: type[Exception], text: str) -> None:
    if changes == {"v": None}:
        changes = {"v": None, "paged_kv_cache": torch.zeros(12, 16, 48)}
    with pytest.raises(error) as caught:
        call(**changes)
    assert text in str(caught.value)
    assert str(caught.value)[0].islower()


def test_refuses_inputs_that_require_grad() -> None:
    for call in (quantise, append):
        with pytest.raises(km.NoKernelError, match="grad"):
            call(q_rope=torch.zeros(TOKENS, 6, 32).bfloat16().requires_grad_())


def test_deep_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELMUX_CHECK", "1")
    km.reload()
    wrong = torch.tensor([*PLACES[:-1], 64])
    with pytest.raises(ValueError, match=r"cos_sin_cache has positions 0\.\.63"):
        quantise(pos_ids=wrong)
    with pytest.raises(ValueError, match="add the new tokens to the page table"):
        append(positions=wrong)


def test_compiled() -> None:
    given, cache, positions, batch = parts(False, 16), table(32), torch.tensor(PLACES), torch.tensor(BATCH)
    v = rand(TOKENS, 2, 48).bfloat16()
    left, _, _, indices, indptr = paged(False, "NHD", True, FP8[0], 48)
    right = left.clone()

    def everything(held: Tensor, q: Tensor, k: Tensor, q_nope: Tensor, k_nope: Tensor) -> list[Tensor]:
        made = [*km.rope_quantize_fp8(q, k, q_nope, k_nope, cache, positions, quant_scale_q=2.0)]
        made += km.rope_quantize_fp8(q, k, None, None, cache, positions)
        made += km.rope_quantize_fp8_append_paged_kv_cache(
            q, k, q_nope, k_nope, v, cache, positions, held, indices, indptr, batch, positions
        )
        return [t.float() for t in made]

    want = everything(left, *given)
    got = torch.compile(everything, backend="aot_eager", fullgraph=True)(right, *given)
    assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)) and left.float().any()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
