"""BatchPrefillWithRaggedKVCacheWrapper: keys and values packed like the queries, without pages."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelmux.capabilities import Batch, RunExtras
from kernelmux.dispatch.attention.attend import returning_lse
from kernelmux.dispatch.attention.batches import IndexTensor, eager_batch
from kernelmux.dispatch.attention.metadata import Lengths, ragged_lengths
from kernelmux.dispatch.attention.options import DType, check_promises, dtype_argument, neutral, spec_values
from kernelmux.dispatch.attention.packed_mask import multi_item
from kernelmux.dispatch.attention.scales import Scale
from kernelmux.dispatch.attention.spec import intern
from kernelmux.dispatch.attention.wrapper import AttentionWrapper


class BatchPrefillWithRaggedKVCacheWrapper(AttentionWrapper):
    """Prefill attention of a batch whose keys and values are packed one sequence after the other.

    With H query heads, Hkv KV heads, D head dim, for each sequence `softmax(q @ k.T * sm_scale + mask) @ v`; a causal
    mask is aligned to the bottom right: the last query row sees every key.

    Args:
        float_workspace_buffer: any tensor; its device is the wrapper's. Kernels take their memory from torch.
        kv_layout: "NHD" for k and v [rows, Hkv, D], "HND" for [Hkv, rows, D].
        use_cuda_graph: keep the batch size and the addresses of the buffers, which plan() fills and a captured run()
            reads at replay.
        qo_indptr_buf, kv_indptr_buf: int32 [batch + 1] on the device; needed with use_cuda_graph, else ignored.
        custom_mask_buf, mask_indptr_buf: uint8 [as many bytes as ever] and int32 [batch + 1], for masks in a graph.
        backend: "auto", or a backend of kernelmux, which then must serve the batch.
        jit_args, jit_kwargs, variant_owns_mask: must be left out; variants are not compiled from users' sources.

    Source: FlashInfer's class of that name.

    >>> import torch
    >>> wrapper = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    >>> offsets = torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> wrapper.plan(offsets, offsets, 8, 2, 192, 128, causal=True, q_data_type=torch.float32)
    >>> q, k, v = torch.randn(5, 8, 192), torch.randn(5, 2, 192), torch.randn(5, 2, 128)
    >>> wrapper.run(q, k, v).shape
    torch.Size([5, 8, 128])
    """

    _phase = "ragged"
    _buffers: ClassVar = {
        "_qo_indptr_buf": "qo_indptr",
        "_kv_indptr_buf": "kv_indptr",
        "_custom_mask_buf": "packed_mask",
        "_mask_indptr_buf": "mask_indptr",
    }
    _qo_indptr_buf = IndexTensor()
    _kv_indptr_buf = IndexTensor()

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
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
        if use_cuda_graph:
            self._check_buffers(qo_indptr_buf=qo_indptr_buf, kv_indptr_buf=kv_indptr_buf)
            self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr_buf, kv_indptr_buf
            self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
        uniform_q_len: int | None = None,
    ) -> None:
        """Choose and prepare a kernel for a batch.

        CPU index tensors cost no host sync; GPU ones are copied to the host once.

        Args:
            qo_indptr, kv_indptr: int32 [batch + 1], offsets of each sequence's rows in q, and in k and v.
            o_data_type: None = as q, or bfloat16 when q is fp8.
            v_indptr, o_indptr: must be None: v is packed like k, out like q.
            The others, in their own order, are those of BatchPrefillWithPagedKVCacheWrapper.plan.

        Raises:
            ValueError: for index tensors, masks, heads or bounds that do not fit. NoKernelError: when nothing may
                serve it.
        """
        neutral(v_indptr=(v_indptr, (None, kv_indptr)), o_indptr=(o_indptr, (None, qo_indptr)))
        items = multi_item(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        if o_data_type is None and dtype_argument("q_data_type", q_data_type).itemsize == 1:
            o_data_type = torch.bfloat16
        base = intern(
            spec_values(
                "ragged",
                (num_qo_heads, num_kv_heads),
                (head_dim_qk, head_dim_vo or head_dim_qk),
                0,
                (q_data_type, kv_data_type, o_data_type),
                causal=causal,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                pos_encoding_mode=pos_encoding_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                masks=(custom_mask is not None or packed_custom_mask is not None, items, False),
                graph=self._use_cuda_graph and self.device.type == "cuda",
                fixed_split_size=fixed_split_size,
                disable_split_kv=disable_split_kv,
            )
        )
        lengths = ragged_lengths({"qo_indptr": qo_indptr, "kv_indptr": kv_indptr})
        check_promises(lengths, uniform_q_len, max_token_per_sequence, max_sequence_kv, seq_lens, seq_lens_q)
        mask = self._pack(custom_mask, packed_custom_mask, lengths)
        if self._use_cuda_graph:
            batch = self._graph_batch(lengths, uniform_q_len or max_token_per_sequence, max_sequence_kv)
            self._fill("_qo_indptr_buf", qo_indptr)
            self._fill("_kv_indptr_buf", kv_indptr)
        else:
            batch = eager_batch(lengths, (qo_indptr, kv_indptr), self.device, mask=mask)
        batch.prefix_len, batch.token_pos_in_items = prefix_len_ptr, token_pos_in_items_ptr
        batch.token_pos_in_items_len, batch.max_item_len = token_pos_in_items_len or 0, max_item_len_ptr
        self._total_kv = lengths.total_kv
        self._finish(base, sm_scale, batch, lengths)

    begin_forward = plan

    def _graph_batch(self, lengths: Lengths, max_q_len: int | None, max_kv_len: int | None) -> Batch:
        """The one batch of a wrapper in graph mode, over its buffers; made by the first plan()."""
        batch = self._batch
        if batch is None:
            batch = Batch(
                device=self.device,
                size=self._qo_indptr_buf.numel() - 1,
                total_q=lengths.total_q,
                max_q_len=max_q_len or lengths.total_q,
                max_kv_len=max_kv_len or lengths.total_kv,
                page_size=0,
                qo_indptr=self._qo_indptr_buf,
                kv_indptr=self._kv_indptr_buf,
                packed_mask=self._custom_mask_buf,
                mask_indptr=self._mask_indptr_buf,
            )
        self._check_room(batch, lengths)
        return batch

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Tensor,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        o_scale: Scale = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """Attend over the planned batch.

        Args:
            q: [qo_indptr[-1], H, D]. k, v: [kv_indptr[-1] or more, Hkv, D] ("NHD") or [Hkv, rows, D] ("HND").
            args: scale_q [H], scale_k [Hkv], scale_v [Hkv] of fp8 tensors, float32.
            q_scale, k_scale: multiply the logits. v_scale multiplies the output, o_scale divides it (the factor that
                turns a quantised output back). Numbers or one-element tensors, applied whatever the dtypes.
            out: [rows, H, Dv] of the planned output dtype. lse: float32 in `lse_layout`, filled when given.
            lse_base: "log2" or "ln". lse_layout: "NH" for [rows, H], "HN" for [H, rows].
            kv_cache_sf: block scales of NVFP4 k and v, in their form with last dim D / 16. enable_pdl: ignored.

        Returns:
            out, or (out, lse) with return_lse; lse is the log-sum-exp of the logits, -inf without keys.

        Raises:
            PlanError: before plan(), or captured in a CUDA graph without use_cuda_graph.
            ValueError: for tensors that differ from the plan.
        """
        k, v = self._views(k, v)
        block_scales = None if kv_cache_sf is None else self._views(*kv_cache_sf)
        extras = self._extras(args, None, block_scales, q, (k, v))
        form = (lse_base, lse_layout)
        return self._attend(q, k, v, extras, (q_scale, k_scale, v_scale, o_scale), out, lse, return_lse, form)

    run_return_lse = returning_lse(run)

    def _views(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as [rows, heads, dim]."""
        if self._kv_layout == "HND" and k.ndim == v.ndim == 3:
            return k.transpose(0, 1), v.transpose(0, 1)
        return k, v

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        k, v = self._views(k, v)
        return self._attend(q, k, v, None, (None,) * 4, None, None, return_lse, override=override)

    forward_return_lse = returning_lse(forward)

    def _execute(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, factor: float, extras: RunExtras | None
    ) -> None:
        if k.shape[0] < self._total_kv:
            raise ValueError(f"k has {k.shape[0]} rows, kv_indptr[-1] is {self._total_kv}; pass all keys")
        super()._execute(q, k, v, out, lse, factor, extras)
