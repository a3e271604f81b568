"""Paged caches in plain torch: where a token goes, and writing it there."""

import torch
from torch import Tensor


def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sequence and position of each of `nnz` appended tokens: the last ones of their sequences; -1 and 0 past them."""
    token = torch.arange(nnz, device=append_indptr.device)
    ends = append_indptr[1:].long()
    batch = torch.searchsorted(ends, token, right=True)
    if ends.shape[0] == 0:
        place = torch.zeros_like(token)
        batch = place - 1
    else:
        inside = batch < ends.shape[0]
        row = batch.clamp(max=ends.shape[0] - 1)
        place = torch.where(inside, seq_lens[row].long() - ends[row] + token, 0)
        batch = torch.where(inside, batch, -1)
    results = (batch.int(), place.int())
    for out, value in zip((batch_indices, positions), results, strict=True):
        if out is not None:
            out[:nnz] = value
    return (
        results[0] if batch_indices is None else batch_indices,
        results[1] if positions is None else positions,
    )


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
) -> None:
    """Write token t to page kv_indices[kv_indptr[b] + positions[t] // page_size], slot positions[t] % page_size.

    Caches are [pages, page_size, heads, dim] of any strides. A token with a negative b is dropped.
    """
    slots = page_slots(batch_indices, positions, kv_indices, kv_indptr, k_cache.shape[1])
    write_slots(k_cache, slots, append_key)
    write_slots(v_cache, slots, append_value)


def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor | None,
    kpe_cache: Tensor | None,
    kv_indices: Tensor,
    kv_indptr: Tensor,
) -> None:
    """As append_paged_kv_cache, for caches [pages, page_size, dim]; a part without a cache is left out."""
    for cache, value in ((ckv_cache, append_ckv), (kpe_cache, append_kpe)):
        if cache is not None:
            write_slots(cache, page_slots(batch_indices, positions, kv_indices, kv_indptr, cache.shape[1]), value)


def page_slots(
    batch_indices: Tensor, positions: Tensor, kv_indices: Tensor, kv_indptr: Tensor, page_size: int
) -> Tensor:
    """int64 [tokens]: page * page_size + entry of each token, negative for one that goes nowhere."""
    if kv_indices.numel() == 0:
        return torch.full_like(positions, -1, dtype=torch.int64)
    used = (batch_indices >= 0) & (positions >= 0)
    at = torch.where(used, positions, 0).long()
    entry = kv_indptr[batch_indices.clamp(min=0).long()].long() + at // page_size
    page = kv_indices[torch.where(used, entry, 0)].long()
    return torch.where(used & (page >= 0), page * page_size + at % page_size, -1)


def write_slots(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    """cache[slot // page_size, slot % page_size] = value, for slots that are not negative. No host sync.

    A dropped token repeats the write of a kept one; with none to repeat, it rewrites what an entry holds.
    """
    if slots.numel() == 0 or cache.numel() == 0:
        return
    if cache.dtype.itemsize == 1:  # index_put of 8-bit floats is not there everywhere: move bytes
        cache, values = cache.view(torch.uint8), values.view(torch.uint8)
    kept = slots >= 0
    source = torch.where(kept, torch.arange(slots.shape[0], device=slots.device), kept.int().argmax())
    slot = slots[source].clamp(min=0)
    place = (slot // cache.shape[1], slot % cache.shape[1])
    cache[place] = torch.where(kept.any(), values[source], cache[place])
