"""Outputs of attention calls: allocated or checked, and the conversions of the log-sum-exp."""

import math
from dataclasses import fields

import torch
from torch import Tensor

from kernelmux.capabilities import Batch, dtype_name
from kernelmux.dispatch.attention.op import needs_grad

LN2 = math.log(2)
LSE_BASES, LSE_LAYOUTS = ("log2", "ln"), ("NH", "HN")
# What of a Batch still holds when its index tensors are exchanged: all but the host's copies and what was derived.
BATCH_FIELDS = tuple(
    f.name for f in fields(Batch) if f.name not in ("q_lens", "kv_lens", "refreshed") and f.name != "_derived"
)


def output(
    out: Tensor | None,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padded: bool = False,
) -> Tensor:
    """The caller's output when it fits, else a new one; zeros where rows may belong to no sequence."""
    if out is None:
        make = torch.zeros if padded else torch.empty
        return make(shape, dtype=dtype, device=q.device)
    if out.shape != shape or out.dtype != dtype or out.device != q.device:
        raise ValueError(
            f"out is {list(out.shape)} of {dtype_name(out.dtype)} on {out.device}, it must be {list(shape)} of "
            f"{dtype_name(dtype)} on {q.device}; pass o_data_type to plan() or another out"
        )
    if out.stride(-1) != 1 and out.shape[-1] > 1:
        raise ValueError(f"out has stride {out.stride(-1)} along its last dim, it must be 1; pass a contiguous out")
    if needs_grad(q, k, v):
        raise ValueError("out is given and an input requires grad, which cannot flow through it; leave out away")
    return out


def lse_buffer(lse: Tensor | None, form: tuple[str, str], shape: tuple[int, ...], q: Tensor) -> Tensor:
    """Float32 [rows, heads] that a kernel writes: the caller's when no conversion follows, else a new one."""
    base, layout = form
    if base not in LSE_BASES:
        raise ValueError(f"lse_base is {base!r}, it must be 'log2' or 'ln'")
    if layout not in LSE_LAYOUTS:
        raise ValueError(f"lse_layout is {layout!r}, it must be 'NH' or 'HN'")
    wanted = (shape[0], shape[1]) if layout == "NH" else (shape[1], shape[0])
    if lse is not None:
        if lse.shape != wanted or lse.dtype != torch.float32 or lse.device != q.device:
            raise ValueError(
                f"lse is {list(lse.shape)} of {dtype_name(lse.dtype)} on {lse.device}, it must be {list(wanted)} of "
                f"float32 on {q.device}; pass another lse"
            )
        if layout == "NH" and lse.is_contiguous():
            return lse
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def finish_lse(sums: Tensor, lse: Tensor | None, form: tuple[str, str]) -> Tensor:
    """The log-sum-exp in the form that the caller asked for, in its buffer if it gave one."""
    base, layout = form
    if base == "ln":
        sums.mul_(LN2)
    if sums is lse:
        return lse
    if layout == "HN":
        sums = sums.t()
    if lse is None:
        return sums.contiguous()
    return lse.copy_(sums)
