"""Attention by the FlashAttention-2 kernel inside torch: packed keys as they are, paged ones gathered first."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kernelmux.capabilities import AttentionSpec, Batch, RunExtras, Runner, Unsupported
from kernelmux.capabilities.attention import NO_KEYS_LSE

LOG2E = math.log2(math.e)
MAX_GATHERED_BYTES = 1 << 28  # of keys and values at a time
_flash = torch.ops.aten._flash_attention_forward.default


def plan(spec: AttentionSpec, batch: Batch) -> Runner:
    """Plan one batch: a call for all of it when keys are packed, else one for each group of sequences."""
    if not spec.page_size:
        return _packed(spec, batch)
    return _gathered(spec, batch)


def _packed(spec: AttentionSpec, batch: Batch) -> Runner:
    rows = torch.arange(batch.total_q, dtype=torch.int32, device=batch.device) if spec.use_cuda_graph else None

    def run(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float, extras: RunExtras | None
    ) -> None:
        starts, bounds = (batch.qo_indptr, batch.kv_indptr), (batch.max_q_len, batch.max_kv_len)
        _attend(spec, (q, k, v), starts, bounds, out, lse, scale)
        if rows is not None:  # q may have rows of no sequence
            beyond = rows[: q.shape[0]] >= batch.qo_indptr[-1]
            out.masked_fill_(beyond[:, None, None], 0)
            if lse is not None:
                lse.masked_fill_(beyond[:, None], NO_KEYS_LSE)

    return run


@dataclass(slots=True)
class _Group:
    """Neighbouring sequences whose keys are gathered together."""

    rows: slice
    pages: Tensor  # of each key
    slots: Tensor
    starts: tuple[Tensor, Tensor]
    bounds: tuple[int, int]


def _gathered(spec: AttentionSpec, batch: Batch) -> Runner:
    if batch.q_lens is None or batch.kv_lens is None or batch.kv_indices is None:
        raise Unsupported("the lengths are not known on the host")
    groups = list(_groups(spec, batch, batch.q_lens, batch.kv_lens, batch.kv_indices))

    def run(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float, extras: RunExtras | None
    ) -> None:
        for g in groups:
            keys, values = k[g.pages, g.slots], v[g.pages, g.slots]
            sums = None if lse is None else lse[g.rows]
            _attend(spec, (q[g.rows], keys, values), g.starts, g.bounds, out[g.rows], sums, scale)

    return run


def _groups(
    spec: AttentionSpec, batch: Batch, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], indices: Tensor
) -> Iterator[_Group]:
    a_key = spec.num_kv_heads * (spec.head_dim_qk + spec.head_dim_vo) * spec.kv_dtype.itemsize
    most = max(1, MAX_GATHERED_BYTES // a_key)
    starts, first, row = batch.kv_indptr.tolist(), 0, 0
    while first < batch.size:
        last, keys = first + 1, kv_lens[first]
        while last < batch.size and keys + kv_lens[last] <= most:
            keys += kv_lens[last]
            last += 1
        q_len, kv_len = q_lens[first:last], kv_lens[first:last]
        page, slot = _places(starts[first:last], kv_len, spec.page_size)
        begins = [torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in (q_len, kv_len)]
        page, slot, *begins = (t.to(batch.device) for t in (page, slot, *begins))
        rows = slice(row, row + sum(q_len))
        yield _Group(rows, indices[page].long(), slot, (begins[0], begins[1]), (max(q_len), max(kv_len)))
        first, row = last, rows.stop


def _places(starts: list[int], kv_lens: tuple[int, ...], page_size: int) -> tuple[Tensor, Tensor]:
    """For each key of a group, where its page id stands in the index array, and its slot in that page."""
    keys = [torch.arange(n) for n in kv_lens]
    page = torch.cat([start + key // page_size for start, key in zip(starts, keys, strict=True)])
    return page, torch.cat(keys) % page_size


def _attend(
    spec: AttentionSpec,
    qkv: tuple[Tensor, Tensor, Tensor],
    starts: tuple[Tensor, Tensor],
    bounds: tuple[int, int],
    out: Tensor,
    lse: Tensor | None,
    scale: float,
) -> None:
    if qkv[1].shape[0] == 0 or bounds[1] == 0 or bounds[0] == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(NO_KEYS_LSE)
        return
    right = 0 if spec.causal else -1
    result, sums, *_ = _flash(
        *qkv, *starts, *bounds, 0.0, spec.causal, False, scale=scale, window_size_left=spec.window_left,
        window_size_right=right,
    )  # fmt: skip
    out.copy_(result)
    if lse is not None:  # natural, [heads, rows], and +inf for a row without keys
        torch.mul(sums.T.masked_fill(math.inf == sums.T, NO_KEYS_LSE), LOG2E, out=lse)
