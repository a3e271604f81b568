"""merge_state, merge_state_in_place, merge_states: join attention over parts of the keys."""

from typing import Any

import torch
from torch import Tensor

from kernelmux.capabilities import Request, dtype_name
from kernelmux.dispatch.arguments import layout_features, needs_grad
from kernelmux.dispatch.attention import merge_reference as reference
from kernelmux.dispatch.op import PREFER, Op


def _request(op: str, *states: Tensor | None, count: int) -> Request:
    """Validate what a key holds. `states` are v, s, v, s, … and perhaps a mask."""
    tensors = [t for t in states if t is not None]
    v = tensors[0]
    for tensor in tensors:
        if tensor.device != v.device:
            raise ValueError(f"{op}: tensors are on {v.device} and {tensor.device}; move them to one device")
        if tensor.ndim == v.ndim and tensor.dtype != v.dtype:
            got = f"{dtype_name(v.dtype)} and {dtype_name(tensor.dtype)}"
            raise TypeError(f"{op}: the v of the states are {got}; convert one of them")
    if not v.dtype.is_floating_point or v.dtype.itemsize < 2:
        raise TypeError(f"{op}: v is {dtype_name(v.dtype)}, it must be float16, bfloat16, float32 or float64")
    features = layout_features(*tensors[:4:2])
    if not all(map(_packed, tensors)):
        features.add("strided")
    return Request(
        op=op,
        family="attention",
        device=v.device,
        dtypes={"v": v.dtype},
        dims={"rows": v.shape[0], "states": count, "heads": v.shape[-2], "head_dim": v.shape[-1]},
        features=frozenset(features),
        empty=v.numel() == 0,
        grad=needs_grad(*tensors),
    )


def _describe(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, v: Tensor | None, s: Tensor | None) -> Request:
    return _request("merge_state", v_a, s_a, v_b, s_b, count=2)


def _describe_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None) -> Request:
    if mask is not None and mask.dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"merge_state_in_place: mask is {dtype_name(mask.dtype)}, it must be bool or uint8; convert it")
    return _request("merge_state_in_place", v, s, v_other, s_other, mask, count=2)


def _describe_states(v: Tensor, s: Tensor, v_merged: Tensor | None, s_merged: Tensor | None) -> Request:
    return _request("merge_states", v, s, count=v.shape[1])


MERGE_STATE = Op(
    "merge_state",
    "attention",
    reference.merge_state,
    _describe,
    growing=("rows",),
    dims=("states", "heads", "head_dim"),
    roles=("v",),
    features=("strided", "inner_strided", "unaligned"),
    schema="(Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b, Tensor(a!) v, Tensor(b!) s) -> ()",
)
MERGE_STATE_IN_PLACE = Op(
    "merge_state_in_place",
    "attention",
    reference.merge_state_in_place,
    _describe_in_place,
    growing=("rows",),
    dims=("states", "heads", "head_dim"),
    roles=("v",),
    features=("strided", "inner_strided", "unaligned"),
    schema="(Tensor(a!) v, Tensor(b!) s, Tensor v_other, Tensor s_other, Tensor? mask) -> ()",
    in_place=True,
)
MERGE_STATES = Op(
    "merge_states",
    "attention",
    reference.merge_states,
    _describe_states,
    growing=("rows", "states"),
    dims=("heads", "head_dim"),
    roles=("v",),
    features=("strided", "inner_strided", "unaligned"),
    schema="(Tensor v, Tensor s, Tensor(a!) v_merged, Tensor(b!) s_merged) -> ()",
)


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention states of the same queries over two disjoint sets of keys.

    With m = max(s_a, s_b) and w = 2^(s - m): v = (w_a v_a + w_b v_b) / (w_a + w_b), s = m + log2(w_a + w_b). A state
    with s = -inf is empty: merging with it changes nothing, whatever its v holds; two empty states give 0 and -inf.

    Args:
        v_a, v_b: outputs [rows, heads, head_dim], float16, bfloat16, float32 or float64, of the same dtype.
        s_a, s_b: base-2 log-sum-exp [rows, heads], any floating dtype, taken as float32 (float64 beside a float64 v).

    Returns:
        (v, s): v of v_a's dtype, s float32 (float64 beside a float64 v).

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.

    Source: the recursive attention of FlashInfer's cascade module (`merge_state`).

    >>> import torch
    >>> v, s = merge_state(torch.zeros(1, 1, 2), torch.zeros(1, 1), torch.ones(1, 1, 2), torch.zeros(1, 1))
    >>> v.tolist(), s.tolist()
    ([[[0.5, 0.5]]], [[1.0]])
    """
    _agree("merge_state", v_a, s_a, v_b, s_b)
    s_a, s_b = _lse(s_a, v_a), _lse(s_b, v_a)
    if torch.compiler.is_compiling():
        v, s = torch.empty_like(v_a), torch.empty_like(s_a)
        torch.ops.kernelmux.merge_state(v_a, s_a, v_b, s_b, v, s)
        return v, s
    return _merge_state(v_a, s_a, v_b, s_b, None, None)


def _merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, v: Tensor | None, s: Tensor | None) -> Any:
    key = (_key(v_a, s_a, v_b, s_b), MERGE_STATE.bucket(v_a.shape[0]), PREFER.get())
    run = MERGE_STATE.cache.get(key) or MERGE_STATE.pick(key, (v_a, s_a, v_b, s_b, v, s))
    return run(v_a, s_a, v_b, s_b, v, s)


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """Merge another state into (v, s): `v[:], s[:] = merge_state(v, s, v_other, s_other)` for the rows of `mask`.

    Args:
        v, v_other: outputs [rows, heads, head_dim] of one dtype; v is updated.
        s, s_other: base-2 log-sum-exp [rows, heads]; s is updated, also when it is not float32 (rounded once).
        mask: None, or bool or uint8 [rows]: rows with 0 are left alone.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.
        NoKernelError: when an input requires grad; use `merge_state`.

    Source: FlashInfer's `merge_state_in_place`.

    >>> import torch
    >>> v, s = torch.zeros(2, 1, 1), torch.zeros(2, 1)
    >>> merge_state_in_place(v, s, torch.ones(2, 1, 1), torch.zeros(2, 1), mask=torch.tensor([True, False]))
    >>> v.flatten().tolist(), s.flatten().tolist()
    ([0.5, 0.0], [1.0, 0.0])
    """
    _agree("merge_state_in_place", v, s, v_other, s_other)
    if mask is not None and mask.shape != v.shape[:1]:
        raise ValueError(
            f"merge_state_in_place: mask has shape {list(mask.shape)}, v has {v.shape[0]} rows; give one value per row"
        )
    held, s_other = _lse(s, v), _lse(s_other, v)
    if torch.compiler.is_compiling():
        torch.ops.kernelmux.merge_state_in_place(v, held, v_other, s_other, mask)
    else:
        _merge_state_in_place(v, held, v_other, s_other, mask)
    if held is not s:
        s.copy_(held)


def _merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None) -> None:
    masked = mask is None or (mask.dtype, mask.device, mask.stride())
    op = MERGE_STATE_IN_PLACE
    key = (_key(v, s, v_other, s_other), masked, op.bucket(v.shape[0]), PREFER.get())
    run = op.cache.get(key) or op.pick(key, (v, s, v_other, s_other, mask))
    run(v, s, v_other, s_other, mask)


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge n attention states of the same queries over disjoint sets of keys.

    Equals `merge_state` applied n - 1 times. No states (n = 0) give 0 and -inf, one is copied.

    Args:
        v: outputs [rows, n, heads, head_dim], float16, bfloat16, float32 or float64.
        s: base-2 log-sum-exp [rows, n, heads].

    Returns:
        (v, s): [rows, heads, head_dim] of v's dtype, [rows, heads] float32 (float64 beside a float64 v).

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.

    Source: FlashInfer's `merge_states`.

    >>> import torch
    >>> v, s = merge_states(torch.arange(4.0).view(1, 4, 1, 1), torch.zeros(1, 4, 1))
    >>> v.item(), s.item()
    (1.5, 2.0)
    """
    _agree("merge_states", v, s, dims=4)
    s = _lse(s, v)
    if torch.compiler.is_compiling():
        v_merged, s_merged = torch.empty_like(v[:, :0].sum(1)), torch.empty_like(s[:, :0].sum(1))
        torch.ops.kernelmux.merge_states(v, s, v_merged, s_merged)
        return v_merged, s_merged
    return _merge_states(v, s, None, None)


