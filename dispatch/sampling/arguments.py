"""Checking and normalising what the sampling functions share: distributions, per-row parameters, row indices."""

import operator
from collections.abc import Hashable
from numbers import Real

import torch
from torch import Tensor

from kernelmux.capabilities import dtype_name

MAX_K = 2**31 - 1


def check_distributions(name: str, x: Tensor) -> None:
    """A floating tensor [rows, vocab] with at least one column."""
    if x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(
            f"{name} has shape {list(x.shape)}, it must be [rows, vocab] with vocab at least 1; reshape it"
        )
    if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
        raise TypeError(
            f"{name} is {dtype_name(x.dtype)}, it must be float16, bfloat16, float32 or float64; convert it"
        )


def refuse_nan(name: str, x: Tensor) -> None:
    """Raise if there is a NaN; this waits for the device."""
    if torch.isnan(x).any():
        raise ValueError(f"Input {name} contains NaN. Without check_nan such rows give id 0 and are not valid")


def top_k_of(value: int | Tensor | None, x: Tensor) -> int | Tensor | None:
    """top_k as int32 per row, or an int below vocab, or None for off (None, 0, negative, vocab or more)."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.dtype.is_floating_point or value.dtype == torch.bool:
            raise TypeError(f"top_k is {dtype_name(value.dtype)}, it must be int32 or int64; convert it")
        if value.dtype != torch.int32:
            value = value.clamp(max=MAX_K) if value.dtype.itemsize > 4 else value
            value = value.clamp(min=0).to(torch.int32) if value.dtype.is_signed else value.to(torch.int32)
        return _per_row("top_k", value, x)
    try:
        k = operator.index(value)
    except TypeError:
        raise TypeError(f"top_k is {value!r}, it must be an int or a tensor of ints; convert it") from None
    return k if 0 < k < x.shape[1] else None


def float_of(name: str, value: float | Tensor | None, x: Tensor) -> float | Tensor | None:
    """A filter's parameter as float32 per row, or a float, or None."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        if not value.dtype.is_floating_point:
            raise TypeError(f"{name} is {dtype_name(value.dtype)}, it must be a floating dtype; convert it")
        return _per_row(name, value.to(torch.float32), x)
    if not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}, it must be a number or a tensor; convert it")
    return float(value)


def top_p_of(value: float | Tensor | None, x: Tensor) -> float | Tensor | None:
    """top_p, None for off (None, 1 or more)."""
    p = float_of("top_p", value, x)
    return None if isinstance(p, float) and p >= 1 else p


def min_p_of(value: float | Tensor | None, x: Tensor) -> float | Tensor | None:
    """min_p, None for off (None, 0 or less)."""
    p = float_of("min_p", value, x)
    return None if isinstance(p, float) and p <= 0 else p


def temperature_of(value: float | Tensor | None, x: Tensor) -> float | Tensor | None:
    """A temperature, None for 1."""
    if isinstance(value, bool):
        raise TypeError(f"temperature is {value!r}, it must be a number or a tensor; give 1.0 for no change")
    if isinstance(value, Tensor):
        if not value.dtype.is_floating_point:
            raise TypeError(f"temperature is {dtype_name(value.dtype)}, it must be a floating dtype; convert it")
        return _per_row("temperature", value, x)
    t = float_of("temperature", value, x)
    if isinstance(t, float) and not t >= 0:
        raise ValueError(f"temperature is {t}, at least 0; 0 gives the uniform distribution")
    return None if t == 1 else t


def _per_row(name: str, value: Tensor, x: Tensor) -> Tensor:
    if value.shape != x.shape[:1]:
        raise ValueError(
            f"{name} has shape {list(value.shape)}, it must be [{x.shape[0]}]; give one value per row, or a number"
        )
    if value.device != x.device:
        raise ValueError(f"{name} is on {value.device}, the distributions are on {x.device}; move it")
    return value.contiguous()


def check_indices(indices: Tensor | None, x: Tensor) -> int:
    """The number of outputs: one per index, or one per row."""
    if indices is None:
        return x.shape[0]
    if indices.ndim != 1:
        raise ValueError(f"indices has shape {list(indices.shape)}, it must be [batch]; flatten it")
    if indices.dtype.is_floating_point or indices.dtype.is_complex or indices.dtype == torch.bool:
        raise TypeError(f"indices is {dtype_name(indices.dtype)}, it must be an integer dtype; convert it")
    if indices.device != x.device:
        raise ValueError(f"indices is on {indices.device}, the distributions are on {x.device}; move it")
    if torch.iinfo(indices.dtype).max < x.shape[1] - 1:
        raise ValueError(
            f"indices is {dtype_name(indices.dtype)}, the ids 0..{x.shape[1] - 1} are returned in its dtype and do not "
            "fit; give int32"
        )
    return indices.shape[0]


def check_index_values(indices: Tensor | None, rows: int) -> None:
    """Deep check, KERNELMUX_CHECK=1: every index names a row."""
    if indices is None or indices.numel() == 0:
        return
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= rows:
        raise ValueError(f"indices reach from {low} to {high}, the rows are 0..{rows - 1}; correct them")


def layout(x: Tensor) -> Hashable:
    """The part of a key that speaks of a tensor [rows, vocab], but not of its rows."""
    return x.dtype, x.device, x.shape[1], x.stride(), x.data_ptr() % 16 == 0


def layout_features(x: Tensor) -> set[str]:
    """What a kernel must be able to read: "strided" (not contiguous), "unaligned" (not at a multiple of 16 bytes)."""
    found = set() if x.is_contiguous() else {"strided"}
    return found if x.data_ptr() % 16 == 0 else found | {"unaligned"}


def kind(value: object) -> object:
    """The part of a key that speaks of a parameter: absent, a scalar, or one value per row."""
    return value.dtype if isinstance(value, Tensor) else value is None


def wants_grad(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()
