"""What the wrappers over paged caches share: the batch of a plan, eager or in fixed buffers, and run()."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelmux.capabilities import Batch, RunExtras, dtype_name
from kernelmux.dispatch.attention import packed_mask, scales
from kernelmux.dispatch.attention.metadata import Lengths, on_device, uniform_indptr, upload
from kernelmux.dispatch.attention.op import KV_STRIDES_DIFFER
from kernelmux.dispatch.attention.wrapper import AttentionWrapper, IndexTensor
from kernelmux.dispatch.page.cache import paged_views

GRAPH_TABLE_ENTRIES = 1 << 23  # a page table made for a CUDA graph has at most this many ids (32 MiB) ...
GRAPH_TABLE_TOKENS = 1 << 17  # ... unless that would not reach this many tokens


class PagedWrapper(AttentionWrapper):
    """Index tensors of paged batches, and run() over a paged cache."""

    _buffers = {
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

    def _eager_batch(
        self,
        lengths: Lengths,
        given: Sequence[Tensor | None],
        indices: Tensor,
        page_size: int,
        q_len_per_req: int = 0,
        mask: tuple[Tensor, Tensor] | None = None,
    ) -> Batch:
        """A batch in tensors of its own. `given`: qo_indptr, kv_indptr and last_page_len as the caller has them."""
        host = (lengths.qo_indptr, lengths.kv_indptr, lengths.last_page_len)
        wanted = [h for h, g in zip(host, given, strict=True) if g is not None and g.device != self.device]
        lens = [lengths.kv_len] if q_len_per_req else [lengths.kv_len, lengths.q_len]
        moved = iter(upload([*lens, *[w for w in wanted if w is not None]], self.device))
        kv_len = next(moved)
        q_len = None if q_len_per_req else next(moved)
        placed = [
            None if g is None else on_device(g, self.device) if g.device == self.device else next(moved) for g in given
        ]
        if placed[0] is None:
            placed[0] = uniform_indptr(lengths.size, q_len_per_req, self.device)
        assert placed[1] is not None
        batch = Batch(
            device=self.device,
            size=lengths.size,
            total_q=lengths.total_q,
            max_q_len=lengths.max_q_len,
            max_kv_len=lengths.max_kv_len,
            page_size=page_size,
            qo_indptr=placed[0],
            kv_indptr=placed[1],
            kv_indices=on_device(indices, self.device),
            last_page_len=placed[2],
            q_lens=tuple(lengths.q_len.tolist()),
            kv_lens=tuple(lengths.kv_len.tolist()),
            packed_mask=mask and mask[0],
            mask_indptr=mask and mask[1],
        )
        batch.provide(q_len, kv_len)
        return batch

    def _graph_batch(
        self, size: int, lengths: Lengths | None, page_size: int, q_bounds: tuple[int, int], max_kv_len: int | None
    ) -> Batch:
        """The one batch of a wrapper in graph mode, over its buffers; made by the first plan. `q_bounds`: longest
        query and total rows."""
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

    def _check_room(self, batch: Batch, lengths: Lengths) -> None:
        for name, need, have, what in (
            ("max_sequence_kv", lengths.max_kv_len, batch.max_kv_len, "keys in the longest sequence"),
            ("uniform_q_len", lengths.max_q_len, batch.max_q_len, "queries in the longest sequence"),
            ("qo_indptr", lengths.total_q, batch.total_q, "query rows"),
        ):
            if need > have:
                raise ValueError(
                    f"{what}: {need} needed, the wrapper's CUDA graph has room for {have} since its first plan(); "
                    f"give the first plan() a larger {name}, or make another wrapper"
                )

    def _fill(self, name: str, values: Tensor, prefix: bool = False) -> None:
        """Copy an index tensor into its fixed buffer, unless it is that buffer."""
        buffer: Tensor = getattr(self, name)
        need, have = values.numel(), buffer.numel()
        if need > have or (need != have and not prefix):
            exactly = "at most" if prefix else "exactly"
            raise ValueError(
                f"{name.strip('_')}: {need} entries needed, the buffer has {have} and {exactly} those fit; make the "
                "wrapper with another buffer"
            )
        if values.data_ptr() != buffer.data_ptr() or values.dtype != buffer.dtype:
            buffer[:need].copy_(values, non_blocking=True)

    def _check_buffers(self, **buffers: Tensor | None) -> None:
        """Buffers of graph mode are int32 on the wrapper's device."""
        for name, buffer in buffers.items():
            if buffer is None:
                raise ValueError(f"{name} is None with use_cuda_graph=True; pass an int32 buffer on {self.device}")
            if buffer.dtype != torch.int32 or buffer.device != self.device or buffer.ndim != 1:
                raise ValueError(
                    f"{name} is {list(buffer.shape)} of {dtype_name(buffer.dtype)} on {buffer.device}, it must be 1-D "
                    f"int32 on {self.device}; make it so"
                )

    # -- running ------------------------------------------------------------------------------------------------

    def _views(self, cache: Any) -> tuple[Tensor, Tensor]:
        if type(cache) is tuple and len(cache) == 2 and self._kv_layout == "NHD" and cache[0].ndim == cache[1].ndim == 4:
            return cache
        if isinstance(cache, list):
            raise TypeError("paged_kv_cache is a list, it must be one tensor or a tuple (k_cache, v_cache); convert it")
        return paged_views(cache, self._kv_layout)

    def _extras(
        self, args: tuple[object, ...], sinks: Tensor | None, kv_cache_sf: Any, q: Tensor, kv: tuple[Tensor, Tensor]
    ) -> RunExtras | None:
        """The arguments of run() that most calls leave out."""
        packed = self._kv_packing == 2
        if (kv_cache_sf is not None) != packed:
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
        if packed:
            extras.k_sf, extras.v_sf = scales.block_scales(paged_views(kv_cache_sf, self._kv_layout, "kv_cache_sf"), kv)
        return extras

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

    def workspace_size(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Bytes of the float and integer workspace that a plan() with these arguments needs: none, (0, 0).

        Kernels take temporaries from torch's allocator, which serves CUDA graphs too. The arguments are plan()'s.
        """
        inspect.signature(type(self).plan).bind(self, *args, **kwargs)  # type: ignore[attr-defined]
        return 0, 0

    def _pack(
        self, custom_mask: Tensor | None, packed_custom_mask: Tensor | None, lengths: Lengths
    ) -> tuple[Tensor, Tensor] | None:
        mask = packed_mask.pack_mask(custom_mask, packed_custom_mask, lengths, self.device)
        if mask is not None and self._use_cuda_graph:
            packed_mask.fill_mask_buffers(mask, (self._custom_mask_buf, self._mask_indptr_buf))
        return mask