def _merge_states(v: Tensor, s: Tensor, v_merged: Tensor | None, s_merged: Tensor | None) -> Any:
    key = (_key(v, s, v, s), MERGE_STATES.bucket(v.shape[0], v.shape[1]), PREFER.get())
    run = MERGE_STATES.cache.get(key) or MERGE_STATES.pick(key, (v, s, v_merged, s_merged))
    return run(v, s, v_merged, s_merged)


def _merge_state_into(*args: Tensor) -> None:
    _merge_state(*args)


def _merge_states_into(*args: Tensor) -> None:
    _merge_states(*args)


MERGE_STATE.eager = _merge_state_into
MERGE_STATE_IN_PLACE.eager = _merge_state_in_place
MERGE_STATES.eager = _merge_states_into


def _agree(op: str, v: Tensor, s: Tensor, v_b: Tensor | None = None, s_b: Tensor | None = None, dims: int = 3) -> None:
    """What a key cannot hold: sizes that must agree with one another."""
    shape = v.shape
    if len(shape) != dims:
        form = "[rows, heads, head_dim]" if dims == 3 else "[rows, states, heads, head_dim]"
        raise ValueError(f"{op}: v has shape {list(shape)}, it must be {form}; reshape it")
    if v_b is not None and v_b.shape != shape:
        raise ValueError(f"{op}: v of the other state has shape {list(v_b.shape)}, not {list(shape)}; make them equal")
    for lse in (s,) if s_b is None else (s, s_b):
        if lse.shape != shape[:-1]:
            got, want = list(lse.shape), list(shape[:-1])
            raise ValueError(f"{op}: s has shape {got}, v needs {want}; give one value per row and head")


def _lse(s: Tensor, v: Tensor) -> Tensor:
    """s in the dtype that kernels take: float32, or float64 beside a float64 v."""
    wanted = torch.float64 if v.dtype == torch.float64 else torch.float32
    if s.dtype == wanted:
        return s
    if not s.dtype.is_floating_point:
        raise TypeError(f"s is {dtype_name(s.dtype)}, it must be a floating dtype; convert it to float32")
    return s.to(wanted)


def _packed(tensor: Tensor) -> bool:
    """Contiguous by its strides alone: a decision made for one row also serves many."""
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != step:
            return False
        step *= size
    return True


def _key(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Any, ...]:
    return (
        v_a.dtype,
        v_b.dtype,
        v_a.device,
        s_a.device,
        v_b.device,
        s_b.device,
        v_a.shape[-2:],
        v_a.stride(),
        s_a.stride(),
        v_b.stride(),
        s_b.stride(),
        (v_a.data_ptr() | v_b.data_ptr()) & 15,
        torch.is_grad_enabled() and needs_grad(v_a, s_a, v_b, s_b),
    )
