"""Which keys a query row may see: causal, window, custom, multi-item and bidirectional masks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernelmux.capabilities.attention import AttentionSpec, Batch, RunExtras


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence of a batch, with the lengths known on the host."""

    index: int
    first_row: int  # its first row in q
    q_len: int
    kv_len: int

    @property
    def shift(self) -> int:
        """Query row i sits at key position i + shift: the masks are aligned to the bottom right."""
        return self.kv_len - self.q_len


def is_causal(spec: AttentionSpec) -> bool:
    """True when no row sees a key after its own position. A custom mask or ranges replace the causal mask."""
    return (spec.causal or spec.multi_item) and not spec.custom_mask and not spec.bidirectional


def key_span(spec: AttentionSpec, seq: Sequence, first: int, last: int) -> tuple[int, int]:
    """The half-open span of keys outside of which rows first..last-1 of a sequence see nothing."""
    start = max(0, first + seq.shift - spec.window_left) if spec.window_left >= 0 else 0
    stop = min(seq.kv_len, last + seq.shift) if is_causal(spec) else seq.kv_len
    return min(start, seq.kv_len), max(stop, min(start, seq.kv_len))


def visible(
    spec: AttentionSpec, batch: Batch, extras: RunExtras, seq: Sequence, rows: tuple[int, int], keys: tuple[int, int]
) -> Tensor | None:
    """Bool [rows, keys], True where a row sees a key; None when every row of the span sees all of its keys.

    `rows` counts from the sequence's first query row, `keys` from its first key; `keys` lies inside `key_span`.
    """
    special = spec.custom_mask or spec.multi_item or spec.bidirectional
    windowed = spec.window_left >= 0
    if not special and (not (spec.causal or windowed) or rows[1] - rows[0] == 1):
        return None
    i = torch.arange(rows[0], rows[1], device=batch.device)[:, None]
    j = torch.arange(keys[0], keys[1], device=batch.device)[None, :]
    p = i + seq.shift
    if spec.custom_mask:
        seen = _custom(batch, seq, i, j)
    elif spec.bidirectional:
        seen = _bidirectional(extras, seq, rows, p, j)
    elif is_causal(spec):
        seen = j <= p
    else:
        seen = torch.ones((), dtype=torch.bool, device=batch.device)
    if windowed:
        seen = seen & (j >= p - spec.window_left)
    if spec.multi_item:
        seen = seen & _same_item(batch, seq, p, j)
    return seen


def _custom(batch: Batch, seq: Sequence, i: Tensor, j: Tensor) -> Tensor:
    """Bits of the packed mask, least significant first, row-major over [q_len, kv_len]."""
    if batch.packed_mask is None or batch.mask_indptr is None:
        raise ValueError("custom_mask is planned but the batch has no packed_mask, pass custom_mask to plan()")
    bit = i * seq.kv_len + j
    byte = batch.packed_mask[batch.mask_indptr[seq.index].long() + bit // 8]
    return (byte >> (bit % 8).to(torch.uint8)) & 1 != 0


def _bidirectional(extras: RunExtras, seq: Sequence, rows: tuple[int, int], p: Tensor, j: Tensor) -> Tensor:
    """Causal keys inside their window, and the keys of the row's range (inclusive) inside theirs."""
    if extras.ranges is None:
        raise ValueError("bidirectional ranges are planned but run() got none, pass bidirectional_ranges to run()")
    ranges = extras.ranges[seq.first_row + rows[0] : seq.first_row + rows[1]].to(p.dtype)
    start, end = ranges[:, :1], ranges[:, 1:]
    causal = j <= p
    if extras.causal_window_left >= 0:
        causal = causal & (j >= p - extras.causal_window_left)
    within = (start >= 0) & (j >= start) & (j <= end)
    if extras.range_window_left >= 0:
        within = within & (j >= p - extras.range_window_left)
    return causal | within


def _same_item(batch: Batch, seq: Sequence, p: Tensor, j: Tensor) -> Tensor:
    """Multi-item scoring: a row past the prefix sees the prefix and its own item, the delimiter before it excluded."""
    if batch.prefix_len is None or batch.token_pos_in_items is None:
        raise ValueError("multi-item scoring is planned but the batch has no prefix_len, pass prefix_len_ptr to plan()")
    width = batch.token_pos_in_items_len
    prefix = batch.prefix_len[seq.index].to(p.dtype)
    at = p - prefix
    if width == 0:
        back = torch.zeros_like(at)
    else:
        table = batch.token_pos_in_items[seq.index * width : (seq.index + 1) * width].to(p.dtype)
        back = table[at.clamp(0, width - 1)].masked_fill((at < 0) | (at >= width), 0)
    return (at < 0) | (j < prefix) | (p < j + back)
