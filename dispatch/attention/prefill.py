"""BatchPrefillWithPagedKVCacheWrapper: any number of query rows per sequence, over a paged cache."""

from typing import Any

from torch import Tensor

from kernelmux.capabilities import Batch
from kernelmux.dispatch.attention.attend import returning_lse
from kernelmux.dispatch.attention.batches import eager_batch
from kernelmux.dispatch.attention.engine_plan import EngineModule
from kernelmux.dispatch.attention.metadata import Lengths
from kernelmux.dispatch.attention.options import DType, check_promises, neutral, spec_values
from kernelmux.dispatch.attention.packed_mask import multi_item
from kernelmux.dispatch.attention.paged import PagedWrapper
from kernelmux.dispatch.attention.scales import Scale
from kernelmux.dispatch.attention.spec import intern

Tables = tuple[Tensor, Tensor, Tensor, Tensor]  # qo_indptr, kv_indptr, indices, last_page_len
Cache = Tensor | tuple[Tensor, Tensor]


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Prefill or append attention of a batch over a paged KV cache: plan once per batch, run once per layer.

    With H query heads, Hkv KV heads, D head dim, for each sequence `softmax(q @ k.T * sm_scale + mask) @ v`; a causal
    mask is aligned to the bottom right: the last query row sees every key.

    Args:
        float_workspace_buffer: any tensor; its device is the wrapper's. Kernels take their memory from torch.
        kv_layout: "NHD" or "HND", the order of page_size, heads and dim in the cache.
        use_cuda_graph: keep the batch size and the addresses of the buffers, which plan() fills and a captured run()
            reads at replay.
        qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf: int32 on the device,
            [batch + 1], [batch + 1], [as many pages as ever], [batch]; needed with use_cuda_graph, else ignored.
        custom_mask_buf, mask_indptr_buf: uint8 [as many bytes as ever] and int32 [batch + 1], for masks in a graph.
        backend: "auto", or a backend of kernelmux, which then must serve the batch.
        jit_args, jit_kwargs, variant_owns_mask: must be left out; variants are not compiled from users' sources.

    Source: FlashInfer's class of that name.

    >>> import torch
    >>> wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    >>> cache = torch.randn(4, 2, 16, 2, 64)  # pages, K and V, page_size, heads, dim
    >>> tables = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 5], [0, 2, 3], [3, 0, 1], [5, 16])]
    >>> wrapper.plan(*tables, 8, 2, 64, 16, causal=True, q_data_type=torch.float32)
    >>> out, lse = wrapper.run(torch.randn(5, 8, 64), cache, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([5, 8, 64]), torch.Size([5, 8]))
    """

    _phase = "prefill"

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        neutral(
            jit_args=(jit_args, (None,)),
            jit_kwargs=(jit_kwargs, (None, {})),
            variant_owns_mask=(variant_owns_mask, (False,)),
        )
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._cached_module = EngineModule(self)
        if not use_cuda_graph:
            return
        self._check_buffers(
            qo_indptr_buf=qo_indptr_buf,
            paged_kv_indptr_buf=paged_kv_indptr_buf,
            paged_kv_indices_buf=paged_kv_indices_buf,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
        )
        self._qo_indptr_buf, self._paged_kv_indptr_buf = qo_indptr_buf, paged_kv_indptr_buf
        self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = paged_kv_indices_buf, paged_kv_last_page_len_buf
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        """Choose and prepare a kernel for a batch.

        CPU index tensors cost no host sync; GPU ones are copied to the host once.

        Args:
            qo_indptr: int32 [batch + 1], offsets of each sequence's rows in q.
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len: int32 [batch + 1], [pages], [batch]: offsets of
                each sequence's pages in the page ids, and the tokens in its last page, 1..page_size.
            num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo: as the tensors of run() will have them;
                head_dim_vo None = head_dim_qk.
            custom_mask: bool, True = keep, each sequence's [q_len, kv_len] flattened and joined; replaces causal.
            packed_custom_mask: uint8, the same as bits, lowest first, each sequence starting a new byte; it wins.
            causal: query row i of a sequence sees keys up to i + kv_len - q_len.
            pos_encoding_mode: "NONE", "ROPE_LLAMA" (rotate q and k here) or "ALIBI".
            sm_scale: multiplies q·k; None = 1/sqrt(head_dim_qk). rope_scale, rope_theta: None = 1 and 1e4.
            window_left: keys before the query's own that it sees, inclusive; -1 = all.
            logits_soft_cap: c of c * tanh(s / c); None or 0 = off.
            q_data_type, kv_data_type, o_data_type: dtypes or names; None = as q. uint8 for an NVFP4 cache.
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr: multi-item scoring, all
                or none: [batch], [batch * len], len, [batch].
            max_token_per_sequence, max_sequence_kv, uniform_q_len: bounds on lengths, checked; in graph mode they hold
                for every later plan().
            seq_lens, seq_lens_q, block_tables: redundant with the tables above, which are what is read;
                KERNELMUX_CHECK=1 compares the lengths.
            fixed_split_size: pages per split; None, -1 or 0 = free. disable_split_kv: reduce each row in one piece.
            use_fp16_qk_reduction, non_blocking: ignored; logits are summed in float32, copies never block.

        Raises:
            ValueError: for index tensors, masks, heads or bounds that do not fit. NoKernelError: when nothing may
                serve it.
        """
        items = multi_item(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        masked = custom_mask is not None or packed_custom_mask is not None
        base = intern(
            spec_values(
                self._phase,
                (num_qo_heads, num_kv_heads),
                (head_dim_qk, head_dim_vo or head_dim_qk),
                page_size,
                (q_data_type, kv_data_type, o_data_type),
                causal=causal,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                pos_encoding_mode=pos_encoding_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                masks=(masked, items, self._bidirectional),
                graph=self._use_cuda_graph and self.device.type == "cuda",
                fixed_split_size=fixed_split_size,
                disable_split_kv=disable_split_kv,
            )
        )
        tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        given = {"qo_indptr": qo_indptr, "paged_kv_indptr": paged_kv_indptr}
        lengths = self._lengths(given | {"paged_kv_last_page_len": paged_kv_last_page_len}, paged_kv_indices, page_size)
        check_promises(lengths, uniform_q_len, max_token_per_sequence, max_sequence_kv, seq_lens, seq_lens_q)
        mask = self._pack(custom_mask, packed_custom_mask, lengths)
        bounds = (uniform_q_len or max_token_per_sequence, max_sequence_kv)
        batch = self._batch_of(tables, page_size, lengths, mask, bounds)
        batch.prefix_len, batch.token_pos_in_items = prefix_len_ptr, token_pos_in_items_ptr
        batch.token_pos_in_items_len, batch.max_item_len = token_pos_in_items_len or 0, max_item_len_ptr
        self._finish(base, sm_scale, batch, lengths)

    begin_forward = plan
    _bidirectional = False

    def _batch_of(
        self,
        tables: Tables,
        page_size: int,
        lengths: Lengths,
        mask: tuple[Tensor, Tensor] | None,
        bounds: tuple[int | None, int | None],
    ) -> Batch:
        qo_indptr, kv_indptr, indices, last = tables
        if not self._use_cuda_graph:
            return eager_batch(lengths, (qo_indptr, kv_indptr, last), self.device, page_size, indices, mask)
        rows = (bounds[0] or lengths.total_q, lengths.total_q)
        batch = self._graph_batch(self._qo_indptr_buf.numel() - 1, lengths, page_size, rows, bounds[1])
        self._fill("_qo_indptr_buf", qo_indptr)
        self._fill("_paged_kv_indptr_buf", kv_indptr)
        self._fill("_paged_kv_indices_buf", indices[: lengths.total_kv], prefix=True)
        self._fill("_paged_kv_last_page_len_buf", last)
        return batch

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        *args: Tensor,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Cache | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """Attend over the planned batch.

        Args:
            q: [qo_indptr[-1], H, D].
            paged_kv_cache: (k, v), each [pages, page_size, Hkv, D] ("NHD") or [pages, Hkv, page_size, D] ("HND"), or
                one tensor with K and V along dim 1; without page_size it is 1. Strides are free but for the last.
            args: scale_q [H], scale_k [Hkv], scale_v [Hkv] of fp8 tensors, float32.
            q_scale, k_scale: multiply the logits. v_scale: multiplies the output. Numbers or one-element tensors.
            out: [rows, H, Dv] of the planned output dtype. lse: float32 in `lse_layout`, filled when given.
            lse_base: "log2" or "ln". lse_layout: "NH" for [rows, H], "HN" for [H, rows].
            sinks: float32 [H]; exp(sinks) joins each softmax denominator.
            kv_cache_sf: block scales of an NVFP4 cache, in the cache's form with last dim D / 16.
            window_left: None, or what was planned. enable_pdl: ignored.
            skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress: must be left out.

        Returns:
            out, or (out, lse) with return_lse; lse is the log-sum-exp of the logits, -inf without keys.

        Raises:
            PlanError: before plan(), or captured in a CUDA graph without use_cuda_graph.
            ValueError: for tensors or arguments that differ from the plan.
        """
        if skip_softmax_threshold_scale_factor or use_fp16_softmax or uses_spcompress:
            neutral(
                skip_softmax_threshold_scale_factor=(skip_softmax_threshold_scale_factor, (None, 0, 0.0)),
                use_fp16_softmax=(use_fp16_softmax, (None, False)),
                uses_spcompress=(uses_spcompress, (None, False)),
            )
        if window_left is not None:
            self._check_window(window_left)
        k, v = self._views(paged_kv_cache)
        block_scales = None if kv_cache_sf is None else self._views(kv_cache_sf, "kv_cache_sf")
        extras = self._extras(args, sinks, block_scales, q, (k, v))
        form = (lse_base, lse_layout)
        return self._attend(q, k, v, extras, (q_scale, k_scale, v_scale, None), out, lse, return_lse, form)

    run_return_lse = returning_lse(run)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """Deprecated: run() after replacing what plan() was told by these arguments, also where they are defaults."""
        override = (causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        k, v = self._views(paged_kv_cache)
        scales = (None, k_scale, v_scale, None)
        return self._attend(q, k, v, None, scales, None, None, return_lse, override=override)

    forward_return_lse = returning_lse(forward)
