"""Interned attention specs, and whether the tensors of a call fit one."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from kernelmux.capabilities import AttentionSpec, dtype_name
from kernelmux.dispatch.attention.op import KV_STRIDES_DIFFER, UNALIGNED

POS_ENCODINGS = ("NONE", "ROPE_LLAMA", "ALIBI")
_FIELDS = tuple(f.name for f in fields(AttentionSpec))
_interned: dict[tuple[Any, ...], "Interned"] = {}


class Interned:
    """One spec, kept for the life of the process, with the tensor layouts that were found to fit it."""

    __slots__ = ("layouts", "spec", "variants")

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.layouts: dict[tuple[Any, ...], int] = {}
        self.variants: dict[tuple[Any, ...], Interned] = {}

    def variant(self, *changes: tuple[str, Any]) -> "Interned":
        """The same spec but for some fields."""
        found = self.variants.get(changes)
        if found is None:
            changed = dict(changes)
            values = tuple(changed.get(name, getattr(self.spec, name)) for name in _FIELDS)
            found = self.variants[changes] = intern(values)
        return found

    def layout(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> int:
        """Bits of RUN_FEATURES that follow from the tensors' strides. Raises where they do not fit the spec."""
        key = (
            (q.dtype, q.device, q.stride(), out.stride()),
            (k.dtype, k.device, k.shape, k.stride()),
            (v.dtype, v.device, v.shape, v.stride()),
        )
        bits = self.layouts.get(key)
        if bits is None:
            bits = _check(self.spec, q, k, v, out)
            if len(self.layouts) >= 4096:
                self.layouts.clear()
            self.layouts[key] = bits
        if (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()) & 15:
            return bits | UNALIGNED
        return bits


def intern(values: tuple[Any, ...]) -> Interned:
    """The one Interned of these field values, in AttentionSpec's order; checked when it is new."""
    found = _interned.get(values)
    if found is None:
        spec = AttentionSpec(*values)
        _validate(spec)
        found = _interned[values] = Interned(spec)
    return found


def _validate(spec: AttentionSpec) -> None:
    for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"):
        if not isinstance(getattr(spec, name), int) or getattr(spec, name) < 1:
            raise ValueError(f"{name} is {getattr(spec, name)!r}, it must be an int of at least 1; correct it")
    if spec.num_qo_heads % spec.num_kv_heads:
        raise ValueError(
            f"num_qo_heads is {spec.num_qo_heads}, it must be a multiple of num_kv_heads {spec.num_kv_heads}; "
            "repeat or drop heads"
        )
    if spec.phase != "ragged" and (not isinstance(spec.page_size, int) or spec.page_size < 1):
        raise ValueError(f"page_size is {spec.page_size!r}, it must be an int of at least 1; pass the cache's")
    if spec.pos_encoding not in POS_ENCODINGS:
        raise ValueError(f"pos_encoding_mode is {spec.pos_encoding!r}, one of {', '.join(POS_ENCODINGS)}; pick one")
    if spec.soft_cap < 0:
        raise ValueError(f"logits_soft_cap is {spec.soft_cap}, it must not be negative; 0 or None is off")
    if spec.pos_encoding == "ROPE_LLAMA" and (spec.rope_scale <= 0 or spec.rope_theta <= 0):
        raise ValueError(
            f"rope_scale is {spec.rope_scale} and rope_theta {spec.rope_theta}, both must be positive; leave them out "
            "for 1 and 10000"
        )
    for name, dtype in (("q_data_type", spec.q_dtype), ("o_data_type", spec.o_dtype)):
        if not dtype.is_floating_point:
            raise ValueError(f"{name} is {dtype_name(dtype)}, it must be a floating dtype; correct it")
    if not spec.kv_dtype.is_floating_point and not spec.nvfp4_kv:
        raise ValueError(
            f"kv_data_type is {dtype_name(spec.kv_dtype)}, it must be a floating dtype, or uint8 for NVFP4; correct it"
        )


def _check(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> int:
    paged = spec.phase != "ragged"
    names = ("paged_kv_cache (keys)", "paged_kv_cache (values)") if paged else ("k", "v")
    packing = 2 if spec.nvfp4_kv else 1
    _check_part("q", q, "q_data_type", spec.q_dtype, spec.num_qo_heads, spec.head_dim_qk)
    for name, tensor, dim in ((names[0], k, spec.head_dim_qk), (names[1], v, spec.head_dim_vo)):
        if tensor.ndim != 3 + paged:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, {3 + paged} dimensions are needed; reshape it")
        _check_part(name, tensor, "kv_data_type", spec.kv_dtype, spec.num_kv_heads, dim // packing)
        if paged and tensor.shape[1] != spec.page_size:
            raise ValueError(
                f"{name} has pages of {tensor.shape[1]} tokens, plan() was told page_size {spec.page_size}; "
                "make them equal, and check kv_layout"
            )
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}; move one of them")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"keys are {list(k.shape)} and values {list(v.shape)}; all but the last dim must be equal")
    bits = KV_STRIDES_DIFFER if k.stride() != v.stride() else 0
    return bits if all(map(_aligned, (q, k, v, out))) else bits | UNALIGNED


def _check_part(name: str, t: Tensor, argument: str, dtype: torch.dtype, heads: int, dim: int) -> None:
    if t.dtype != dtype:
        raise ValueError(
            f"{name} is {dtype_name(t.dtype)}, planned is {dtype_name(dtype)}; convert it, or pass "
            f"{argument}={t.dtype} to plan()"
        )
    if t.shape[-1] != dim or t.shape[-2] != heads:
        raise ValueError(
            f"{name} has {t.shape[-2]} heads of dim {t.shape[-1]}, planned are {heads} of dim {dim}; "
            "make them equal, and check kv_layout"
        )
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        raise ValueError(f"{name} has stride {t.stride(-1)} along its last dim, it must be 1; call .contiguous()")


def _aligned(t: Tensor) -> bool:
    """Every row starts at a multiple of 16 bytes from the first."""
    return all(n <= 1 or step * t.element_size() % 16 == 0 for n, step in zip(t.shape[:-1], t.stride(), strict=False))
