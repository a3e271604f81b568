"""nvfp4_quantize_append_paged_kv_cache: quantise new tokens into an NVFP4 cache through its page table."""

import torch
from torch import Tensor

from kernelmux.capabilities import Request
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.page import nvfp4_reference as reference
from kernelmux.dispatch.page.cache import paged_views
from kernelmux.dispatch.page.check import check_page_metadata
from kernelmux.dispatch.page.nvfp4_parts import nvfp4_key, nvfp4_request, scale_tensor
from kernelmux.dispatch.page.parts import check_tokens
from kernelmux.dispatch.page.positions import int32

_NAME = "nvfp4_quantize_append_paged_kv_cache"


def _describe(
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
) -> Request:
    parts = {"append_key": (append_key, k_cache, k_sf), "append_value": (append_value, v_cache, v_sf)}
    indices = {"batch_indices": batch_indices, "positions": positions, "kv_indices": kv_indices, "kv_indptr": kv_indptr}
    return nvfp4_request(_NAME, parts, indices)


def _check(*args: Tensor) -> None:
    _, _, batch_indices, positions, k_cache, _, _, _, kv_indices, kv_indptr, _, _ = args
    size = k_cache.shape[:2]
    check_page_metadata(size[0], size[1], kv_indptr, kv_indices, batch_indices=batch_indices, positions=positions)


APPEND = Op(
    _NAME,
    "page",
    reference.nvfp4_quantize_append_paged_kv_cache,
    _describe,
    growing=("tokens",),
    dims=("page_size", "num_kv_heads", "head_dim", "head_dim_vo"),
    roles=("input", "value"),
    features=("inner_strided", "unaligned", "kv_strides_differ"),
    schema="(Tensor append_key, Tensor append_value, Tensor batch_indices, Tensor positions, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor(c!) k_sf, Tensor(d!) v_sf, Tensor kv_indices, Tensor kv_indptr, Tensor k_scale, "
    "Tensor v_scale) -> ()",
    check=_check,
    in_place=True,
)


def nvfp4_quantize_append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_cache_sf: Tensor | tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    k_scale: float | Tensor,
    v_scale: float | Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Quantise the keys and values of new tokens into a paged NVFP4 cache, in place.

    Tokens are placed as in `append_paged_kv_cache`. Of each 16 elements x the cache gets E2M1 values (two a byte, the
    first in the low nibble) and one E4M3 scale, so that x ~ e2m1 * block scale * k_scale (or v_scale).

    Args:
        append_key, append_value: [tokens, num_kv_heads, head_dim], float16, bfloat16 or float32; head_dim is a
            multiple of 16.
        batch_indices, positions: integer [tokens], from `get_batch_indices_positions`; batch index -1 = dropped.
        paged_kv_cache: uint8 in any form that `append_paged_kv_cache` takes, with a last dim of head_dim / 2.
        kv_cache_sf: block scales in the same form, last dim head_dim / 16, float8_e4m3fn or uint8 (its bytes).
        kv_indices, kv_indptr: page ids, and the offsets [batch + 1] of each sequence's.
        kv_last_page_len: integer [batch]; not needed to place tokens, kept for compatibility.
        k_scale, v_scale: the factors that attention multiplies with again, as floats or float32 tensors of one value.
        kv_layout: "NHD" or "HND".

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.
        NoKernelError: when an input requires grad: the write is in place.

    Source: FlashInfer's `nvfp4_quantize_append_paged_kv_cache`.

    >>> import torch
    >>> cache = torch.zeros(1, 2, 1, 1, 8, dtype=torch.uint8)
    >>> scales = torch.zeros(1, 2, 1, 1, 1, dtype=torch.float8_e4m3fn)
    >>> new = torch.full((1, 1, 16), 12.0)
    >>> at = torch.tensor([0])
    >>> nvfp4_quantize_append_paged_kv_cache(
    ...     new, new, at, at, cache, scales, at, torch.tensor([0, 1]), torch.tensor([1]), 1.0, 0.5)
    >>> scales.float().flatten().tolist(), hex(cache[0, 0, 0, 0, 0].item())  # 12 = 6 * 2 * 1.0 = 6 * 4 * 0.5
    ([2.0, 4.0], '0x77')
    """
    k_cache, v_cache = paged_views(paged_kv_cache, kv_layout)
    k_sf, v_sf = paged_views(kv_cache_sf, kv_layout, "kv_cache_sf")
    check_tokens(_NAME, append_key, append_value, batch_indices, positions)
    args = (
        append_key,
        append_value,
        int32(batch_indices, "batch_indices"),
        int32(positions, "positions"),
        k_cache,
        v_cache,
        k_sf,
        v_sf,
        int32(kv_indices, "kv_indices"),
        int32(kv_indptr, "kv_indptr"),
        scale_tensor(_NAME, "k_scale", k_scale, k_cache.device),
        scale_tensor(_NAME, "v_scale", v_scale, k_cache.device),
    )
    if torch.compiler.is_compiling():
        torch.ops.kernelmux.nvfp4_quantize_append_paged_kv_cache(*args)
    else:
        _append(*args)


def _append(*args: Tensor) -> None:
    append_key, append_value, batch_indices, positions, k_cache, v_cache, k_sf, v_sf, kv_indices, kv_indptr, _, _ = args
    key = (
        nvfp4_key(append_key, k_cache, k_sf),
        nvfp4_key(append_value, v_cache, v_sf),
        (batch_indices.device, positions.device, kv_indices.device, kv_indptr.device),
        APPEND.bucket(append_key.shape[0]),
        PREFER.get(),
    )
    run = APPEND.cache.get(key) or APPEND.pick(key, args)
    run(*args)


APPEND.eager = _append
