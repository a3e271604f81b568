"""Batches of plan(): in tensors of their own, or in the fixed buffers that a CUDA graph reads."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelmux.capabilities import Batch, dtype_name
from kernelmux.dispatch.attention import packed_mask
from kernelmux.dispatch.attention.metadata import Lengths, on_device, uniform_indptr, uniform_lengths, upload

Mask = tuple[Tensor, Tensor] | None


def eager_batch(
    lengths: Lengths,
    given: Sequence[Tensor | None],
    device: torch.device,
    page_size: int = 0,
    indices: Tensor | None = None,
    mask: Mask = None,
) -> Batch:
    """A batch in tensors of its own. `given`: qo_indptr (None: all sequences have the same number of rows), kv_indptr
    and, when paged, last_page_len, as the caller has them; those on the device are used where they are."""
    host = (lengths.qo_indptr, lengths.kv_indptr, lengths.last_page_len)
    away = [h for h, g in zip(host, given, strict=False) if g is not None and h is not None and g.device != device]
    uniform = given[0] is None
    kv_len, *moved = upload([lengths.kv_len, *([] if uniform else [lengths.q_len]), *away], device)
    q_len = uniform_lengths(lengths.size, lengths.max_q_len, device) if uniform else moved.pop(0)
    placed = [None if g is None else on_device(g, device) if g.device == device else moved.pop(0) for g in given]
    qo_indptr, kv_indptr = placed[0], placed[1]
    if qo_indptr is None:
        qo_indptr = uniform_indptr(lengths.size, lengths.max_q_len, device)
    assert kv_indptr is not None
    batch = Batch(
        device=device,
        size=lengths.size,
        total_q=lengths.total_q,
        max_q_len=lengths.max_q_len,
        max_kv_len=lengths.max_kv_len,
        page_size=page_size,
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=None if indices is None else on_device(indices, device),
        last_page_len=placed[2] if page_size else None,
        q_lens=(lengths.max_q_len,) * lengths.size if uniform else tuple(lengths.q_len.tolist()),
        kv_lens=tuple(lengths.kv_len.tolist()),
        packed_mask=mask and mask[0],
        mask_indptr=mask and mask[1],
    )
    batch.provide(q_len, kv_len)
    return batch


class IndexTensor:
    """A private attribute holding an index tensor. Engines replace it after plan(); run() reads the new one."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.slot = "kept" + name

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        return self if wrapper is None else wrapper.__dict__.get(self.slot)

    def __set__(self, wrapper: Any, value: Tensor | None) -> None:
        wrapper.__dict__[self.slot] = value
        wrapper._replaced = True


class FixedBuffers:
    """What wrappers in graph mode do with the buffers that they were made with."""

    device: torch.device
    _use_cuda_graph: bool
    _custom_mask_buf: Any
    _mask_indptr_buf: Any

    def _check_buffers(self, **buffers: Tensor | None) -> None:
        """Buffers are int32 on the wrapper's device."""
        for name, buffer in buffers.items():
            if buffer is None:
                raise ValueError(f"{name} is None with use_cuda_graph=True; pass an int32 buffer on {self.device}")
            if buffer.dtype != torch.int32 or buffer.device != self.device or buffer.ndim != 1:
                raise ValueError(
                    f"{name} is {list(buffer.shape)} of {dtype_name(buffer.dtype)} on {buffer.device}, it must be 1-D "
                    f"int32 on {self.device}; make it so"
                )

    def _check_room(self, batch: Batch, lengths: Lengths) -> None:
        """The batch fits what the first plan() made room for."""
        if lengths.size != batch.size:
            raise ValueError(
                f"the batch has {lengths.size} sequences, this wrapper's CUDA graph is made for {batch.size}; pad the "
                "batch or make another wrapper"
            )
        for name, need, have, what in (
            ("max_sequence_kv", lengths.max_kv_len, batch.max_kv_len, "keys in the longest sequence"),
            ("max_token_per_sequence", lengths.max_q_len, batch.max_q_len, "queries in the longest sequence"),
            ("qo_indptr[-1]", lengths.total_q, batch.total_q, "query rows"),
        ):
            if need > have:
                raise ValueError(
                    f"{what}: {need} needed, this wrapper's CUDA graph has room for {have} since its first plan(); "
                    f"give that plan() a larger {name}, or make another wrapper"
                )

    def _fill(self, name: str, values: Tensor, prefix: bool = False) -> None:
        """Copy an index tensor into its fixed buffer, unless it is that buffer."""
        buffer: Tensor = getattr(self, name)
        need, have = values.numel(), buffer.numel()
        if need > have or (need != have and not prefix):
            raise ValueError(
                f"{name.strip('_')}: {need} entries needed, the buffer has {have}; make the wrapper with "
                f"{'a larger' if prefix else 'another'} one"
            )
        if values.data_ptr() != buffer.data_ptr() or values.dtype != buffer.dtype:
            buffer[:need].copy_(values, non_blocking=True)

    def _pack(self, custom_mask: Tensor | None, packed_custom_mask: Tensor | None, lengths: Lengths) -> Mask:
        """The packed mask of a plan, in the mask buffers under a CUDA graph."""
        mask = packed_mask.pack_mask(custom_mask, packed_custom_mask, lengths, self.device)
        if mask is not None and self._use_cuda_graph:
            packed_mask.fill_mask_buffers(mask, (self._custom_mask_buf, self._mask_indptr_buf))
        return mask
