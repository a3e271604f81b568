"""Attention by torch's scaled_dot_product_attention, a sequence at a time: exact keys, no memory beyond one sequence.

The query heads of a group become rows over one key head. Rows go in chunks, each over the keys that it can see, so
causal masks skip what they hide, and the mask itself stays small.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernelmux.capabilities import AttentionSpec, Batch, RunExtras, Runner, Unsupported
from kernelmux.capabilities.attention import NO_KEYS_LSE

LOG2E = math.log2(math.e)
CHUNK_ROWS = 256
_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(slots=True)
class _Sequence:
    first_row: int
    q_len: int
    kv_len: int
    place: Tensor | slice  # page ids, or rows of k
    blind: int  # leading rows that see no key


def plan(spec: AttentionSpec, batch: Batch) -> Runner:
    """Plan one batch whose lengths the host knows; the result computes it sequence by sequence."""
    if batch.q_lens is None or batch.kv_lens is None:
        raise Unsupported("the lengths are not known on the host")
    sequences = list(_sequences(spec, batch, batch.q_lens, batch.kv_lens))

    def run(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float, extras: RunExtras | None
    ) -> None:
        for seq in sequences:
            if seq.blind:
                blind = slice(seq.first_row, seq.first_row + seq.blind)
                out[blind] = 0
                if lse is not None:
                    lse[blind] = NO_KEYS_LSE
            if seq.blind < seq.q_len:
                keys, values = (_keys(t, seq) for t in (k, v))
                for first in range(seq.blind, seq.q_len, CHUNK_ROWS):
                    _chunk(spec, seq, (first, min(first + CHUNK_ROWS, seq.q_len)), (q, keys, values), out, lse, scale)

    return run


def _sequences(
    spec: AttentionSpec, batch: Batch, q_lens: tuple[int, ...], kv_lens: tuple[int, ...]
) -> Iterator[_Sequence]:
    row, starts = 0, batch.kv_indptr.tolist()
    for q_len, kv_len, start, stop in zip(q_lens, kv_lens, starts, starts[1:], strict=False):
        blind = max(0, q_len - kv_len) if spec.causal or kv_len == 0 else 0
        place: Tensor | slice = slice(start, start + kv_len)
        if spec.page_size and batch.kv_indices is not None:
            place = batch.kv_indices[start:stop].long()
        yield _Sequence(row, q_len, kv_len, place, blind)
        row += q_len


def _keys(cache: Tensor, seq: _Sequence) -> Tensor:
    """[kv heads, keys, dim]: exactly the sequence's keys, so that nothing beside them matters."""
    rows = cache[seq.place]
    return (rows.flatten(0, 1)[: seq.kv_len] if isinstance(seq.place, Tensor) else rows).transpose(0, 1)


def _chunk(
    spec: AttentionSpec,
    seq: _Sequence,
    rows: tuple[int, int],
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor | None,
    scale: float,
) -> None:
    q, k, v = qkv
    at = slice(seq.first_row + rows[0], seq.first_row + rows[1])
    shift, n = seq.kv_len - seq.q_len, rows[1] - rows[0]
    start = max(0, rows[0] + shift - spec.window_left) if spec.window_left >= 0 else 0
    stop = rows[1] + shift if spec.causal else seq.kv_len
    heads = (spec.num_kv_heads, spec.group_size)
    folded = q[at].unflatten(1, heads).permute(1, 2, 0, 3).flatten(1, 2)
    mask = _mask(spec, rows, shift, (start, stop), q) if n > 1 else None
    arguments = (folded[None], k[None, :, start:stop], v[None, :, start:stop])
    if q.device.type == "cpu":
        result, sums = _on_cpu(*arguments, 0.0, False, attn_mask=mask, scale=scale)
    else:
        result, sums = scaled_dot_product_attention(*arguments, attn_mask=mask, scale=scale), None
    out[at] = result[0].unflatten(1, (-1, n)).permute(2, 0, 1, 3).flatten(1, 2)
    if lse is not None and sums is not None:
        torch.mul(sums[0].unflatten(1, (-1, n)).permute(2, 0, 1).flatten(1, 2), LOG2E, out=lse[at])


def _mask(spec: AttentionSpec, rows: tuple[int, int], shift: int, keys: tuple[int, int], q: Tensor) -> Tensor | None:
    """[group * rows, keys]: what is added to the scores, or None when every row sees all of these keys."""
    if not spec.causal and spec.window_left < 0:
        return None
    p = torch.arange(rows[0] + shift, rows[1] + shift, device=q.device)[:, None]
    j = torch.arange(*keys, device=q.device)
    hidden = j > p if spec.causal else torch.zeros((), dtype=torch.bool, device=q.device)
    if spec.window_left >= 0:
        hidden = hidden | (j < p - spec.window_left)
    mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -math.inf)
    return mask.repeat(spec.group_size, 1)
