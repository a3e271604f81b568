"""Attention in plain torch: its meaning, the oracle of every kernel's test, and the kernel that always works."""

import math
from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from kernelmux.capabilities.attention import AttentionSpec, Batch, RunExtras, Runner
from kernelmux.dispatch.attention.kv_formats import gather
from kernelmux.dispatch.attention.mask import Sequence, key_span, visible
from kernelmux.dispatch.attention.position import alibi_slopes, rotate

MAX_SCORES = 1 << 25  # elements of one score tensor: query rows are taken in chunks that stay below it
LOG2E = math.log2(math.e)


def reference(spec: AttentionSpec, batch: Batch) -> Runner:
    """Plan attention over one batch; the result computes it.

    For each sequence: s = q·k * sm_scale (+ ALiBi) (soft-capped), keys outside the mask dropped, out = softmax(s)·v,
    lse = log2 Σ exp(s). Computes in float64 when q is float64, else in float32; differentiable in q, k, v and the
    scales. Lengths are read from the index tensors, with a host sync, only when the batch holds no host copies.
    """
    if spec.pos_encoding == "ROPE_LLAMA" and spec.head_dim_qk % 2:
        raise ValueError(f"head_dim_qk is {spec.head_dim_qk}, rotary embedding needs an even one; rotate beforehand")

    def run(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, sm_scale: float, extras: RunExtras | None
    ) -> None:
        done = 0
        for seq in _sequences(batch):
            _fill(out, lse, done, seq.first_row)
            _attend_sequence(spec, batch, extras or RunExtras(), seq, (q, k, v), (out, lse), sm_scale)
            done = seq.first_row + seq.q_len
        _fill(out, lse, done, out.shape[0])

    return run


def _sequences(batch: Batch) -> Iterator[Sequence]:
    """Sequences in order. In graph mode the lengths are read anew, as the buffers may have been rewritten."""
    if batch.q_lens is not None and batch.kv_lens is not None:
        q_lens, kv_lens = batch.q_lens, batch.kv_lens
        first_rows: Iterator[int] | list[int] = accumulate(q_lens, initial=0)
    else:
        first_rows = batch.qo_indptr.tolist()
        q_lens = tuple((batch.qo_indptr[1:] - batch.qo_indptr[:-1]).tolist())
        kv_lens = tuple(_kv_lens(batch).tolist())
    for index, (row, q_len, kv_len) in enumerate(zip(first_rows, q_lens, kv_lens, strict=False)):
        yield Sequence(index, row, q_len, kv_len)


def _kv_lens(batch: Batch) -> Tensor:
    count = batch.kv_indptr[1:] - batch.kv_indptr[:-1]
    if batch.page_size == 0 or batch.last_page_len is None:
        return count
    return ((count - 1) * batch.page_size + batch.last_page_len).masked_fill(count <= 0, 0)


def _fill(out: Tensor, lse: Tensor | None, first: int, last: int) -> None:
    """Rows that belong to no sequence see no keys."""
    if last > first:
        out[first:last] = 0
        if lse is not None:
            lse[first:last] = -math.inf


def _attend_sequence(
    spec: AttentionSpec,
    batch: Batch,
    extras: RunExtras,
    seq: Sequence,
    qkv: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor | None],
    sm_scale: float,
) -> None:
    """Compute the rows of one sequence, a chunk of rows at a time."""
    if seq.q_len == 0:
        return
    q, k, v = qkv
    out, lse = results
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    span = key_span(spec, seq, 0, seq.q_len)
    k = _keys(spec, gather(k, extras.k_sf, batch, seq.index, span, dtype), span)
    v = gather(v, extras.v_sf, batch, seq.index, span, dtype).transpose(0, 1)
    step = max(1, MAX_SCORES // (spec.num_qo_heads * max(1, span[1] - span[0])))
    for first in range(0, seq.q_len, step):
        rows = (first, min(first + step, seq.q_len))
        keys = key_span(spec, seq, *rows)
        here = slice(keys[0] - span[0], keys[1] - span[0])
        at = slice(seq.first_row + rows[0], seq.first_row + rows[1])
        queries = _queries(spec, extras, q[at].to(dtype), sm_scale, rows[0] + seq.shift)
        seen = visible(spec, batch, extras, seq, rows, keys)
        scores = _scores(spec, queries, k[:, here], seen, rows, keys)
        o, log_sum = _softmax(scores, v[:, here], seen, _heads(spec, extras.sinks, dtype))
        if extras.scale_v is not None:
            o = o * extras.scale_v.to(dtype)[:, None, None, None]
        out[at] = _rounded(o.permute(2, 0, 1, 3).flatten(1, 2), out.dtype)
        if lse is not None:
            lse[at] = log_sum.permute(2, 0, 1).flatten(1, 2).to(lse.dtype)


def _rounded(o: Tensor, dtype: torch.dtype) -> Tensor:
    """One rounding to the output type; 8-bit floats saturate."""
    return o.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype) if dtype.itemsize == 1 else o.to(dtype)


