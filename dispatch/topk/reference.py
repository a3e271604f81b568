"""Top-k selection in plain torch: exact, NaN counted as the largest value."""

import math

import torch
from torch import Tensor

_SMALL, _LARGE = 1, 2  # TopKTieBreak


def top_k(
    input: Tensor,
    k: int,
    sorted: bool,
    deterministic: bool,
    tie_break: int,
    values: Tensor | None = None,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their columns, int64.

    Without `sorted` and `deterministic` any order will do; this one sorts, and with a tie break puts equal values
    in the order of their indices.
    """
    if tie_break == _LARGE:
        found, at = input.flip(-1).sort(dim=-1, descending=True, stable=True)
        found, at = found[:, :k], input.shape[1] - 1 - at[:, :k]
    elif tie_break == _SMALL or deterministic:
        found, at = (part[:, :k] for part in input.sort(dim=-1, descending=True, stable=True))
    else:
        found, at = input.topk(k, dim=-1, sorted=sorted)
    return found if values is None else values.copy_(found), at if indices is None else indices.copy_(at)


def top_k_page_table_transform(
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
    out_raw_indices: Tensor | None = None,
) -> Tensor:
    """Select positions, then look them up: table[b, start + p // page_size] * page_size + p % page_size."""
    at = positions(input, lengths, k, tie_break, row_starts)
    if out_raw_indices is not None:
        out_raw_indices.copy_(at)
    if src_page_table.numel() == 0:  # no row has a length
        return out.copy_(at)
    batch = torch.arange(input.shape[0], device=input.device) if row_to_batch is None else row_to_batch.long()
    column = at // page_size
    if page_table_row_starts is not None:
        column = column + page_table_row_starts.long()[:, None]
    page = src_page_table[batch[:, None], column.masked_fill(at < 0, 0)].long()
    return out.copy_((page * page_size + at % page_size).masked_fill(at < 0, -1))


def top_k_ragged_transform(
    input: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    k: int,
    deterministic: bool,
    tie_break: int,
    row_starts: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Select positions, then add offsets[row]."""
    at = positions(input, lengths, k, tie_break, row_starts)
    return out.copy_((at + offsets.long()[:, None]).masked_fill(at < 0, -1))


def positions(input: Tensor, lengths: Tensor, k: int, tie_break: int, row_starts: Tensor | None) -> Tensor:
    """The top-k columns of [start, start + length), counted from start: int64 [rows, k], -1 where there are none left.

    A row with length <= k gives 0, 1, …, length - 1. Ties are broken as TopKTieBreak says, NONE like SMALL. Values
    outside the window are not looked at.
    """
    rows, width = input.shape
    place = torch.arange(max(width, k), device=input.device)
    length = lengths.long()[:, None]
    first = place[:k].expand(rows, k)
    if width == 0:
        return torch.full_like(first, -1)
    window = length - 1 - place[:width] if tie_break == _LARGE else place[:width].expand(rows, width)
    start = 0 if row_starts is None else row_starts.long()[:, None]
    values = input.gather(1, (window + start).clamp(0, width - 1))
    values = values.masked_fill(place[:width] >= length, -math.inf)  # after all within, ties with -inf included
    order = values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = torch.nn.functional.pad(window.gather(1, order), (0, k - order.shape[1]), value=-1)
    return torch.where(length <= k, first.where(first < length, -1), chosen)
