"""Keys and values of one sequence, gathered from any cache form and converted to the type that is computed in."""

import torch
from torch import Tensor

from kernelmux.capabilities.attention import Batch
from kernelmux.dispatch.quantization.nvfp4_kv_reference import unpack_nvfp4


def gather(
    cache: Tensor, block_scales: Tensor | None, batch: Batch, index: int, keys: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Keys (or values) keys[0]..keys[1]-1 of sequence `index` as [n, heads, dim] of `dtype`.

    `cache` is [pages, page_size, heads, dim] of any strides, or [rows, heads, dim] when the batch is ragged. Only the
    pages that hold these keys are looked up, and nothing but these keys takes part in arithmetic. With `block_scales`
    (same form, last dim / 16) the cache holds NVFP4.
    """
    data = _take(cache, batch, index, keys)
    if block_scales is None:
        return data.to(dtype)
    return unpack_nvfp4(data, _take(block_scales, batch, index, keys), dtype)


def _take(cache: Tensor, batch: Batch, index: int, keys: tuple[int, int]) -> Tensor:
    take = _ragged if batch.page_size == 0 else _paged
    if cache.dtype.itemsize > 1:
        return take(cache, batch, index, keys)
    return take(cache.view(torch.uint8), batch, index, keys).view(cache.dtype)  # some devices index no 8-bit floats


def _ragged(rows: Tensor, batch: Batch, index: int, keys: tuple[int, int]) -> Tensor:
    return rows[batch.kv_indptr[index].long() + torch.arange(*keys, device=batch.device)]


def _paged(cache: Tensor, batch: Batch, index: int, keys: tuple[int, int]) -> Tensor:
    if keys[0] == keys[1] or batch.kv_indices is None:
        return cache.new_empty((0, *cache.shape[2:]))
    size = batch.page_size
    first, last = keys[0] // size, -(-keys[1] // size)
    pages = batch.kv_indices[batch.kv_indptr[index].long() + torch.arange(first, last, device=batch.device)]
    return cache[pages.long()].flatten(0, 1)[keys[0] - first * size : keys[1] - first * size]
