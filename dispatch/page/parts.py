"""One part of what is appended (keys, values, ckv, kpe) and its cache: validation, layout facts, key."""

from typing import Any

import torch
from torch import Tensor

from kernelmux.capabilities import dtype_name
from kernelmux.dispatch.arguments import check_writable


def check_part(op: str, name: str, value: Tensor, cache: Tensor) -> None:
    """What is appended fits one cache: [tokens, *entry] of the cache's dtype."""
    check_writable(op, {f"the cache of {name}": cache})
    if value.dtype != cache.dtype:
        raise ValueError(
            f"{op}: {name} is {dtype_name(value.dtype)}, its cache {dtype_name(cache.dtype)}; "
            f"an append converts nothing, convert {name} first"
        )
    if value.shape[1:] != cache.shape[2:]:
        raise ValueError(
            f"{op}: {name} has shape {list(value.shape)}, its cache holds entries of {list(cache.shape[2:])}; "
            "give [tokens, *entry]"
        )


def part_key(value: Tensor, cache: Tensor) -> tuple[Any, ...]:
    """All that a decision may look at of one cache and what is appended to it."""
    return (
        value.dtype,
        value.device,
        value.shape[1:],
        value.stride(),
        cache.dtype,
        cache.device,
        cache.shape,
        cache.stride(),
        (value.data_ptr() | cache.data_ptr()) & 15,
        torch.is_grad_enabled() and (value.requires_grad or cache.requires_grad),
    )


def check_tokens(op: str, value: Tensor, other: Tensor | None, batch_indices: Tensor, positions: Tensor) -> None:
    if value.ndim == 0 or (other is not None and other.ndim == 0):
        raise ValueError(f"{op}: what is appended has no dimensions, it must be [tokens, *entry]; reshape it")
    tokens = value.shape[0]
    if other is not None and other.shape[0] != tokens:
        raise ValueError(f"{op}: the two parts hold {tokens} and {other.shape[0]} tokens; give each token both parts")
    if batch_indices.shape != (tokens,) or positions.shape != (tokens,):
        raise ValueError(
            f"{op}: batch_indices has shape {list(batch_indices.shape)}, positions {list(positions.shape)}, there are "
            f"{tokens} tokens; give one value per token"
        )
