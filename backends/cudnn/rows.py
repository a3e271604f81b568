"""Rows without keys: cuDNN leaves some of them unwritten when a sequence has several query rows."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernelmux.capabilities import AttentionSpec, Batch
from kernelmux.capabilities.attention import NO_KEYS_LSE

Fix = Callable[[Tensor, "Tensor | None"], None]  # sets out to 0 and lse to -inf in such rows


def keyless_rows(spec: AttentionSpec, batch: Batch, packed: bool) -> Fix | None:
    """What completes the results of a batch, or None when every row sees a key.

    Causal masks are aligned to the bottom right, so a sequence with fewer keys than query rows starts with rows that
    see none. In graph mode the lengths are read on the device at every run.
    """
    if batch.q_lens is not None and batch.kv_lens is not None:
        return _known(spec, batch, batch.q_lens, batch.kv_lens)
    return _packed(spec, batch) if packed else _dense(spec, batch)


def _known(spec: AttentionSpec, batch: Batch, q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> Fix | None:
    rows: list[int] = []
    first = 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        none = max(0, q_len - kv_len) if spec.causal or kv_len == 0 else 0
        rows += range(first, first + none)
        first += q_len
    if not rows:
        return None
    at = torch.tensor(rows, dtype=torch.int64, device=batch.device)

    def fix(out: Tensor, lse: Tensor | None) -> None:
        out.index_fill_(0, at, 0)
        if lse is not None:
            lse.index_fill_(0, at, NO_KEYS_LSE)

    return fix


def _dense(spec: AttentionSpec, batch: Batch) -> Fix:
    q_len, kv_len = batch.total_q // batch.size, batch.kv_len()
    row = torch.arange(q_len, dtype=torch.int32, device=batch.device)

    def fix(out: Tensor, lse: Tensor | None) -> None:
        last = q_len - kv_len if spec.causal else (kv_len == 0) * q_len
        _fill((row < last[:, None]).flatten(), out, lse)

    return fix


def _packed(spec: AttentionSpec, batch: Batch) -> Fix:
    end, kv_len = batch.qo_indptr[1:], batch.kv_len()
    rows = torch.arange(batch.total_q, dtype=torch.int32, device=batch.device)

    def fix(out: Tensor, lse: Tensor | None) -> None:
        row = rows[: out.shape[0]]
        sequence = torch.searchsorted(end, row, right=True).clamp_(max=batch.size - 1)
        first = end - kv_len if spec.causal else end.masked_fill(kv_len > 0, 0)
        _fill((row < first[sequence]) | (row >= end[-1]), out, lse)

    return fix


def _fill(mask: Tensor, out: Tensor, lse: Tensor | None) -> None:
    out.masked_fill_(mask[:, None, None], 0)
    if lse is not None:
        lse.masked_fill_(mask[:, None], NO_KEYS_LSE)
