"""NVFP4 caches in plain torch: new tokens go in, each with its block scales, and whole sequences come out."""

import torch
from torch import Tensor

from kernelmux.dispatch.page.reference import page_slots, write_slots
from kernelmux.dispatch.quantization.nvfp4_kv_reference import pack_nvfp4, unpack_nvfp4


def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: Tensor,
    append_value: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_sf: Tensor,
    v_sf: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Token t goes to entry slot_mapping[t] = page * page_size + place; a negative one is dropped.

    Caches are uint8 [pages, page_size, heads, dim/2] and their scales [pages, page_size, heads, dim/16] (E4M3, or its
    bytes), any strides; k_scale and v_scale are float32 [1] and dequantise.
    """
    _write(k_cache, k_sf, slot_mapping, append_key, k_scale)
    _write(v_cache, v_sf, slot_mapping, append_value, v_scale)


def nvfp4_quantize_append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_sf: Tensor,
    v_sf: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """As above, with each token's place looked up in the page table."""
    slots = page_slots(batch_indices, positions, kv_indices, kv_indptr, k_cache.shape[1])
    _write(k_cache, k_sf, slots, append_key, k_scale)
    _write(v_cache, v_sf, slots, append_value, v_scale)


def nvfp4_quantize_append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor,
    ckv_sf: Tensor,
    kpe_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    ckv_scale: Tensor,
    kpe_scale: Tensor,
) -> None:
    """MLA: ckv becomes NVFP4, kpe becomes E4M3 (kpe / kpe_scale, saturated). Caches are [pages, page_size, dim]."""
    slots = page_slots(batch_indices, positions, kv_indices, kv_indptr, ckv_cache.shape[1])
    _write(ckv_cache, ckv_sf, slots, append_ckv, ckv_scale)
    limit = torch.finfo(kpe_cache.dtype).max
    work = torch.float64 if append_kpe.dtype == torch.float64 else torch.float32
    write_slots(kpe_cache, slots, (append_kpe.to(work) / kpe_scale).clamp(-limit, limit).to(kpe_cache.dtype))


def nvfp4_kv_dequantize_paged(
    k_cache: Tensor,
    v_cache: Tensor,
    k_sf: Tensor,
    v_sf: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    output_k: Tensor,
    output_v: Tensor,
) -> None:
    """Caches are [pages, page_size, heads, dim/2], scales [..., dim/16], outputs [batch, tokens, heads, dim].

    No value is read on the host, so that a graph may hold it. Tokens at a sequence's length and later, or past the
    page table, stay as they are.
    """
    page_size, width = k_cache.shape[1], block_tables.shape[1]
    tokens = min(output_k.shape[1], width * page_size)
    if tokens == 0 or k_cache.shape[0] == 0:
        return
    at = torch.arange(tokens, device=k_cache.device)
    for row in range(output_k.shape[0]):  # a sequence at a time bounds the memory
        held = at < seq_lens[row]
        pages = block_tables[row].long()[at // page_size].where(held, 0)
        for cache, block_scales, scale, out in ((k_cache, k_sf, k_scale, output_k), (v_cache, v_sf, v_scale, output_v)):
            work = torch.float64 if out.dtype == torch.float64 else torch.float32
            places = pages, at % page_size
            values = (unpack_nvfp4(cache[places], block_scales[places], work) * scale).to(out.dtype)
            part = out[row, :tokens]
            part.copy_(torch.where(held[:, None, None], values, part))


def _write(cache: Tensor, block_scales: Tensor, slots: Tensor, values: Tensor, global_scale: Tensor) -> None:
    packed, scales = pack_nvfp4(values, global_scale)
    write_slots(cache, slots, packed)
    write_slots(block_scales, slots, scales)
