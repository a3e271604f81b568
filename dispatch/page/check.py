"""Deep checks of page tables and offsets. They read tensors on the host, so only KERNELMUX_CHECK=1 runs them."""

import torch
from torch import Tensor


def check_page_metadata(
    num_pages: int,
    page_size: int,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_page_len: Tensor | None = None,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> None:
    """Check that a page table stays inside its cache, and that tokens to be appended stay inside the page table.

    Args:
        num_pages, page_size: of the cache.
        kv_indptr: [batch + 1], offsets into kv_indices.
        kv_indices: [kv_indptr[-1] or more], page ids; those past kv_indptr[-1] are not looked at.
        last_page_len: [batch], 1..page_size for a sequence that has pages.
        batch_indices, positions: [tokens]; tokens with a negative batch index are not looked at.

    Raises:
        ValueError: naming the first wrong value.

    >>> import torch
    >>> check_page_metadata(4, 16, torch.tensor([0, 1]), torch.tensor([9]))
    Traceback (most recent call last):
    ...
    ValueError: kv_indices[0] is 9, the cache has pages 0..3; correct the page table
    """
    if kv_indptr.ndim != 1 or kv_indptr.numel() == 0:
        raise ValueError(f"kv_indptr has shape {list(kv_indptr.shape)}, it must be [batch + 1]; give offsets")
    indptr = check_offsets("kv_indptr", kv_indptr, kv_indices.numel(), "kv_indices")
    pages = kv_indices.cpu().long()
    counts = indptr[1:] - indptr[:-1]
    pages = pages[: int(indptr[-1])]
    wrong = (pages < 0) | (pages >= num_pages)
    _first("kv_indices", pages, wrong, f"the cache has pages 0..{num_pages - 1}; correct the page table")
    if last_page_len is not None:
        _check_last(last_page_len.cpu().long(), counts, page_size)
    if batch_indices is not None and positions is not None:
        _check_tokens(batch_indices.cpu().long(), positions.cpu().long(), counts * page_size)


def check_offsets(name: str, indptr: Tensor, entries: int, of: str) -> Tensor:
    """Return `indptr` on the host.

    Raises:
        ValueError: unless it starts at 0 or later, never falls, and ends inside the `entries` of `of`.
    """
    offsets = indptr.cpu().long()
    _first(name, offsets, offsets < 0, "it must not be negative; correct the offsets")
    fall = "less than the offset before it; correct the offsets"
    _first(name, offsets[1:], offsets[1:] < offsets[:-1], fall, shift=1)
    if offsets.numel() and int(offsets[-1]) > entries:
        raise ValueError(f"{name}[-1] is {int(offsets[-1])}, {of} has {entries} entries; pass all of {of}")
    return offsets


def _check_last(last: Tensor, counts: Tensor, page_size: int) -> None:
    if last.shape != counts.shape:
        raise ValueError(
            f"kv_last_page_len has shape {list(last.shape)}, kv_indptr describes {counts.numel()} sequences; "
            "give one length per sequence"
        )
    wrong = (counts > 0) & ((last < 1) | (last > page_size))
    _first("kv_last_page_len", last, wrong, f"it must be 1..{page_size} for a sequence that has pages; correct it")


def _check_tokens(batch: Tensor, positions: Tensor, capacity: Tensor) -> None:
    count = capacity.numel()
    _first("batch_indices", batch, batch >= count, f"kv_indptr describes {count} sequences; correct it")
    used = batch >= 0
    limit = torch.where(used, capacity[batch.clamp(min=0)], 0) if count else torch.zeros_like(batch)
    wrong = used & ((positions < 0) | (positions >= limit))
    at = int(wrong.int().argmax()) if wrong.numel() else 0
    if bool(wrong.any()):
        room = f"sequence {int(batch[at])} has pages for {int(limit[at])} tokens"
        raise ValueError(f"positions[{at}] is {int(positions[at])}, {room}; add the new tokens to the page table first")


def _first(name: str, values: Tensor, wrong: Tensor, limit: str, shift: int = 0) -> None:
    """Raise for the first value that is wrong. `shift`: its index in the caller's tensor minus that in `values`."""
    if bool(wrong.any()):
        at = int(wrong.int().argmax())
        raise ValueError(f"{name}[{at + shift}] is {int(values[at])}, {limit}")
