"""Checking and normalising what the top-k functions share."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from kernelmux.capabilities import dtype_name
from kernelmux.dispatch.topk.tie import TopKTieBreak


def layout(x: Tensor) -> Hashable:
    """The part of a key that speaks of scores [rows, columns], but not of how many."""
    return x.dtype, x.device, x.is_contiguous(), _aligned(x)


def layout_features(x: Tensor) -> set[str]:
    """ "strided": not contiguous; "unaligned": a row that starts elsewhere than at a multiple of 16 bytes."""
    found = set() if x.is_contiguous() else {"strided"}
    return found if _aligned(x) else found | {"unaligned"}


def _aligned(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.itemsize % 16 == 0


def choice_features(deterministic: bool, tie_break: int) -> set[str]:
    return ({"deterministic"} if deterministic else set()) | ({"tie_break"} if tie_break else set())


def check_scores(x: Tensor) -> None:
    if x.ndim != 2:
        raise ValueError(f"input has shape {list(x.shape)}, it must be [rows, columns]; reshape it")
    if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
        raise TypeError(f"input is {dtype_name(x.dtype)}, it must be float16, bfloat16, float32 or float64; convert it")


def tie_break_of(value: int) -> int:
    if value not in (0, 1, 2):
        names = ", ".join(f"TopKTieBreak.{t.name}" for t in TopKTieBreak)
        raise ValueError(f"tie_break is {value!r}, one of {names}; choose one of them")
    return int(value)


def check_choice(input: Tensor, k: int, tie_break: int) -> int:
    if k < 1:
        raise ValueError(f"k is {k}, at least 1; choose another k")
    return tie_break_of(tie_break)


def row_values(name: str, value: Tensor | None, input: Tensor) -> Any:
    """One integer per row as contiguous int32."""
    if value is None:
        return None
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {dtype_name(value.dtype)}, it must be int32; convert it")
    if value.shape != input.shape[:1]:
        raise ValueError(f"{name} has shape {list(value.shape)}, it must be [{input.shape[0]}]; give one value per row")
    if value.device != input.device:
        raise ValueError(f"{name} is on {value.device}, input is on {input.device}; move it")
    return value.to(torch.int32).contiguous()


def page_table(table: Tensor, row_to_batch: Tensor | None, input: Tensor) -> Tensor:
    if table.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"src_page_table is {dtype_name(table.dtype)}, it must be int32; convert it")
    if table.ndim != 2 or (row_to_batch is None and table.shape[0] < input.shape[0]):
        raise ValueError(
            f"src_page_table has shape {list(table.shape)}, it must be [batch, pages] with a row for each of the "
            f"{input.shape[0]} rows of input; give those, or row_to_batch"
        )
    if table.device != input.device:
        raise ValueError(f"src_page_table is on {table.device}, input is on {input.device}; move it")
    return table.to(torch.int32)


def check_out(name: str, out: Tensor | None, input: Tensor, k: int) -> None:
    if out is None:
        return
    if out.dtype != torch.int32 or out.shape != (input.shape[0], k) or out.device != input.device:
        raise ValueError(
            f"{name} is {dtype_name(out.dtype)} {list(out.shape)} on {out.device}, it must be int32 "
            f"{[input.shape[0], k]} on {input.device}; allocate it so"
        )
