"""What SGLang calls behind plan() when it replays CUDA graphs of prefill."""

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from kernelmux.dispatch.attention.paged import PagedWrapper


class EngineModule:
    """The `_cached_module` of a wrapper: SGLang's fast_prefill_plan calls its plan() and stores the result.

    The wrapper's buffers have been filled by then and run() reads them at launch, so there is nothing to compute; the
    lengths are checked against the graph's room.
    """

    def __init__(self, wrapper: "PagedWrapper") -> None:
        self._wrapper = weakref.ref(wrapper)

    def plan(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        pinned_workspace: Tensor,
        qo_indptr_host: Tensor,
        kv_indptr_host: Tensor,
        kv_lens_host: Tensor,
        max_total_num_rows: int,
        batch_size: int,
        *rest: Any,
    ) -> list[int]:
        """Check a batch that is in the buffers already."""
        wrapper = self._wrapper()
        batch = None if wrapper is None else wrapper._batch
        if wrapper is None or batch is None:
            raise ValueError("the wrapper has not been planned; call plan() before the graph is captured")
        for what, need, have in (
            ("sequences", batch_size, batch.size),
            ("query rows", int(qo_indptr_host[-1]), batch.total_q),
            ("keys in the longest sequence", int(kv_lens_host.max()) if kv_lens_host.numel() else 0, batch.max_kv_len),
        ):
            if need > have:
                raise ValueError(f"{what}: {need} needed, the wrapper's CUDA graph has room for {have}; enlarge it")
        wrapper._qo_indptr_last = int(qo_indptr_host[-1])
        return []
