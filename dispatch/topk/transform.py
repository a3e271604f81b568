"""top_k_page_table_transform, top_k_ragged_transform: select the keys of sparse attention."""

from typing import Any

import torch
from torch import Tensor

from kernelmux.capabilities import Request
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.topk import reference
from kernelmux.dispatch.topk.arguments import (
    check_choice,
    check_out,
    check_scores,
    choice_features,
    layout,
    layout_features,
    page_table,
    row_values,
)
from kernelmux.dispatch.topk.tie import TopKTieBreak


def _request(op: str, input: Tensor, k: int, page_size: int, features: set[str], **used: Tensor | None) -> Request:
    return Request(
        op=op,
        family="topk",
        device=input.device,
        dtypes={"input": input.dtype},
        dims={"rows": input.shape[0], "columns": input.shape[1], "k": k, "page_size": page_size},
        features=frozenset(features | layout_features(input) | {n for n, v in used.items() if v is not None}),
        empty=input.shape[0] == 0,
    )


def _describe_pages(
    input: Tensor,
    src_page_table: Tensor,
    lengths: Tensor,
    k: int,
    row_to_batch: Tensor | None,
    deterministic: bool,
    tie_break: int,
    row_starts: Tensor | None,
    page_table_row_starts: Tensor | None,
    page_size: int,
    out: Tensor,
    out_raw_indices: Tensor | None,
) -> Request:
    features = choice_features(deterministic, tie_break)
    if not (out.is_contiguous() and (out_raw_indices is None or out_raw_indices.is_contiguous())):
        features.add("strided")
    return _request(
        "top_k_page_table_transform", input, k, page_size, features, row_to_batch=row_to_batch, row_starts=row_starts,
        page_table_row_starts=page_table_row_starts, raw_indices=out_raw_indices,
    )  # fmt: skip


def _describe_ragged(
    input: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    k: int,
    deterministic: bool,
    tie_break: int,
    row_starts: Tensor | None,
    out: Tensor,
) -> Request:
    features = choice_features(deterministic, tie_break)
    return _request("top_k_ragged_transform", input, k, 1, features, row_starts=row_starts)


def _check_windows(input: Tensor, lengths: Tensor, row_starts: Tensor | None) -> None:
    """Deep check, KERNELMUX_CHECK=1: each row's window lies inside the row."""
    start = torch.zeros_like(lengths) if row_starts is None else row_starts
    wrong = ((lengths < 0) | (start < 0) | (start.long() + lengths > input.shape[1])).nonzero()
    if len(wrong):
        row = int(wrong[0])
        text = f"row {row} has start {int(start[row])} and length {int(lengths[row])}"
        raise ValueError(f"{text}, input has {input.shape[1]} columns; correct lengths or row_starts")


def _check_pages(input: Tensor, table: Tensor, lengths: Tensor, k: int, batch: Any, deterministic: bool, tie: int,
                 row_starts: Tensor | None, *rest: Any) -> None:  # fmt: skip
    _check_windows(input, lengths, row_starts)
    if batch is not None and batch.numel() and not 0 <= int(batch.min()) <= int(batch.max()) < table.shape[0]:
        raise ValueError(f"row_to_batch reaches from {int(batch.min())} to {int(batch.max())}, src_page_table has "
                         f"{table.shape[0]} rows; correct it")  # fmt: skip


def _check_ragged(input: Tensor, offsets: Tensor, lengths: Tensor, k: int, deterministic: bool, tie: int,
                  row_starts: Tensor | None, out: Tensor) -> None:  # fmt: skip
    _check_windows(input, lengths, row_starts)


PAGE_TABLE = Op(
    "top_k_page_table_transform",
    "topk",
    reference.top_k_page_table_transform,
    _describe_pages,
    growing=("rows", "columns"),
    dims=("k", "page_size"),
    roles=("input",),
    features=("row_to_batch", "row_starts", "page_table_row_starts", "raw_indices", "deterministic", "tie_break",
              "strided", "unaligned"),
    schema="(Tensor input, Tensor src_page_table, Tensor lengths, int k, Tensor? row_to_batch, bool deterministic, "
    "int tie_break, Tensor? row_starts, Tensor? page_table_row_starts, int page_size, Tensor(a!) out, "
    "Tensor(b!)? out_raw_indices) -> ()",
    check=_check_pages,
)  # fmt: skip
RAGGED = Op(
    "top_k_ragged_transform",
    "topk",
    reference.top_k_ragged_transform,
    _describe_ragged,
    growing=("rows", "columns"),
    dims=("k", "page_size"),
    roles=("input",),
    features=("row_starts", "deterministic", "tie_break", "strided", "unaligned"),
    schema="(Tensor input, Tensor offsets, Tensor lengths, int k, bool deterministic, int tie_break, "
    "Tensor? row_starts, Tensor(a!) out) -> ()",
    check=_check_ragged,
)


