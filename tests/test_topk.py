"""top_k and its transforms: exact sets, ties, windows, page tables."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelmux
from kernelmux.dispatch.topk import (
    TopKTieBreak,
    top_k,
    top_k_page_table_transform,
    top_k_ragged_transform,
    topk,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def scores(rows: int, columns: int, levels: int = 0, seed: int = 0) -> Tensor:
    """Random scores; with `levels`, so few different ones that there are ties everywhere."""
    generator = torch.Generator().manual_seed(seed)
    if levels:
        return torch.randint(levels, (rows, columns), generator=generator).float() - levels // 2
    return torch.randn(rows, columns, generator=generator)


def chosen(row: list[float], k: int, tie_break: int) -> set[int]:
    """The columns that top_k takes, by sorting (value, index) pairs in Python."""
    sign = -1 if tie_break == TopKTieBreak.LARGE else 1
    return set(sorted(range(len(row)), key=lambda i: (-row[i], sign * i))[:k])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 5, 32, 33])
@pytest.mark.parametrize("largest_first", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_values(dtype: torch.dtype, k: int, largest_first: bool, deterministic: bool) -> None:
    input = scores(4, 33).to(dtype)
    values, indices = top_k(input, k, sorted=largest_first, deterministic=deterministic)
    assert values.dtype == dtype
    assert indices.dtype == torch.int64
    assert torch.equal(input.gather(1, indices), values)
    expected = input.sort(-1, descending=True).values[:, :k]
    assert torch.equal(values if largest_first else values.sort(-1, descending=True).values, expected)
    assert all(len(set(row)) == k for row in indices.tolist())
    again = top_k(input, k, sorted=largest_first, deterministic=True)
    assert torch.equal(again[1], top_k(input, k, sorted=largest_first, deterministic=True)[1])


@pytest.mark.parametrize("tie_break", [TopKTieBreak.SMALL, TopKTieBreak.LARGE, 1, 2])
@pytest.mark.parametrize("k", [1, 7, 20, 40])
@pytest.mark.parametrize("largest_first", [False, True])
def test_tie_break(tie_break: int, k: int, largest_first: bool) -> None:
    input = torch.cat((scores(6, 40, levels=4), torch.zeros(1, 40), torch.full((1, 40), -math.inf)))
    values, indices = top_k(input, k, sorted=largest_first, tie_break=tie_break)
    for row, picked in zip(input.tolist(), indices.tolist(), strict=True):
        assert set(picked) == chosen(row, k, tie_break)
    assert torch.equal(input.gather(1, indices), values)
    if largest_first:
        assert (values[:, 1:] <= values[:, :-1]).all()


@pytest.mark.parametrize("columns", [65536, 1048576])
def test_long_rows_in_a_narrow_band(columns: int) -> None:
    """Scores that share their leading bits, as radix selection finds hard; and a row of equal ones."""
    band = 1 + torch.rand(1, columns, generator=torch.Generator().manual_seed(0)) * 1e-4
    input = torch.cat((band, torch.ones(1, columns)))
    for tie_break in TopKTieBreak:
        values, indices = top_k(input, 2048, tie_break=tie_break)
        assert torch.equal(values.sort(-1).values, input.sort(-1).values[:, -2048:])
        assert len(set(indices[1].tolist())) == 2048
        assert torch.equal(input.gather(1, indices), values)


def test_not_a_number_is_the_largest() -> None:
    input = torch.tensor([[1.0, math.nan, 3.0], [math.inf, 0.0, -math.inf]])
    for tie_break in TopKTieBreak:
        values, indices = top_k(input, 2, sorted=True, tie_break=tie_break)
        assert indices.tolist() == [[1, 2], [0, 1]]
        assert values[0, 0].isnan()


def test_strides_and_empties() -> None:
    input = scores(4, 33)
    wide = torch.full((8, 66), math.nan)
    wide[::2, ::2] = input
    assert torch.equal(top_k(wide[::2, ::2], 5, sorted=True)[1], top_k(input, 5, sorted=True)[1])
    values, indices = top_k(input[:0], 5)
    assert values.shape == indices.shape == (0, 5)


def test_gradients_reach_the_input() -> None:
    input = scores(3, 9).requires_grad_()
    values, indices = top_k(input, 4, tie_break=TopKTieBreak.SMALL)
    values.sum().backward()
    assert torch.equal(input.grad, torch.zeros(3, 9).scatter(1, indices, 1.0))  # type: ignore[arg-type]


def test_names() -> None:
    assert topk is top_k
    assert [(t.name, t.value) for t in kernelmux.TopKTieBreak] == [("NONE", 0), ("SMALL", 1), ("LARGE", 2)]
    assert not hasattr(kernelmux, "topk") or not callable(kernelmux.topk)


@pytest.mark.parametrize("k", [0, 34, -1])
def test_k_outside_the_columns(k: int) -> None:
    with pytest.raises(ValueError, match=f"k is {k}, at least 1 and at most the 33 columns"):
        top_k(scores(2, 33), k)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"tie_break is 3, one of TopKTieBreak\.NONE"):
        top_k(scores(2, 33), 3, tie_break=3)
    with pytest.raises(ValueError, match=r"input has shape \[33\]"):
        top_k(scores(1, 33)[0], 3)
    with pytest.raises(TypeError, match="input is int64"):
        top_k(scores(1, 33).long(), 3)


# -- transforms -----------------------------------------------------------------------------------------------------

LENGTHS = [0, 3, 8, 9, 20, 24]
STARTS = [5, 0, 9, 3, 4, 0]
K = 8


def windows(levels: int, poison: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scores whose windows [start, start + length) are finite and whose rest is poison."""
    input = torch.full((len(LENGTHS), 24), poison)
    for r, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        input[r, start : start + length] = scores(1, length, levels, seed=r)[0]
    return input, torch.tensor(STARTS, dtype=torch.int32), torch.tensor(LENGTHS, dtype=torch.int32)


