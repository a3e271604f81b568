"""The attention op: what a planned batch asks of a kernel, and the choice of one."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernelmux.capabilities import (
    AttentionSpec,
    Batch,
    Request,
    RunExtras,
    Runner,
)
from kernelmux.dispatch.attention import reference
from kernelmux.dispatch.decision import Decision
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.state import Preference

# What a call of run() uses beyond its plan: bit i of `uses` is RUN_FEATURES[i].
RUN_FEATURES = ("lse", "sinks", "tensor_scale", "per_head_scales", "kv_strides_differ", "unaligned")
LSE, SINKS, TENSOR_SCALE, PER_HEAD_SCALES, KV_STRIDES_DIFFER, UNALIGNED, GRAD = (1 << i for i in range(7))

_SPEC_FEATURES: tuple[tuple[str, Callable[[AttentionSpec], bool]], ...] = (
    ("causal", lambda s: s.causal),
    ("window", lambda s: s.window_left >= 0),
    ("soft_cap", lambda s: s.soft_cap > 0),
    ("alibi", lambda s: s.pos_encoding == "ALIBI"),
    ("rope", lambda s: s.pos_encoding == "ROPE_LLAMA"),
    ("custom_mask", lambda s: s.custom_mask),
    ("multi_item", lambda s: s.multi_item),
    ("bidirectional", lambda s: s.bidirectional),
    ("nvfp4_kv", lambda s: s.nvfp4_kv),
    ("cuda_graph", lambda s: s.use_cuda_graph),
    ("fixed_split", lambda s: s.fixed_split > 0),
    ("no_split", lambda s: s.disable_split),
)
# Graph mode without a GPU: lengths are in buffers, read by each run. With one, kernels that may not need them on the
# host are tried, and those that do refuse.
DEVICE_LENGTHS = "device_lengths"
FEATURES = (*(name for name, _ in _SPEC_FEATURES), *RUN_FEATURES, DEVICE_LENGTHS)


def _describe(spec: AttentionSpec, batch: Batch) -> Request:
    return request_of(spec, batch, 0)


ATTENTION = Op(
    "attention",
    "attention",
    reference.reference,
    _describe,
    growing=("batch", "q_len", "kv_len"),
    phases=("decode", "prefill", "ragged"),
    dims=("num_qo_heads", "num_kv_heads", "group_size", "head_dim_qk", "head_dim_vo", "page_size"),
    roles=("q", "kv", "out"),
    features=FEATURES,
    planned=True,
    graph_safe=False,
    batch_invariant=False,  # torch's products round differently for other numbers of rows
)


def uses_of(extras: RunExtras) -> int:
    """The bits of a call's extra arguments."""
    uses = 0
    if extras.sinks is not None:
        uses |= SINKS
    if extras.qk_scale is not None:
        uses |= TENSOR_SCALE
    if extras.scale_q is not None or extras.scale_k is not None or extras.scale_v is not None:
        uses |= PER_HEAD_SCALES
    if torch.is_grad_enabled():
        learnt = (extras.sinks, extras.qk_scale, extras.scale_q, extras.scale_k, extras.scale_v)
        if any(t is not None and t.requires_grad for t in learnt):
            uses |= GRAD
    return uses


def request_of(spec: AttentionSpec, batch: Batch, uses: int) -> Request:
    """What one batch asks of a kernel: its spec, its lengths, and the run-time features in `uses`."""
    dims = {
        "batch": batch.size,
        "q_len": batch.max_q_len,
        "kv_len": batch.max_kv_len,
        "num_qo_heads": spec.num_qo_heads,
        "num_kv_heads": spec.num_kv_heads,
        "group_size": spec.group_size,
        "head_dim_qk": spec.head_dim_qk,
        "head_dim_vo": spec.head_dim_vo,
    }
    if spec.page_size:
        dims["page_size"] = spec.page_size
    features = {name for name, holds in _SPEC_FEATURES if holds(spec)}
    features |= {name for i, name in enumerate(RUN_FEATURES) if uses >> i & 1}
    if batch.kv_lens is None and batch.device.type != "cuda":
        features.add(DEVICE_LENGTHS)
    return Request(
        "attention",
        "attention",
        spec.phase,
        device=batch.device,
        dtypes={"q": spec.q_dtype, "kv": spec.kv_dtype, "out": spec.o_dtype},
        dims=dims,
        features=frozenset(features),
        empty=batch.size == 0 or batch.total_q == 0,
        grad=bool(uses & GRAD),
    )


class Choice:
    """The choice of a kernel for one spec over one batch: what asks for it, and who was asked to prefer what."""

    __slots__ = ("backend", "batch", "key", "prefer", "spec", "uses")

    def __init__(self, spec: AttentionSpec, batch: Batch, uses: int, backend: str, prefer: Preference | None) -> None:
        self.spec, self.batch, self.uses, self.backend, self.prefer = spec, batch, uses, backend, prefer
        lengths = ATTENTION.bucket(batch.size, batch.max_q_len, batch.max_kv_len)
        known = batch.kv_lens is not None
        self.key = (id(spec), lengths, known, batch.device, uses, backend, prefer)  # specs are interned, never freed

    def plan(self) -> tuple[Runner, Decision]:
        """Choose, let the kernel plan, and return what runs it and why."""
        cache = ATTENTION.cache
        planner = cache.get(self.key)
        if planner is None:
            with self._preferred():
                planner = ATTENTION.select(self.key, request_of(self.spec, self.batch, self.uses), self.backend)
            cache[self.key] = planner
        return planner(self.spec, self.batch)  # type: ignore[no-any-return]

    def after_refusal(self, decision: Decision, error: Exception) -> tuple[Runner, Decision]:
        """The kernel of this decision refused in run(), before any launch: note it, warn, and plan the next one."""
        ATTENTION.refuse(self.key, decision, error)
        ATTENTION.cache.pop(self.key, None)
        return self.plan()

    @contextlib.contextmanager
    def _preferred(self) -> Iterator[None]:
        """The context of plan(), also for what is first asked for in run()."""
        token = PREFER.set(self.prefer)
        try:
            yield
        finally:
            PREFER.reset(token)


def nothing(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, sm_scale: float, extras: RunExtras | None
) -> None:
    """The runner of a batch without query rows."""


def needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
