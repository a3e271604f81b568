"""What the batch attention wrappers share: workspaces, planned state, and one run."""

import inspect
import math
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelmux.capabilities import Batch, PlanError, RunExtras
from kernelmux.dispatch import state
from kernelmux.dispatch.attention import compiled, results, scales
from kernelmux.dispatch.attention.attend import Launch, Result, attend
from kernelmux.dispatch.attention.batches import FixedBuffers, IndexTensor
from kernelmux.dispatch.attention.metadata import Lengths
from kernelmux.dispatch.attention.options import check_backend
from kernelmux.dispatch.attention.plan import Plan
from kernelmux.dispatch.attention.scales import Scale
from kernelmux.dispatch.attention.spec import Interned
from kernelmux.dispatch.attention.workspace import Workspaces
from kernelmux.dispatch.page.cache import LAYOUTS


class AttentionWrapper(Workspaces, FixedBuffers):
    """Plan once per batch, run once per layer."""

    _phase: ClassVar[str]
    _buffers: ClassVar[dict[str, str]]  # attribute -> field of Batch
    _custom_mask_buf = IndexTensor()
    _mask_indptr_buf = IndexTensor()

    def __init__(self, workspace: Tensor, kv_layout: str, use_cuda_graph: bool, backend: str) -> None:
        super().__init__(workspace)
        if kv_layout not in LAYOUTS:
            raise ValueError(f"kv_layout is {kv_layout!r}, it must be 'NHD' or 'HND'")
        check_backend(backend)
        self._kv_layout, self._use_cuda_graph = kv_layout, bool(use_cuda_graph)
        self._asked_backend = backend
        self._hint: str | None = None
        self._replaced = False
        self._batch: Batch | None = None
        self._plans: dict[Interned, Plan] = {}
        self._base: Interned | None = None
        self._active: Plan | None = None
        self._prefer: state.Preference | None = None
        self._prewarm = 0
        self._window_left, self._logits_soft_cap, self._causal = -1, 0.0, False
        self._sm_scale = 1.0
        self._cached_o_data_type: torch.dtype | None = None
        self._num_qo_heads = self._num_kv_heads = 1
        self._nvfp4 = False
        self._qo_indptr_last: int | None = None
        self._max_total_num_rows: int | None = None
        self._handle = compiled.register(self)

    # -- properties ---------------------------------------------------------------------------------------------

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made for CUDA graphs."""
        return self._use_cuda_graph

    @property
    def resolved_backend(self) -> str:
        """The backend whose kernel serves the last call; what was asked for before the first plan()."""
        return self._asked_backend if self._active is None else self._active.kernel_backend

    @property
    def _backend(self) -> str:
        return self.resolved_backend if self._hint is None else self._hint

    @_backend.setter
    def _backend(self, name: str) -> None:
        self._hint = name

    # -- planning -----------------------------------------------------------------------------------------------

    def _finish(self, base: Interned, sm_scale: float | None, batch: Batch, lengths: Lengths | None) -> None:
        """Choose the kernel of a planned batch, then note what run() and engines read from the wrapper."""
        last, repeated = self._active, self._base is base
        pinned = self._use_cuda_graph and batch is self._batch
        prefer = self._prefer if pinned else state.PREFER.get()
        plans = self._plans if pinned else {}
        # What the last batch came to use, also by forward(), is what this one will use: only that is planned now.
        wanted, uses = (last.interned, last.uses) if last is not None and repeated else (base, 0)
        graph = self._use_cuda_graph
        plan = plans.get(wanted) or Plan(wanted, batch, self._asked_backend, prefer, graph, live=graph)
        for bits in {uses, uses | self._prewarm}:
            if bits not in plan.runners:
                plan.prepare(bits)
        plan.uses = uses
        plans[wanted] = plan
        self._base, self._batch, self._plans, self._prefer = base, batch, plans, prefer
        self._commit(base, sm_scale, batch, lengths)
        self._activate(base).uses = uses

    def _commit(self, base: Interned, sm_scale: float | None, batch: Batch, lengths: Lengths | None) -> None:
        spec = base.spec
        if not self._use_cuda_graph:
            for name, field in self._buffers.items():
                setattr(self, name, getattr(batch, field))
        self._replaced = False
        self._num_qo_heads, self._num_kv_heads = spec.num_qo_heads, spec.num_kv_heads
        self._page_size, self._nvfp4 = spec.page_size, spec.nvfp4_kv
        self._cached_q_data_type, self._cached_kv_data_type = spec.q_dtype, spec.kv_dtype
        self._cached_o_data_type = spec.o_dtype
        self._batch_size, self._max_q_len, self._max_kv_len = batch.size, batch.max_q_len, batch.max_kv_len
        self._qo_indptr_last = batch.total_q if lengths is None else lengths.total_q
        if self._max_total_num_rows is None:
            self._max_total_num_rows = batch.total_q
        self._note(base, sm_scale)

    def _note(self, interned: Interned, sm_scale: float | None) -> None:
        spec = interned.spec
        self._causal, self._window_left, self._logits_soft_cap = spec.causal, spec.window_left, spec.soft_cap
        self._pos_encoding_mode = spec.pos_encoding
        self._rope_scale, self._rope_theta = spec.rope_scale, spec.rope_theta
        self._sm_scale = 1 / math.sqrt(spec.head_dim_qk) if sm_scale is None else sm_scale

    def _activate(self, interned: Interned) -> Plan:
        """Make the plan of this spec over the present batch the one that run() uses."""
        plan = self._plans.get(interned)
        if plan is None:
            batch, graph = self._planned_batch(), self._use_cuda_graph
            plan = Plan(interned, batch, self._asked_backend, self._prefer, graph, live=batch.q_lens is None)
            self._plans[interned] = plan
        self._active = plan
        return plan

    def _planned_batch(self) -> Batch:
        if self._batch is None:
            raise PlanError(f"{type(self).__name__}.run() is called before plan(); call plan() for this batch first")
        return self._batch

    def _override(
        self,
        causal: bool,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
    ) -> None:
        """What the deprecated forward() does: its arguments replace those of plan()."""
        self._planned_batch()
        assert self._base is not None
        interned = self._base.variant(
            ("causal", causal),
            ("pos_encoding", pos_encoding_mode),
            ("window_left", max(window_left, -1)),
            ("soft_cap", float(logits_soft_cap or 0.0)),
            ("rope_scale", 1.0 if rope_scale is None else rope_scale),
            ("rope_theta", 1e4 if rope_theta is None else rope_theta),
        )
        self._note(interned, sm_scale)
        self._activate(interned)

    def _take_replaced(self) -> None:
        """Engines wrote other index tensors into the wrapper: plan over those, with the lengths' bounds as planned."""
        old = self._planned_batch()
        given = {field: getattr(self, name) for name, field in self._buffers.items() if getattr(self, name) is not None}
        fields = {f: getattr(old, f) for f in results.BATCH_FIELDS} | given
        batch = self._batch = Batch(**fields)
        assert self._active is not None
        active, self._plans = self._active.interned, {}
        self._replaced = False
        self._activate(active)
        self._batch_size = batch.size

    def workspace_size(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Bytes of the float and integer workspace that a plan() with these arguments needs: none, (0, 0).

        Kernels take temporaries from torch's allocator, which serves CUDA graphs too. The arguments are plan()'s.
        """
        inspect.signature(type(self).plan).bind(self, *args, **kwargs)  # type: ignore[attr-defined]
        return 0, 0

    # -- running ------------------------------------------------------------------------------------------------

    def _extras(
        self,
        args: tuple[object, ...],
        sinks: Tensor | None,
        block_scales: tuple[Tensor, Tensor] | None,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
    ) -> RunExtras | None:
        """The arguments of run() that most calls leave out."""
        packed = self._nvfp4
        if (block_scales is not None) != packed:
            given = "given, but the planned cache is not NVFP4" if not packed else "None, an NVFP4 cache needs it"
            raise ValueError(f"kv_cache_sf is {given}; pass the block scales of a uint8 cache, and only of that")
        if not args and sinks is None and not packed:
            return None
        extras = RunExtras()
        if sinks is not None:
            extras.sinks = scales.sink_values(sinks, self._num_qo_heads, q.device)
        if args:
            found = scales.per_head(args, self._num_qo_heads, self._num_kv_heads)
            extras.scale_q, extras.scale_k, extras.scale_v = found
        if block_scales is not None:
            extras.k_sf, extras.v_sf = scales.block_scales(block_scales, kv)
        return extras

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        extras: RunExtras | None,
        qkvo_scale: tuple[Scale, Scale, Scale, Scale],
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
        lse_form: tuple[str, str] = ("log2", "NH"),
        override: tuple[Any, ...] | None = None,
    ) -> Any:
        """One call of run(): the kernel of the plan, or the custom op that finds it under torch.compile."""
        dtype = self._cached_o_data_type
        if dtype is None:
            raise PlanError(f"{type(self).__name__}.run() is called before plan(); call plan() for this batch first")
        launch: Launch = self._execute
        if torch.compiler.is_compiling():
            launch = partial(compiled.run, self._handle, override)
        elif override is not None:
            self._override(*override)
        result = Result(
            dtype, self._num_qo_heads, v.shape[-1] * 2 if self._nvfp4 else v.shape[-1], self._use_cuda_graph
        )
        return attend(launch, result, (q, k, v), extras, qkvo_scale, out, lse, return_lse, lse_form)

    def _execute(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, factor: float, extras: RunExtras | None
    ) -> None:
        if self._replaced:
            self._take_replaced()
        plan = self._active
        assert plan is not None
        if q.shape[0] != self._qo_indptr_last:
            self._check_rows(q)
        spec = plan.spec
        if out.dtype != spec.o_dtype or out.shape[2] != spec.head_dim_vo:
            plan = self._other_output(plan, out)
        plan.execute(q, k, v, out, lse, self._sm_scale * factor, extras)

    def _other_output(self, plan: Plan, out: Tensor) -> Plan:
        """The same attention with another output dtype (to be rescaled) or another dim of the values (decode)."""
        changes: list[tuple[str, Any]] = [("o_dtype", out.dtype)]
        if self._phase == "decode":
            changes.append(("head_dim_vo", out.shape[2]))
        other = self._activate(plan.interned.variant(*changes))
        self._active = plan
        return other

    def _check_rows(self, q: Tensor) -> None:
        """Eager: q has the planned rows. In a graph it may be padded, up to the rows of the first plan."""
        planned, most = self._qo_indptr_last, self._max_total_num_rows
        if q.ndim != 3:
            raise ValueError(f"q has shape {list(q.shape)}, it must be [rows, num_qo_heads, head_dim]; reshape it")
        if planned is None or (self._use_cuda_graph and most is not None and planned <= q.shape[0] <= most):
            return
        raise ValueError(
            f"q has {q.shape[0]} rows, plan() was told {planned}; pass the planned rows or call plan() for this batch"
        )
