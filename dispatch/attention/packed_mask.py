"""Custom masks and multi-item scoring as plan() takes them, brought to the form that a Batch holds."""

import torch
from torch import Tensor

from kernelmux.capabilities import dtype_name
from kernelmux.dispatch.attention.metadata import Lengths, on_device
from kernelmux.dispatch.attention.packbits import segment_packbits


def pack_mask(
    custom_mask: Tensor | None, packed_custom_mask: Tensor | None, lengths: Lengths, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Packed bytes and byte offsets [batch + 1] of a mask given flat or packed; None without a mask.

    Each sequence starts a new byte. A packed mask wins over a flat one; elements past the last sequence are ignored.
    """
    if custom_mask is None and packed_custom_mask is None:
        return None
    cells = lengths.q_len.long() * lengths.kv_len
    ends = cells.cumsum(0)
    if packed_custom_mask is not None:
        offsets = torch.cat((ends.new_zeros(1), ((cells + 7) // 8).cumsum(0)))
        packed = packed_custom_mask.reshape(-1)
        if packed.dtype != torch.uint8:
            raise ValueError(f"packed_custom_mask is {dtype_name(packed.dtype)}, it must be uint8; use packbits")
        if packed.numel() < int(offsets[-1]):
            raise ValueError(
                f"packed_custom_mask has {packed.numel()} bytes, the batch needs {int(offsets[-1])}; start each "
                "sequence at a new byte, as segment_packbits does"
            )
        return packed.to(device), on_device(offsets, device)
    assert custom_mask is not None
    total = int(ends[-1]) if ends.numel() else 0
    if custom_mask.numel() < total:
        raise ValueError(
            f"custom_mask has {custom_mask.numel()} elements, the batch has {total} (sum of q_len * kv_len); "
            "give every sequence its [q_len, kv_len] part"
        )
    if custom_mask.dtype.is_floating_point:
        raise ValueError(f"custom_mask is {dtype_name(custom_mask.dtype)}, it must be bool, True = keep; compare it")
    bits = custom_mask.reshape(-1)[:total].to(device)
    return segment_packbits(bits, torch.cat((ends.new_zeros(1), ends)), bitorder="little")


def fill_mask_buffers(mask: tuple[Tensor, Tensor], buffers: tuple[Tensor | None, Tensor | None]) -> None:
    """Copy a packed mask into the buffers that a CUDA graph reads; the rest of the mask buffer is left alone."""
    packed, offsets = mask
    mask_buf, indptr_buf = buffers
    if mask_buf is None or indptr_buf is None:
        raise ValueError(
            "custom_mask is given with use_cuda_graph=True, but custom_mask_buf or mask_indptr_buf is None; pass both "
            "to the wrapper"
        )
    if mask_buf.dtype != torch.uint8 or indptr_buf.dtype != torch.int32:
        raise ValueError(
            f"custom_mask_buf is {dtype_name(mask_buf.dtype)} and mask_indptr_buf {dtype_name(indptr_buf.dtype)}, they "
            "must be uint8 and int32; make them so"
        )
    if packed.numel() > mask_buf.numel():
        raise ValueError(
            f"custom_mask needs {packed.numel()} bytes, custom_mask_buf has {mask_buf.numel()}; enlarge it"
        )
    if offsets.numel() != indptr_buf.numel():
        raise ValueError(
            f"mask_indptr needs {offsets.numel()} entries, mask_indptr_buf has {indptr_buf.numel()}; make it batch + 1"
        )
    mask_buf[: packed.numel()].copy_(packed, non_blocking=True)
    indptr_buf.copy_(offsets, non_blocking=True)


def multi_item(
    prefix_len: Tensor | None, token_pos: Tensor | None, length: int | None, max_item_len: Tensor | None
) -> bool:
    """Whether multi-item scoring is asked for. Its three tensors come together."""
    given = {
        "prefix_len_ptr": prefix_len,
        "token_pos_in_items_ptr": token_pos,
        "max_item_len_ptr": max_item_len,
    }
    if all(t is None for t in given.values()):
        return False
    if missing := [name for name, t in given.items() if t is None]:
        raise ValueError(f"{missing[0]} is None, multi-item scoring needs {', '.join(given)}; pass all or none")
    if not length or length < 1:
        raise ValueError(f"token_pos_in_items_len is {length}, it must be the padded row length; pass it")
    return True