def top_k_page_table_transform(
    input: Tensor,
    src_page_table: Tensor,
    lengths: Tensor,
    k: int,
    row_to_batch: Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: Tensor | None = None,
    page_table_row_starts: Tensor | None = None,
    *,
    page_size: int = 1,
    out: Tensor | None = None,
    out_raw_indices: Tensor | None = None,
) -> Tensor:
    """Find the top-k positions of each row's window, and look up their slots in a page table.

    Row r selects among the columns row_starts[r] + p, p = 0 … lengths[r] - 1. A selected p becomes
    `table[b, s + p // page_size] * page_size + p % page_size`, with b = row_to_batch[r] (or r) and
    s = page_table_row_starts[r]. With lengths[r] <= k, the slots of p = 0, 1, … come in order, then -1.

    Args:
        input: scores [rows, max_len], any strides, float16, bfloat16, float32 or float64. Scores outside a row's window
            are not looked at.
        src_page_table: page ids [batch, pages], int32.
        lengths: [rows], int32; for these and the next four int64 is converted.
        k: at least 1; may exceed max_len.
        row_to_batch: [rows], the row of src_page_table; None: the same row.
        deterministic, tie_break, dsa_graph_safe: as in `top_k`.
        row_starts: [rows], the first column of each window; None: 0.
        page_table_row_starts: [rows], the table entry of p = 0; None: row_starts (which with page_size > 1 must be
            given explicitly, as it counts pages).
        page_size: a power of two.
        out: int32 [rows, k] to write the result into.
        out_raw_indices: int32 [rows, k] to write the positions p into, -1 after the last.

    Returns:
        int32 [rows, k].

    Raises:
        ValueError, TypeError: for shapes, dtypes, devices or numbers that do not fit.

    Source: FlashInfer's function of this name.

    >>> import torch
    >>> table = torch.tensor([[7, 5]], dtype=torch.int32)
    >>> scores, length = torch.tensor([[0.1, 0.9, 0.2, 0.8]]), torch.tensor([4], dtype=torch.int32)
    >>> top_k_page_table_transform(scores, table, length, 2, deterministic=True, page_size=2).tolist()
    [[15, 11]]
    """
    check_scores(input)
    tie_break = check_choice(input, k, tie_break)
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size is {page_size}, it must be a power of two; choose one")
    if row_starts is not None and page_table_row_starts is None and page_size > 1:
        raise ValueError(
            f"page_table_row_starts is None with row_starts and page_size {page_size}; give the table entry of each "
            "row's first position"
        )
    lengths, batch = row_values("lengths", lengths, input), row_values("row_to_batch", row_to_batch, input)
    starts = row_values("row_starts", row_starts, input)
    entries = row_values("page_table_row_starts", page_table_row_starts, input)
    table = page_table(src_page_table, batch, input)
    check_out("out", out, input, k)
    check_out("out_raw_indices", out_raw_indices, input, k)
    result = torch.empty(input.shape[0], k, dtype=torch.int32, device=input.device) if out is None else out
    args = (input, table, lengths, k, batch, bool(deterministic), tie_break, starts,
            starts if entries is None else entries, page_size, result, out_raw_indices)  # fmt: skip
    if torch.compiler.is_compiling():
        torch.ops.kernelmux.top_k_page_table_transform(*args)
    else:
        _pages(*args)
    return result


def _pages(*args: Any) -> None:
    input, _, _, k, batch, deterministic, tie_break, starts, entries, page_size, out, raw = args
    key = (layout(input), k, deterministic, tie_break, page_size, batch is None, starts is None, entries is None,
           out.is_contiguous(), raw is None or raw.is_contiguous(), raw is None,
           PAGE_TABLE.bucket(input.shape[0], input.shape[1]), PREFER.get())  # fmt: skip
    run = PAGE_TABLE.cache.get(key) or PAGE_TABLE.pick(key, args)
    run(*args)


def top_k_ragged_transform(
    input: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: Tensor | None = None,
) -> Tensor:
    """Find the top-k positions of each row's window, and add an offset per row.

    Row r selects among the columns row_starts[r] + p, p = 0 … lengths[r] - 1, and gives p + offsets[r]. With
    lengths[r] <= k, p = 0, 1, … come in order, then -1.

    Args:
        input: scores [rows, max_len], any strides, float16, bfloat16, float32 or float64. Scores outside a row's window
            are not looked at.
        offsets, lengths: [rows], int32 (int64 is converted).
        k: at least 1; may exceed max_len.
        deterministic, tie_break, dsa_graph_safe: as in `top_k`.
        row_starts: [rows], the first column of each window; None: 0.

    Returns:
        int32 [rows, k].

    Raises:
        ValueError, TypeError: for shapes, dtypes, devices or numbers that do not fit.

    Source: FlashInfer's function of this name.

    >>> import torch
    >>> offset, length = torch.tensor([100], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    >>> top_k_ragged_transform(torch.tensor([[0.1, 0.9, 0.2, 0.8]]), offset, length, 1).tolist()
    [[101]]
    """
    check_scores(input)
    tie_break = check_choice(input, k, tie_break)
    out = torch.empty(input.shape[0], k, dtype=torch.int32, device=input.device)
    args = (input, row_values("offsets", offsets, input), row_values("lengths", lengths, input), k,
            bool(deterministic), tie_break, row_values("row_starts", row_starts, input), out)  # fmt: skip
    if torch.compiler.is_compiling():
        torch.ops.kernelmux.top_k_ragged_transform(*args)
    else:
        _ragged(*args)
    return out


def _ragged(*args: Any) -> None:
    input, _, _, k, deterministic, tie_break, starts, _ = args
    key = (layout(input), k, deterministic, tie_break, starts is None,
           RAGGED.bucket(input.shape[0], input.shape[1]), PREFER.get())  # fmt: skip
    run = RAGGED.cache.get(key) or RAGGED.pick(key, args)
    run(*args)


PAGE_TABLE.eager = _pages
RAGGED.eager = _ragged