def expected_positions(input: Tensor, k: int, tie_break: int, starts: list[int]) -> list[list[int]]:
    """Ascending, so that any order compares."""
    result = []
    for row, start, length in zip(input.tolist(), starts, LENGTHS, strict=True):
        result.append(sorted(chosen(row[start : start + length], k, tie_break)))
    return result


def ascending(positions: Tensor) -> list[list[int]]:
    return [sorted(p for p in row if p >= 0) for row in positions.tolist()]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("tie_break", [1, 2])
@pytest.mark.parametrize("levels", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged(poison: float, tie_break: int, levels: int, dtype: torch.dtype) -> None:
    input, starts, lengths = windows(levels, poison)
    input = input.to(dtype)
    offsets = torch.arange(100, 700, 100, dtype=torch.int32)
    out = top_k_ragged_transform(input, offsets, lengths, K, tie_break=tie_break, row_starts=starts)
    assert out.dtype == torch.int32
    assert out.shape == (6, K)
    got = torch.where(out < 0, -1, out - offsets[:, None])
    assert ascending(got) == expected_positions(input, K, tie_break, STARTS)
    for row, length in zip(got.tolist(), LENGTHS, strict=True):
        assert row.count(-1) == max(0, K - length)
        if length <= K:
            assert row == [*range(length), *[-1] * (K - length)]


def test_ragged_without_starts_and_k_beyond_the_columns() -> None:
    input = scores(6, 24)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    out = top_k_ragged_transform(input, torch.zeros(6, dtype=torch.int32), lengths, 30, deterministic=True)
    assert out.tolist() == [[*range(n), *[-1] * (30 - n)] for n in LENGTHS]
    out = top_k_ragged_transform(input, torch.zeros(6, dtype=torch.int64), lengths.long(), K, deterministic=True)
    assert ascending(out) == expected_positions(input, K, 1, [0] * 6)


def test_scores_of_minus_infinity_inside_a_window_come_before_what_lies_outside() -> None:
    input = torch.full((2, 12), -math.inf)
    input[:, 9:] = 5.0
    lengths = torch.tensor([9, 9], dtype=torch.int32)
    for tie_break in TopKTieBreak:
        out = top_k_ragged_transform(input, torch.zeros(2, dtype=torch.int32), lengths, 4, tie_break=tie_break)
        assert ((out >= 0) & (out < 9)).all()
        assert all(len(set(row)) == 4 for row in out.tolist())


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_page_table(page_size: int, started: bool, mapped: bool, given: bool) -> None:
    input, starts, lengths = windows(3, math.nan)
    if not started:
        input = scores(6, 24, levels=3)
    batch = [2, 0, 0, 1, 2, 1] if mapped else list(range(6))
    table = torch.randperm(7 * 30, generator=torch.Generator().manual_seed(1)).view(7, 30).int()
    entries = [1, 0, 2, 3, 1, 0] if page_size > 1 else STARTS
    arguments: dict[str, Any] = {"page_size": page_size, "tie_break": 1}
    if mapped:
        arguments["row_to_batch"] = torch.tensor(batch, dtype=torch.int32)
    if started:
        arguments["row_starts"] = starts
        if page_size > 1:
            arguments["page_table_row_starts"] = torch.tensor(entries, dtype=torch.int32)
    raw = torch.full((6, K), 77, dtype=torch.int32)
    out = torch.full((6, K), 77, dtype=torch.int32)
    if given:
        arguments |= {"out": out, "out_raw_indices": raw}
    got = top_k_page_table_transform(input, table, lengths, K, **arguments)
    assert (got is out) == given
    positions = expected_positions(input, K, 1, STARTS if started else [0] * 6)
    for r, want in enumerate(positions):
        start = entries[r] if started else 0
        slots = [int(table[batch[r], start + p // page_size]) * page_size + p % page_size for p in want]
        assert sorted(x for x in got[r].tolist() if x >= 0) == sorted(slots)
        if len(want) < K:
            assert got[r].tolist() == [*slots, *[-1] * (K - len(want))]
    if given:
        assert ascending(raw) == positions
        by_hand = [
            [-1 if p < 0 else int(table[batch[r], (entries[r] if started else 0) + p // page_size]) * page_size
             + p % page_size for p in row] for r, row in enumerate(raw.tolist())
        ]  # fmt: skip
        assert got.tolist() == by_hand


def test_page_table_alone_and_empty() -> None:
    input = scores(3, 16)
    lengths = torch.tensor([16, 5, 9], dtype=torch.int32)
    table = torch.arange(48, dtype=torch.int32).view(3, 16)
    whole = top_k_page_table_transform(input, table, lengths, 4, deterministic=True)
    for r in range(3):
        part = slice(r, r + 1)
        alone = top_k_page_table_transform(input[part], table[part], lengths[part], 4, deterministic=True)
        assert torch.equal(whole[part], alone)
    assert top_k_page_table_transform(input[:0], table, lengths[:0], 4).shape == (0, 4)
    nothing = top_k_page_table_transform(input[:, :0], table[:, :0], 0 * lengths, 4)
    assert (nothing == -1).all()


def test_explicit_table_starts_with_single_positions() -> None:
    input, starts, lengths = windows(0, math.nan)
    table = torch.arange(1000, 1000 + 6 * 30, dtype=torch.int32).view(6, 30)
    same = top_k_page_table_transform(input, table, lengths, K, row_starts=starts, deterministic=True)
    explicit = top_k_page_table_transform(
        input, table, lengths, K, row_starts=starts, page_table_row_starts=starts, deterministic=True
    )
    assert torch.equal(same, explicit)
    zero = top_k_page_table_transform(
        input, table, lengths, K, row_starts=starts, page_table_row_starts=0 * starts, deterministic=True
    )
    assert torch.equal(torch.where(same < 0, -1, same - starts[:, None]), zero)


def test_wrong_transforms() -> None:
    input, starts, lengths = windows(0, 0.0)
    table = torch.zeros(6, 30, dtype=torch.int32)
    with pytest.raises(ValueError, match="page_size is 3, it must be a power of two"):
        top_k_page_table_transform(input, table, lengths, K, page_size=3)
    with pytest.raises(ValueError, match="page_table_row_starts is None with row_starts and page_size 2"):
        top_k_page_table_transform(input, table, lengths, K, row_starts=starts, page_size=2)
    with pytest.raises(ValueError, match=r"lengths has shape \[5\], it must be \[6\]"):
        top_k_page_table_transform(input, table, lengths[:5], K)
    with pytest.raises(ValueError, match=r"src_page_table has shape \[2, 30\]"):
        top_k_page_table_transform(input, table[:2], lengths, K)
    with pytest.raises(TypeError, match="src_page_table is float32"):
        top_k_page_table_transform(input, table.float(), lengths, K)
    with pytest.raises(ValueError, match=r"out is int64 \[6, 8\] on cpu, it must be int32 \[6, 8\]"):
        top_k_page_table_transform(input, table, lengths, K, out=torch.zeros(6, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"out_raw_indices is int32 \[6, 9\]"):
        top_k_page_table_transform(input, table, lengths, K, out_raw_indices=torch.zeros(6, 9, dtype=torch.int32))
    with pytest.raises(ValueError, match="k is 0, at least 1"):
        top_k_ragged_transform(input, starts, lengths, 0)
    with pytest.raises(TypeError, match="offsets is float32, it must be int32"):
        top_k_ragged_transform(input, starts.float(), lengths, K)
    with pytest.raises(ValueError, match="offsets is on meta, input is on cpu"):
        top_k_ragged_transform(input, starts.to("meta"), lengths, K)


def test_windows_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELMUX_CHECK", "1")
    kernelmux.reload()
    input, starts, lengths = windows(0, 0.0)
    table = torch.zeros(6, 30, dtype=torch.int32)
    with pytest.raises(ValueError, match="row 5 has start 0 and length 25, input has 24 columns"):
        top_k_ragged_transform(input, starts, lengths + (lengths == 24), K, row_starts=starts)
    with pytest.raises(ValueError, match="row_to_batch reaches from 0 to 20, src_page_table has 6 rows"):
        top_k_page_table_transform(input, table, lengths, K, row_to_batch=lengths - 4 * (lengths == 24))
    top_k_page_table_transform(input, table, lengths, K, row_starts=starts)


def test_compiled_calls_equal_eager_ones() -> None:
    input, starts, lengths = windows(3, math.nan)
    table = torch.arange(180, dtype=torch.int32).view(6, 30)

    def run(x: Tensor) -> list[Tensor]:
        values, indices = top_k(x.nan_to_num(), 3, sorted=True, tie_break=TopKTieBreak.LARGE)
        slots = top_k_page_table_transform(x, table, lengths, K, row_starts=starts, deterministic=True)
        return [values, indices, slots, top_k_ragged_transform(x, starts, lengths, K, row_starts=starts)]

    for a, b in zip(run(input), torch.compile(run, fullgraph=True, backend="aot_eager")(input), strict=True):
        assert torch.equal(a, b)
