"""torch.compile: a wrapper is an integer handle, and one custom op runs whatever it has planned."""

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from kernelmux.capabilities import PlanError, RunExtras

EXTRAS = (
    "Tensor? sinks, Tensor? k_sf, Tensor? v_sf, Tensor? scale_q, Tensor? scale_k, Tensor? scale_v, Tensor? qk_scale, "
    "Tensor? ranges, int causal_window_left, int range_window_left"
)
_OVERRIDE = (
    "bool causal, str? pos_encoding_mode, int window_left, float? logits_soft_cap, float? sm_scale, float? rope_scale, "
    "float? rope_theta"
)
library = torch.library.Library("kernelmux", "FRAGMENT")
_handles = itertools.count(1)


class Runs(Protocol):
    """What a handle stands for."""

    def _override(self, *arguments: Any) -> None: ...

    def _execute(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, factor: float, extras: RunExtras | None
    ) -> None: ...


_wrappers: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def register(wrapper: Any) -> int:
    """A handle for a wrapper, which it does not keep alive."""
    handle = next(_handles)
    _wrappers[handle] = wrapper
    return handle


def run(
    handle: int,
    override: tuple[Any, ...] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    factor: float,
    extras: RunExtras | None,
) -> None:
    """Call the custom op; traced by torch.compile."""
    refuse_grad(q, k, v)
    overridden = override or (False, None, -1, None, None, None, None)
    torch.ops.kernelmux.attention_run(handle, q, k, v, out, lse, factor, *flatten(extras), *overridden)


def refuse_grad(q: Tensor, k: Tensor, v: Tensor) -> None:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("an input requires grad under torch.compile, which attention does not support; use no_grad()")


def flatten(extras: RunExtras | None) -> tuple[Any, ...]:
    """Extra arguments in the order of the schema."""
    if extras is None:
        return (None,) * 8 + (-1, -1)
    e = extras
    tensors = (e.sinks, e.k_sf, e.v_sf, e.scale_q, e.scale_k, e.scale_v, e.qk_scale, e.ranges)
    return (*tensors, e.causal_window_left, e.range_window_left)


def unflatten(values: tuple[Any, ...]) -> RunExtras | None:
    return None if all(t is None for t in values[:8]) else RunExtras(*values)


def _attention_run(
    handle: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, factor: float, *rest: Any
) -> None:
    wrapper: Runs | None = _wrappers.get(handle)
    if wrapper is None:
        raise PlanError("the wrapper of a compiled run() is gone; keep it alive as long as the compiled function")
    if rest[11] is not None:
        wrapper._override(*rest[10:])
    wrapper._execute(q, k, v, out, lse, factor, unflatten(rest[:10]))


def no_results(*args: Any) -> None:
    """Results are allocated by the caller."""


library.define(
    "attention_run(int plan, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, float factor, "
    f"{EXTRAS}, {_OVERRIDE}) -> ()"
)
library.impl("attention_run", _attention_run, "CompositeExplicitAutograd")
torch.library.register_fake("kernelmux::attention_run", no_results, lib=library)
