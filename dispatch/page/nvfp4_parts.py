"""One part of what is quantised into an NVFP4 cache (keys, values, ckv): validation, layout facts, key."""

from typing import Any

import torch
from torch import Tensor

from kernelmux.capabilities import Request, dtype_name
from kernelmux.dispatch.arguments import check_device, check_writable, layout_features, needs_grad
from kernelmux.dispatch.page.parts import part_key
from kernelmux.dispatch.quantization.nvfp4_kv_reference import BLOCK

SCALE_DTYPES = (torch.float8_e4m3fn, torch.uint8)
INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_nvfp4_part(op: str, name: str, value: Tensor, cache: Tensor, block_scales: Tensor) -> None:
    """[tokens, *entry] fits a cache of packed entries and the cache of their block scales."""
    dim = value.shape[-1]
    check_writable(op, {f"the cache of {name}": cache, f"the scales of {name}": block_scales})
    if value.dtype not in INPUT_DTYPES:
        raise TypeError(f"{op}: {name} is {dtype_name(value.dtype)}, use float16, bfloat16 or float32")
    if cache.dtype != torch.uint8 or block_scales.dtype not in SCALE_DTYPES:
        raise TypeError(
            f"{op}: the cache of {name} is {dtype_name(cache.dtype)} with {dtype_name(block_scales.dtype)} scales, "
            "NVFP4 is uint8 with float8_e4m3fn (or uint8) scales"
        )
    if dim % BLOCK:
        raise ValueError(f"{op}: {name} has last dim {dim}, it must be a multiple of {BLOCK}; pad it")
    want = value.shape[1:-1]
    for what, got, size in (("cache", cache, dim // 2), ("scales", block_scales, dim // BLOCK)):
        if got.shape[2:] != (*want, size):
            raise ValueError(
                f"{op}: {name} has shape {list(value.shape)}, its {what} {list(got.shape[2:])} an entry; "
                f"make them {[*want, size]}"
            )
    if cache.shape[:2] != block_scales.shape[:2]:
        raise ValueError(
            f"{op}: the cache of {name} has {list(cache.shape[:2])} as [pages, page_size], its scales "
            f"{list(block_scales.shape[:2])}; make them equal"
        )


def scale_tensor(op: str, name: str, scale: float | Tensor, device: torch.device) -> Tensor:
    """A dequantisation factor as float32 [1] on the cache's device."""
    if not isinstance(scale, Tensor):
        return torch.full((1,), float(scale), dtype=torch.float32, device=device)
    if scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != device:
        raise ValueError(
            f"{op}: {name} has shape {list(scale.shape)}, {dtype_name(scale.dtype)} on {scale.device}; it must be one "
            f"float32 value on {device}, or a float"
        )
    return scale.reshape(1)


def nvfp4_key(value: Tensor, cache: Tensor, block_scales: Tensor) -> tuple[Any, ...]:
    """All that a decision may look at of one part."""
    return (
        *part_key(value, cache),
        block_scales.dtype,
        block_scales.device,
        block_scales.shape,
        block_scales.stride(),
        block_scales.data_ptr() & 15,
    )


def nvfp4_request(op: str, parts: dict[str, tuple[Tensor, Tensor, Tensor]], indices: dict[str, Tensor]) -> Request:
    key, k_cache, _ = parts["append_key"]
    value, v_cache, _ = parts["append_value"]
    for name, part in parts.items():
        check_nvfp4_part(op, name, *part)
        check_device(op, k_cache.device, dict(zip((name, f"{name} cache", f"{name} scales"), part, strict=True)))
    check_device(op, k_cache.device, dict(indices))
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"{op}: caches are {list(k_cache.shape)} and {list(v_cache.shape)} as [pages, page_size, heads, dim/2]; "
            "give keys and values the same pages and heads"
        )
    features = layout_features(*(t for part in parts.values() for t in part[:2]))
    if k_cache.stride() != v_cache.stride():
        features.add("kv_strides_differ")
    return Request(
        op=op,
        family="page",
        device=k_cache.device,
        dtypes={"input": key.dtype, "value": value.dtype},
        dims={
            "tokens": key.shape[0],
            "page_size": k_cache.shape[1],
            "num_kv_heads": k_cache.shape[2],
            "head_dim": key.shape[-1],
            "head_dim_vo": value.shape[-1],
        },
        features=frozenset(features),
        empty=key.numel() == 0,
        grad=needs_grad(key, value),
    )