def _keys(spec: AttentionSpec, k: Tensor, span: tuple[int, int]) -> Tensor:
    """[kv heads, n, dim]: keys, rotated when the cache holds them unrotated."""
    if spec.pos_encoding == "ROPE_LLAMA":
        k = rotate(k, torch.arange(*span, device=k.device), spec.rope_scale, spec.rope_theta)
    return k.transpose(0, 1)


def _queries(spec: AttentionSpec, extras: RunExtras, q: Tensor, sm_scale: float, position: int) -> Tensor:
    """[kv heads, group, rows, dim]: queries, rotated, with every factor of the scores multiplied in."""
    if spec.pos_encoding == "ROPE_LLAMA":
        positions = torch.arange(position, position + q.shape[0], device=q.device)
        q = rotate(q, positions, spec.rope_scale, spec.rope_theta)
    q = q * sm_scale
    if extras.qk_scale is not None:
        q = q * extras.qk_scale.to(q.dtype)
    q = q.unflatten(1, (spec.num_kv_heads, spec.group_size)).permute(1, 2, 0, 3)
    if extras.scale_q is not None:
        q = q * extras.scale_q.to(q.dtype).view(spec.num_kv_heads, spec.group_size, 1, 1)
    if extras.scale_k is not None:
        q = q * extras.scale_k.to(q.dtype).view(spec.num_kv_heads, 1, 1, 1)
    return q


def _heads(spec: AttentionSpec, per_head: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A value per query head as [kv heads, group, 1], to broadcast over rows."""
    return None if per_head is None else per_head.to(dtype).view(spec.num_kv_heads, spec.group_size, 1)


def _scores(
    spec: AttentionSpec, q: Tensor, k: Tensor, seen: Tensor | None, rows: tuple[int, int], keys: tuple[int, int]
) -> Tensor:
    """[kv heads, group, rows, n]: final logits in natural units, -inf where a row does not see a key."""
    s = (q.flatten(1, 2) @ k.transpose(1, 2)).unflatten(1, q.shape[1:3])
    if spec.pos_encoding == "ALIBI":
        slopes = torch.tensor(alibi_slopes(spec.num_qo_heads), dtype=s.dtype, device=s.device)
        i = torch.arange(*rows, dtype=s.dtype, device=s.device)[:, None]
        j = torch.arange(*keys, dtype=s.dtype, device=s.device)
        s = s + slopes.view(spec.num_kv_heads, spec.group_size, 1, 1) * (j - i)
    if spec.soft_cap > 0:
        s = spec.soft_cap * torch.tanh(s / spec.soft_cap)
    return s if seen is None else s.masked_fill(~seen, -math.inf)


def _softmax(s: Tensor, v: Tensor, seen: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weighted values [kv heads, group, rows, dim] and base-2 log-sum-exp [kv heads, group, rows]."""
    peak = s.detach().amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)
    if sinks is not None:
        peak = torch.maximum(peak, sinks.detach())
    peak = peak.masked_fill(peak == -math.inf, 0)
    weights = (s - peak[..., None]).exp()
    total = weights.sum(-1)
    if sinks is not None:
        total = total + (sinks - peak).exp()
    values = (weights.flatten(1, 2) @ v).unflatten(1, s.shape[1:3])
    if seen is not None and not torch.isfinite(values).all():
        values = _without_unseen(weights, v, seen)
    return values / total.masked_fill(total == 0, 1)[..., None], (peak + total.log()) * LOG2E


def _without_unseen(weights: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """weights·v when v holds NaN or infinities: 0 * NaN is NaN, and yet a row must not feel a key it does not see."""
    values = (weights.flatten(1, 2) @ v.nan_to_num(0, 0, 0)).unflatten(1, weights.shape[1:3])
    kinds = torch.cat((v == math.inf, v == -math.inf, v.isnan()), dim=-1).to(v.dtype)
    up, down, nan = ((seen.to(v.dtype) @ kinds)[:, None] > 0).chunk(3, dim=-1)
    for felt, value in ((up, math.inf), (down, -math.inf), (nan, math.nan)):
        values = values + torch.where(felt, value, values.new_zeros(()))
    return values
