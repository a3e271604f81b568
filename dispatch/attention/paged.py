"""What the wrappers over paged caches share: the batch of a plan, eager or in fixed buffers, and run()."""

from typing import Any, ClassVar

from torch import Tensor

from kernelmux.capabilities import Batch
from kernelmux.dispatch.attention.batches import IndexTensor
from kernelmux.dispatch.attention.metadata import Lengths, paged_lengths
from kernelmux.dispatch.attention.op import KV_STRIDES_DIFFER
from kernelmux.dispatch.attention.wrapper import AttentionWrapper
from kernelmux.dispatch.page.cache import paged_views

GRAPH_TABLE_ENTRIES = 1 << 21  # a page table made for a CUDA graph has at most this many ids (8 MiB) ...
GRAPH_TABLE_TOKENS = 1 << 17  # ... unless that would not reach this many tokens


class PagedWrapper(AttentionWrapper):
    """Index tensors of paged batches, and run() over a paged cache."""

    _buffers: ClassVar = {
        "_qo_indptr_buf": "qo_indptr",
        "_paged_kv_indptr_buf": "kv_indptr",
        "_paged_kv_indices_buf": "kv_indices",
        "_paged_kv_last_page_len_buf": "last_page_len",
        "_custom_mask_buf": "packed_mask",
        "_mask_indptr_buf": "mask_indptr",
    }
    _qo_indptr_buf = IndexTensor()
    _paged_kv_indptr_buf = IndexTensor()
    _paged_kv_indices_buf = IndexTensor()
    _paged_kv_last_page_len_buf = IndexTensor()

    # -- batches ------------------------------------------------------------------------------------------------

    def _lengths(self, given: dict[str, Tensor], indices: Tensor, page_size: int, q_len: int = 0) -> Lengths:
        """Lengths of a batch whose page table is whole. `q_len`: rows of each sequence when there is no qo_indptr."""
        lengths = paged_lengths(given, page_size, q_len)
        if indices.numel() < lengths.total_kv:
            names = list(given)
            raise ValueError(
                f"{names[-2]}[-1] is {lengths.total_kv}, there are {indices.numel()} page ids; pass the whole table"
            )
        return lengths

    def _graph_batch(
        self, size: int, lengths: Lengths | None, page_size: int, q_bounds: tuple[int, int], max_kv_len: int | None
    ) -> Batch:
        """The one batch of a wrapper in graph mode, over its buffers; made by the first plan(). `q_bounds`: the longest
        query and all rows."""
        batch = self._batch
        if batch is None:
            room = self._paged_kv_indices_buf.numel()
            width = max(GRAPH_TABLE_ENTRIES // max(1, size), -(-GRAPH_TABLE_TOKENS // page_size))
            bound = min(room, width) * page_size if max_kv_len is None else max_kv_len
            batch = Batch(
                device=self.device,
                size=size,
                total_q=q_bounds[1],
                max_q_len=q_bounds[0],
                max_kv_len=bound,
                page_size=page_size,
                qo_indptr=self._qo_indptr_buf,
                kv_indptr=self._paged_kv_indptr_buf,
                kv_indices=self._paged_kv_indices_buf,
                last_page_len=self._paged_kv_last_page_len_buf,
                packed_mask=self._custom_mask_buf,
                mask_indptr=self._mask_indptr_buf,
            )
        if batch.page_size != page_size:
            raise ValueError(
                f"page_size is {page_size}, this wrapper's CUDA graph was planned with {batch.page_size}; make another "
                "wrapper"
            )
        if lengths is not None:
            self._check_room(batch, lengths)
        return batch

    # -- running ------------------------------------------------------------------------------------------------

    def _views(self, cache: Any, name: str = "paged_kv_cache") -> tuple[Tensor, Tensor]:
        """Keys and values as [pages, page_size, heads, dim]."""
        if type(cache) is tuple and self._kv_layout == "NHD" and [t.ndim for t in cache] == [4, 4]:
            return cache  # type: ignore[return-value]
        if isinstance(cache, list):
            raise TypeError(f"{name} is a list, it must be one tensor or a tuple of keys and values; convert it")
        return paged_views(cache, self._kv_layout, name)

    def _check_window(self, window_left: int | None) -> None:
        if window_left is not None and max(window_left, -1) != self._window_left:
            raise ValueError(
                f"window_left is {window_left} in run(), {self._window_left} was planned; pass it to plan() and leave "
                "it out here"
            )

    # -- what FlashInfer offers and needs nothing here ------------------------------------------------------------

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Prepare, ahead of a graph capture, for keys and values whose strides differ.

        Args:
            variant: "independent", the only one: K and V caches of different strides.
        """
        if variant != "independent":
            raise ValueError(f"variant is {variant!r}, it must be 'independent'")
        self._prewarm = KV_STRIDES_DIFFER
        plan = self._active
        if plan is not None and (plan.uses | self._prewarm) not in plan.runners:
            plan.prepare(plan.uses | self._prewarm)
