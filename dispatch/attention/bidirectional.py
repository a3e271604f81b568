"""BatchPrefillWithCausalBidirectionalRangesWrapper: causal attention plus, for each row, a range of keys it may see."""

from typing import Any

import torch
from torch import Tensor

from kernelmux.capabilities import RunExtras, dtype_name
from kernelmux.dispatch.attention.attend import returning_lse
from kernelmux.dispatch.attention.options import DType, neutral
from kernelmux.dispatch.attention.prefill import BatchPrefillWithPagedKVCacheWrapper, Cache
from kernelmux.dispatch.attention.scales import Scale


class BatchPrefillWithCausalBidirectionalRangesWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Paged prefill in which a row sees the keys before it and those of its own range, as image tokens do.

    Row i of a sequence stands at key position p = i + kv_len - q_len. It sees key j when j <= p (and j >= p -
    causal_window_left), or when its range holds j (and j >= p - range_window_left).

    Args:
        float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf,
            paged_kv_last_page_len_buf: as in BatchPrefillWithPagedKVCacheWrapper.
        pos_encoding_mode, q_data_type, kv_data_type, o_data_type, head_dim_qk, head_dim_vo: what plan() takes where it
            is told nothing; o_data_type None = as q.

    Source: FlashInfer's class of that name.

    >>> import torch
    >>> wrapper = BatchPrefillWithCausalBidirectionalRangesWrapper(
    ...     torch.empty(0, dtype=torch.uint8), q_data_type=torch.float32, kv_data_type=torch.float32
    ... )
    >>> cache = torch.randn(2, 2, 16, 2, 64)  # pages, K and V, page_size, heads, dim
    >>> tables = [torch.tensor(x, dtype=torch.int32) for x in ([0, 4], [0, 1], [1], [4])]
    >>> wrapper.plan(*tables, 8, 2, 64, 16)
    >>> ranges = torch.tensor([[-1, -1], [1, 2], [1, 2], [-1, -1]], dtype=torch.int32)  # tokens 1 and 2 see each other
    >>> wrapper.run(torch.randn(4, 8, 64), cache, ranges).shape
    torch.Size([4, 8, 64])
    """

    _bidirectional = True

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        pos_encoding_mode: str = "NONE",
        q_data_type: DType = torch.bfloat16,
        kv_data_type: DType = torch.bfloat16,
        o_data_type: DType | None = None,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
    ) -> None:
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, *buffers)
        self._defaults = (pos_encoding_mode, q_data_type, kv_data_type, o_data_type)

    def plan(  # type: ignore[override]
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
        q_data_type: DType | None = None,
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Choose and prepare a kernel for a batch.

        Args: those of BatchPrefillWithPagedKVCacheWrapper.plan, except that the ranges are the mask: custom masks,
            window_left and multi-item scoring must be left out (run() takes windows), and `causal` changes nothing,
            as the causal part is always there.

        Raises:
            ValueError: for index tensors, heads, bounds or masks that do not fit. NoKernelError: when nothing may
                serve it.
        """
        neutral(
            custom_mask=(custom_mask, (None,)),
            packed_custom_mask=(packed_custom_mask, (None,)),
            window_left=(window_left, (-1, None)),
            prefix_len_ptr=(prefix_len_ptr, (None,)),
            token_pos_in_items_ptr=(token_pos_in_items_ptr, (None,)),
            max_item_len_ptr=(max_item_len_ptr, (None,)),
        )
        pos, q, kv, o = self._defaults
        super().plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            head_dim_vo,
            causal=True,
            pos_encoding_mode=pos if pos_encoding_mode == "NONE" else pos_encoding_mode,
            sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q if q_data_type is None else q_data_type,
            kv_data_type=kv if kv_data_type is None else kv_data_type,
            o_data_type=o if o_data_type is None else o_data_type,
            max_token_per_sequence=max_token_per_sequence,
            max_sequence_kv=max_sequence_kv,
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
        )

    begin_forward = plan  # type: ignore[assignment]

    def run(  # type: ignore[override]
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        bidirectional_ranges: Tensor,
        causal_window_left: int = -1,
        range_window_left: int = -1,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Cache | None = None,
    ) -> Any:
        """Attend over the planned batch.

        Args:
            q, paged_kv_cache, q_scale, k_scale, v_scale, out, lse, kv_cache_sf: as in the paged prefill wrapper.
            bidirectional_ranges: int32 [rows, 2], for each query row the first and last key position, both
                inclusive, that it sees whatever their order; (-1, -1) = none.
            causal_window_left, range_window_left: keys before the row's own, inclusive, in either part; -1 = all.
            enable_pdl: ignored.

        Returns:
            out, or (out, lse) with return_lse; lse is the base-2 log-sum-exp of the logits.

        Raises:
            PlanError: before plan(). ValueError: for tensors that differ from the plan.
        """
        k, v = self._views(paged_kv_cache)
        block_scales = None if kv_cache_sf is None else self._views(kv_cache_sf, "kv_cache_sf")
        extras = self._extras((), None, block_scales, q, (k, v)) or RunExtras()
        extras.ranges = _ranges(bidirectional_ranges, q)
        extras.causal_window_left, extras.range_window_left = max(causal_window_left, -1), max(range_window_left, -1)
        return self._attend(q, k, v, extras, (q_scale, k_scale, v_scale, None), out, lse, return_lse)

    run_return_lse = returning_lse(run)

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        bidirectional_ranges: Tensor,
        causal_window_left: int = -1,
        range_window_left: int = -1,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        enable_pdl: bool | None = None,
        kv_cache_sf: Cache | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """Deprecated: run()."""
        windows = (causal_window_left, range_window_left)
        scales = (q_scale, k_scale, v_scale)
        return self.run(
            q, paged_kv_cache, bidirectional_ranges, *windows, *scales, return_lse=return_lse, kv_cache_sf=kv_cache_sf
        )

    forward_return_lse = returning_lse(forward)


def _ranges(ranges: Tensor, q: Tensor) -> Tensor:
    if not isinstance(ranges, Tensor) or ranges.dtype not in (torch.int32, torch.int64):
        got = dtype_name(ranges.dtype) if isinstance(ranges, Tensor) else type(ranges).__name__
        raise TypeError(f"bidirectional_ranges is {got}, it must be an int32 tensor [rows, 2]; convert it")
    if ranges.shape != (q.shape[0], 2) or ranges.device != q.device:
        raise ValueError(
            f"bidirectional_ranges is {list(ranges.shape)} on {ranges.device}, it must be [{q.shape[0]}, 2] on "
            f"{q.device}; give each row of q a range"
        )
    return ranges.to(torch.int32)
