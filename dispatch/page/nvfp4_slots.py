"""nvfp4_quantize_append_paged_kv_cache_with_slot_mapping: quantise new tokens into given slots of an NVFP4 cache."""

import torch
from torch import Tensor

from kernelmux.capabilities import Request, dtype_name
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.page import nvfp4_reference as reference
from kernelmux.dispatch.page.cache import paged_views
from kernelmux.dispatch.page.nvfp4_parts import nvfp4_key, nvfp4_request, scale_tensor

_NAME = "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"


def _describe(
    append_key: Tensor,
    append_value: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_sf: Tensor,
    v_sf: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
) -> Request:
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{_NAME}: slot_mapping is {dtype_name(slot_mapping.dtype)}, it must be int32 or int64")
    parts = {"append_key": (append_key, k_cache, k_sf), "append_value": (append_value, v_cache, v_sf)}
    return nvfp4_request(_NAME, parts, {"slot_mapping": slot_mapping})


def _check(*args: Tensor) -> None:
    slots, cache = args[2], args[3]
    limit = cache.shape[0] * cache.shape[1]
    wrong = slots >= limit
    if bool(wrong.any()):
        at = int(wrong.int().argmax())
        raise ValueError(f"slot_mapping[{at}] is {int(slots[at])}, the cache has {limit} entries; correct the slots")


APPEND = Op(
    _NAME,
    "page",
    reference.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
    _describe,
    growing=("tokens",),
    dims=("page_size", "num_kv_heads", "head_dim", "head_dim_vo"),
    roles=("input", "value"),
    features=("inner_strided", "unaligned", "kv_strides_differ"),
    schema="(Tensor append_key, Tensor append_value, Tensor slot_mapping, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor(c!) k_sf, Tensor(d!) v_sf, Tensor k_scale, Tensor v_scale) -> ()",
    check=_check,
    in_place=True,
)


def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: Tensor,
    append_value: Tensor,
    slot_mapping: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_cache_sf: Tensor | tuple[Tensor, Tensor],
    k_scale: float | Tensor,
    v_scale: float | Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Quantise the keys and values of new tokens into a paged NVFP4 cache, in place, at given slots.

    Token t goes to page slot_mapping[t] // page_size, entry slot_mapping[t] % page_size. Values and scales are those
    of `nvfp4_quantize_append_paged_kv_cache`.

    Args:
        append_key, append_value: [tokens or more, num_kv_heads, head_dim], float16, bfloat16 or float32; head_dim is
            a multiple of 16. Rows past the last slot are not read.
        slot_mapping: int32 or int64 [tokens]; a negative slot is padding and is dropped.
        paged_kv_cache: uint8 in any form that `append_paged_kv_cache` takes, with a last dim of head_dim / 2.
        kv_cache_sf: block scales in the same form, last dim head_dim / 16, float8_e4m3fn or uint8 (its bytes).
        k_scale, v_scale: the factors that attention multiplies with again, as floats or float32 tensors of one value.
        kv_layout: "NHD" or "HND".

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.
        NoKernelError: when an input requires grad: the write is in place.

    Source: FlashInfer's `nvfp4_quantize_append_paged_kv_cache_with_slot_mapping`.

    >>> import torch
    >>> cache = torch.zeros(1, 2, 2, 1, 8, dtype=torch.uint8)
    >>> scales = torch.zeros(1, 2, 2, 1, 1, dtype=torch.float8_e4m3fn)
    >>> new = torch.full((2, 1, 16), 12.0)
    >>> slots = torch.tensor([1, -1])
    >>> nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(new, new, slots, cache, scales, 1.0, 0.5)
    >>> scales.float().flatten().tolist()
    [0.0, 2.0, 0.0, 4.0]
    """
    k_cache, v_cache = paged_views(paged_kv_cache, kv_layout)
    k_sf, v_sf = paged_views(kv_cache_sf, kv_layout, "kv_cache_sf")
    tokens = slot_mapping.shape[0]
    if slot_mapping.ndim != 1 or append_key.shape[0] < tokens or append_value.shape[0] < tokens:
        raise ValueError(
            f"{_NAME}: slot_mapping has shape {list(slot_mapping.shape)}, there are {append_key.shape[0]} keys and "
            f"{append_value.shape[0]} values; give each slot a key and a value"
        )
    args = (
        append_key[:tokens],
        append_value[:tokens],
        slot_mapping,
        k_cache,
        v_cache,
        k_sf,
        v_sf,
        scale_tensor(_NAME, "k_scale", k_scale, k_cache.device),
        scale_tensor(_NAME, "v_scale", v_scale, k_cache.device),
    )
    if torch.compiler.is_compiling():
        torch.ops.kernelmux.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(*args)
    else:
        _append(*args)


def _append(*args: Tensor) -> None:
    append_key, append_value, slot_mapping, k_cache, v_cache, k_sf, v_sf, _, _ = args
    key = (
        nvfp4_key(append_key, k_cache, k_sf),
        nvfp4_key(append_value, v_cache, v_sf),
        (slot_mapping.dtype, slot_mapping.device),
        APPEND.bucket(append_key.shape[0]),
        PREFER.get(),
    )
    run = APPEND.cache.get(key) or APPEND.pick(key, args)
    run(*args)


APPEND.eager = _append
