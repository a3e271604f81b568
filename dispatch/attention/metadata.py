"""Index tensors given to plan(): read once on the host, checked, and brought to the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernelmux.capabilities import dtype_name

_CPU = torch.device("cpu")


@dataclass(slots=True)
class Lengths:
    """What the host knows of a batch. Tensors are int32 on the CPU."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    last_page_len: Tensor | None
    q_len: Tensor
    kv_len: Tensor
    max_q_len: int
    max_kv_len: int
    total_q: int
    total_kv: int  # pages, or rows of k when ragged

    @property
    def size(self) -> int:
        return self.q_len.numel()


def on_host(given: Mapping[str, Tensor]) -> list[Tensor]:
    """Int32 CPU forms of 1-D index tensors: themselves where possible, one copy and one host sync for the others."""
    for name, t in given.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type(t).__name__}, it must be an int32 tensor; wrap it in torch.tensor()")
        if t.ndim != 1 or t.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} has shape {list(t.shape)} of {dtype_name(t.dtype)}, it must be 1-D int32; convert it"
            )
    found = [t.to(torch.int32) for t in given.values()]
    remote = [t for t in found if t.device != _CPU]
    if len(remote) == 1:
        return [t.cpu() for t in found]
    if remote:
        copies = iter(torch.cat(remote).cpu().split([t.numel() for t in remote]))
        found = [t if t.device == _CPU else next(copies) for t in found]
    return found


def paged_lengths(given: Mapping[str, Tensor], page_size: int, q_len_per_req: int = 0) -> Lengths:
    """Lengths from (qo_indptr,) kv_indptr and last_page_len, under the names of the caller's arguments."""
    *rows, kv_indptr, last = on_host(given)
    names = list(given)
    if last.numel() != kv_indptr.numel() - 1:
        raise ValueError(
            f"{names[-1]} has {last.numel()} entries, {names[-2]} describes {kv_indptr.numel() - 1} sequences; "
            "give one length per sequence"
        )
    _check_start(names[-2], kv_indptr)
    pages = kv_indptr[1:] - kv_indptr[:-1]
    if last.numel() and bool(((last > page_size) & (pages > 0)).any()):
        raise ValueError(f"{names[-1]} holds {int(last.max())}, at most page_size = {page_size}; correct it")
    kv_len = ((pages - 1) * page_size + last).masked_fill_(pages <= 0, 0)
    if rows:
        return _lengths(names, rows[0], kv_indptr, last, kv_len)
    size, q_len = last.numel(), q_len_per_req
    qo_indptr, q_lens = uniform_indptr(size, q_len, _CPU), uniform_lengths(size, q_len, _CPU)
    max_kv = _longest(names[-1], kv_len)
    return Lengths(qo_indptr, kv_indptr, last, q_lens, kv_len, q_len, max_kv, size * q_len, int(kv_indptr[-1]))


def ragged_lengths(given: Mapping[str, Tensor]) -> Lengths:
    """Lengths from qo_indptr and kv_indptr."""
    qo_indptr, kv_indptr = on_host(given)
    return _lengths(list(given), qo_indptr, kv_indptr, None, kv_indptr[1:] - kv_indptr[:-1])


def _lengths(
    names: Sequence[str], qo_indptr: Tensor, kv_indptr: Tensor, last: Tensor | None, kv_len: Tensor
) -> Lengths:
    if kv_indptr.numel() == 0 or qo_indptr.numel() != kv_indptr.numel():
        raise ValueError(
            f"{names[0]} has {qo_indptr.numel()} entries and {names[1]} {kv_indptr.numel()}; both need batch + 1"
        )
    _check_start(names[1], kv_indptr)
    q_len = qo_indptr[1:] - qo_indptr[:-1]
    max_q, max_kv = _longest(names[0], q_len), _longest(names[-1], kv_len)
    if int(qo_indptr[0]) != 0:
        raise ValueError(f"{names[0]}[0] is {int(qo_indptr[0])}, it must be 0; slice q instead")
    return Lengths(qo_indptr, kv_indptr, last, q_len, kv_len, max_q, max_kv, int(qo_indptr[-1]), int(kv_indptr[-1]))


def _check_start(name: str, indptr: Tensor) -> None:
    if indptr.numel() and int(indptr[0]) < 0:
        raise ValueError(f"{name}[0] is {int(indptr[0])}, it must not be negative; correct it")


def _longest(name: str, lengths: Tensor) -> int:
    """The longest of these lengths, none of which is negative."""
    if lengths.numel() == 0:
        return 0
    least, most = torch.aminmax(lengths)
    if int(least) < 0:
        raise ValueError(f"{name} gives a sequence the length {int(least)}, it must not be negative; correct it")
    return int(most)


@lru_cache(maxsize=4096)
def uniform_lengths(size: int, length: int, device: torch.device) -> Tensor:
    """`size` times `length`, int32. Shared: never written to."""
    return torch.full((size,), length, dtype=torch.int32, device=device)


@lru_cache(maxsize=4096)
def uniform_indptr(size: int, length: int, device: torch.device) -> Tensor:
    """Offsets of `size` sequences of `length` rows each, int32. Shared: never written to."""
    return torch.arange(0, size + 1, dtype=torch.int32, device=device) * length


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of int32 CPU tensors on the device, brought there together, each at an address divisible by 16."""
    parts: list[Tensor] = []
    for t in tensors:
        parts.append(t)
        if t.numel() % 4:
            parts.append(_PADDING[: -t.numel() % 4])
    staging = torch.empty(sum(p.numel() for p in parts), dtype=torch.int32, pin_memory=device.type == "cuda")
    moved = torch.cat(parts, out=staging).to(device, non_blocking=True)
    result, at = [], 0
    for t in tensors:
        result.append(moved[at : at + t.numel()])
        at += t.numel() + -t.numel() % 4
    return result


_PADDING = torch.zeros(3, dtype=torch.int32)


def on_device(t: Tensor, device: torch.device) -> Tensor:
    """An int32 form of an index tensor on the device; itself where possible."""
    return t.to(device=device, dtype=torch.int32, non_blocking=True)


def check_bound(name: str, bound: int | None, value: int, what: str) -> None:
    """A bound or length that the caller promised must hold."""
    if bound is not None and value > bound:
        raise ValueError(f"{name} is {bound}, {what} is {value}; raise it or leave it out")


def check_equal(name: str, given: Tensor | None, lengths: Tensor) -> None:
    """Lengths that the caller gave a second time are compared with the page table (KERNELMUX_CHECK=1)."""
    if given is None:
        return
    values = given.reshape(-1).to("cpu", torch.int32)
    if values.numel() < lengths.numel() or not torch.equal(values[: lengths.numel()], lengths):
        raise ValueError(
            f"{name} is {values.tolist()[:8]}, the index tensors give {lengths.tolist()[:8]}; make them agree"
        )
