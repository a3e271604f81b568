"""The plan behind attention of one sequence: a ragged batch of one, kept by the lengths of recent calls."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelmux.capabilities import Batch, RunExtras
from kernelmux.dispatch.arguments import shape_error
from kernelmux.dispatch.attention import compiled
from kernelmux.dispatch.attention.metadata import Lengths
from kernelmux.dispatch.attention.options import spec_values
from kernelmux.dispatch.attention.packed_mask import pack_mask
from kernelmux.dispatch.attention.plan import Plan
from kernelmux.dispatch.attention.spec import intern
from kernelmux.dispatch.op import PREFER

KEPT = 256


class Single(NamedTuple):
    """Options of one call."""

    causal: bool
    pos_encoding_mode: str
    window_left: int
    logits_soft_cap: float | None
    sm_scale: float | None
    rope_scale: float | None
    rope_theta: float | None
    backend: str = "auto"
    custom_mask: Tensor | None = None
    packed_custom_mask: Tensor | None = None


_recent: dict[tuple[Any, ...], Plan] = {}  # the oldest first; after reload() each chooses again when it runs


def launch(
    single: Single,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    factor: float,
    extras: RunExtras | None,
) -> None:
    """Run a call of one sequence: by its plan, or by the custom op under torch.compile."""
    if torch.compiler.is_compiling():
        compiled.refuse_grad(q, k, v)
        torch.ops.kernelmux.attention_single(q, k, v, out, lse, factor, *compiled.flatten(extras), *single)
        return
    scale = 1 / math.sqrt(q.shape[2]) if single.sm_scale is None else single.sm_scale
    _plan_of(single, q, k, v, out).execute(q, k, v, out, lse, scale * factor, extras)


def _plan_of(single: Single, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Plan:
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or single.custom_mask is not None or single.packed_custom_mask is not None:
        return _make(single, q, k, v, out, capturing)
    shapes = (q.shape, k.shape, v.shape[1:], out.shape[2])
    key = (shapes, q.dtype, k.dtype, out.dtype, q.device, single, PREFER.get())
    plan = _recent.get(key)
    if plan is None:
        plan = _make(single, q, k, v, out, False)
        if len(_recent) >= KEPT:
            for oldest in list(_recent)[:1]:
                _recent.pop(oldest, None)
        _recent[key] = plan
    return plan


def _make(single: Single, q: Tensor, k: Tensor, v: Tensor, out: Tensor, capturing: bool) -> Plan:
    q_len, kv_len = q.shape[0], k.shape[0]
    mask = single.custom_mask
    if mask is not None and tuple(mask.shape) not in ((q_len, kv_len), (q_len * kv_len,)):
        raise shape_error("attention", "custom_mask", mask, [q_len, kv_len], "give a bool for each query and key")
    masked = mask is not None or single.packed_custom_mask is not None
    values = spec_values(
        "ragged",
        (q.shape[1], k.shape[1]),
        (q.shape[2], out.shape[2]),
        0,
        (q.dtype, k.dtype, out.dtype),
        causal=single.causal,
        window_left=single.window_left,
        logits_soft_cap=single.logits_soft_cap,
        pos_encoding_mode=single.pos_encoding_mode,
        rope_scale=single.rope_scale,
        rope_theta=single.rope_theta,
        masks=(masked, False, False),
        graph=capturing,
    )
    interned = intern(values)
    offsets = [_offsets(n, q.device) for n in (q_len, kv_len)]
    batch = Batch(
        device=q.device,
        size=1,
        total_q=q_len,
        max_q_len=q_len,
        max_kv_len=kv_len,
        page_size=0,
        qo_indptr=offsets[0],
        kv_indptr=offsets[1],
        q_lens=(q_len,),
        kv_lens=(kv_len,),
    )
    if masked:
        packed = pack_mask(single.custom_mask, single.packed_custom_mask, _lengths(q_len, kv_len), q.device)
        assert packed is not None
        batch.packed_mask, batch.mask_indptr = packed
    return Plan(interned, batch, single.backend, PREFER.get(), graph=capturing, live=capturing)


def _offsets(length: int, device: torch.device) -> Tensor:
    """[0, length], made on the device so that a capture may hold it."""
    return torch.arange(2, dtype=torch.int32, device=device) * length


def _lengths(q_len: int, kv_len: int) -> Lengths:
    q_lens, kv_lens = (torch.tensor([n], dtype=torch.int32) for n in (q_len, kv_len))
    indptr = [_offsets(n, q_lens.device) for n in (q_len, kv_len)]
    return Lengths(indptr[0], indptr[1], None, q_lens, kv_lens, q_len, kv_len, q_len, kv_len)


def _attention_single(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, factor: float, *rest: Any
) -> None:
    launch(Single(*rest[10:]), q, k, v, out, lse, factor, compiled.unflatten(rest[:10]))


compiled.library.define(
    "attention_single(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, float factor, "
    f"{compiled.EXTRAS}, bool causal, str pos_encoding_mode, int window_left, float? logits_soft_cap, "
    "float? sm_scale, float? rope_scale, float? rope_theta, str backend, Tensor? custom_mask, "
    "Tensor? packed_custom_mask) -> ()"
)
compiled.library.impl("attention_single", _attention_single, "CompositeExplicitAutograd")
torch.library.register_fake("kernelmux::attention_single", compiled.no_results, lib=compiled.library)
