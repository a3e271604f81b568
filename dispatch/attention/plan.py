"""One spec over one batch: the kernels chosen for it, each planned once, and the hop to them."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernelmux.capabilities import Batch, CompileError, PlanError, RunExtras, Runner, Unsupported
from kernelmux.dispatch.attention.op import ATTENTION, GRAD, LSE, Choice, needs_grad, nothing, uses_of
from kernelmux.dispatch.attention.reference import reference
from kernelmux.dispatch.attention.spec import Interned
from kernelmux.dispatch.decision import Decision
from kernelmux.dispatch.page.check import check_offsets, check_page_metadata
from kernelmux.dispatch.state import Preference, settings

_CAPTURED = (
    "run() is captured in a CUDA graph, but plan() was told use_cuda_graph=False, so a replay would read stale "
    "metadata; make the wrapper with use_cuda_graph=True and its buffers"
)


class Plan:
    """Runners of one spec over one batch, by the run-time features of a call.

    `graph`: a run may be captured in a CUDA graph. `live`: the batch's index tensors may be rewritten in place, so each
    run rebuilds what was derived from them. What reload() forgets is chosen again, unless a graph may hold it.
    """

    __slots__ = (
        "backend", "batch", "check", "chosen", "cuda", "graph", "interned", "live", "made", "prefer", "runners", "spec",
        "uses",
    )  # fmt: skip

    def __init__(
        self,
        interned: Interned,
        batch: Batch,
        backend: str,
        prefer: Preference | None,
        graph: bool = False,
        live: bool = False,
    ) -> None:
        self.interned, self.spec, self.batch, self.graph, self.live = interned, interned.spec, batch, graph, live
        self.backend, self.prefer = backend, prefer
        self.cuda, self.check = batch.device.type == "cuda", settings().check
        self.runners: dict[int, Runner] = {}
        self.chosen: dict[int, Decision] = {}
        self.made: object = ATTENTION.cache  # replaced by reload()
        self.uses = 0  # of the last run

    def execute(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        sm_scale: float,
        extras: RunExtras | None,
    ) -> None:
        """Run the kernel of this call's features, choosing and planning it on first use."""
        if q.device != self.batch.device:
            raise ValueError(f"q is on {q.device}, planned is {self.batch.device}; move it, or plan on its device")
        capturing = False
        if self.cuda:
            if torch.cuda.current_device() != self.batch.device.index:
                with torch.cuda.device(self.batch.device):
                    return self.execute(q, k, v, out, lse, sm_scale, extras)
            capturing = torch.cuda.is_current_stream_capturing()
            if capturing and not self.graph:
                raise PlanError(_CAPTURED)
        if self.made is not ATTENTION.cache:
            self.made, self.check = ATTENTION.cache, settings().check
            if not self.graph:
                self.runners = {}
        uses = self.interned.layout(q, k, v, out)
        if lse is not None:
            uses |= LSE
        if needs_grad(q, k, v):
            uses |= GRAD
        if extras is not None:
            uses |= uses_of(extras)
        if self.check and not capturing:
            self._check_values(q, k)
        self.uses = uses
        runner = self.runners.get(uses) or self.prepare(uses, keep=not capturing)
        if self.live:
            self._refresh(capturing)
        while True:
            try:
                return runner(q, k, v, out, lse, sm_scale, extras)
            except (Unsupported, CompileError) as error:
                if uses not in self.chosen:
                    raise
                runner, self.chosen[uses] = self._choice(uses).after_refusal(self.chosen[uses], error)
                if not capturing:
                    self.runners[uses] = runner

    def prepare(self, uses: int, keep: bool = True) -> Runner:
        """The runner for these features. Not kept when made inside a capture, as its buffers are not filled yet."""
        if self.empty:
            runner: Runner = nothing
        elif self.batch.max_kv_len == 0:
            runner = reference(self.spec, self.batch)
        else:
            runner, self.chosen[uses] = self._choice(uses).plan()
        if keep:
            self.runners[uses] = runner
        return runner

    @property
    def empty(self) -> bool:
        return self.batch.size == 0 or self.batch.total_q == 0

    @property
    def kernel_backend(self) -> str:
        """The backend that serves the features of the last run."""
        chosen = self.chosen.get(self.uses)
        return "reference" if chosen is None else chosen.kernel.backend

    def _choice(self, uses: int) -> Choice:
        return Choice(self.spec, self.batch, uses, self.backend, self.prefer)

    def _refresh(self, capturing: bool) -> None:
        """Rebuild the derived metadata from the buffers: on every eager run, once per stream of a capture."""
        batch = self.batch
        mark: tuple[int, ...] | None = _capture() if capturing else None
        if mark is not None:
            index = (batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.last_page_len)
            mark = (*mark, *(t._version for t in index if t is not None and not t.is_inference()))
            if mark == batch.refreshed:
                return
        batch.update()
        batch.refreshed = mark

    def _check_values(self, q: Tensor, k: Tensor) -> None:
        batch = self.batch
        check_offsets("qo_indptr", batch.qo_indptr, q.shape[0], "q")
        if batch.page_size and batch.kv_indices is not None:
            pages = k.shape[0]
            check_page_metadata(pages, batch.page_size, batch.kv_indptr, batch.kv_indices, batch.last_page_len)
            return
        check_offsets("kv_indptr", batch.kv_indptr, k.shape[0], "k")


def _capture() -> tuple[int, int] | None:
    """Identity of the running capture and its stream; None when this installation cannot tell captures apart."""
    runtime = _runtime()
    if runtime is None:
        return None
    stream = torch.cuda.current_stream().cuda_stream
    try:
        error, _, capture, *_ = runtime.cudaStreamGetCaptureInfo(stream)
    except (TypeError, ValueError, AttributeError):
        return None
    return None if int(error) else (int(capture), stream)


@cache
def _runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except Exception:  # absent or broken: then every captured run refreshes
        return None
    return runtime
