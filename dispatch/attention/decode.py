"""BatchDecodeWithPagedKVCacheWrapper: one or a few query rows per sequence, over a paged cache."""

import warnings
from dataclasses import fields
from typing import Any

from torch import Tensor

from kernelmux.capabilities import Batch
from kernelmux.dispatch.attention.attend import returning_lse
from kernelmux.dispatch.attention.batches import eager_batch
from kernelmux.dispatch.attention.metadata import Lengths, uniform_indptr
from kernelmux.dispatch.attention.options import DecodeOptions, DType, neutral
from kernelmux.dispatch.attention.paged import PagedWrapper
from kernelmux.dispatch.attention.scales import Scale
from kernelmux.dispatch.attention.spec import intern

Tables = tuple[Tensor, Tensor, Tensor]  # indptr, indices, last_page_len
_OPTIONS = tuple(f.name for f in fields(DecodeOptions))
# plan()'s arguments after page_size, when they are given by position.
_LEGACY = tuple(n for n in _OPTIONS if n not in ("window_right", "is_causal", "max_sequence_kv"))


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Decode attention of a batch over a paged KV cache: plan once per batch, run once per layer.

    With H query heads, Hkv KV heads, D head dim, for each sequence `softmax(q @ k.T * sm_scale) @ v` over its keys.

    Args:
        float_workspace_buffer: any tensor; its device is the wrapper's. Kernels take their memory from torch.
        kv_layout: "NHD" or "HND", the order of page_size, heads and dim in the cache.
        use_cuda_graph: keep the batch size and the addresses of the three buffers, which plan() fills and a captured
            run() reads at replay.
        use_tensor_cores: recorded only; the choice of a kernel is the dispatcher's.
        paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer: int32 on the device, [batch+1],
            [as many pages as ever], [batch]; needed with use_cuda_graph, else ignored.
        backend: "auto", or a backend of kernelmux, which then must serve the batch.
        jit_args: must be None.

    Source: FlashInfer's class of that name.

    >>> import torch
    >>> wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    >>> cache = torch.randn(4, 2, 16, 2, 64)  # pages, K and V, page_size, heads, dim
    >>> indptr, pages, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3], [3, 0, 1], [5, 16]))
    >>> wrapper.plan(indptr, pages, last, 8, 2, 64, 16, q_data_type=torch.float32)
    >>> wrapper.run(torch.randn(2, 8, 64), cache).shape
    torch.Size([2, 8, 64])
    """

    _phase = "decode"

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        neutral(jit_args=(jit_args, (None,)))
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._use_tensor_cores = use_tensor_cores
        self._q_len_per_req = 1
        if not use_cuda_graph:
            return
        self._check_buffers(
            paged_kv_indptr_buffer=paged_kv_indptr_buffer,
            paged_kv_indices_buffer=paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
        )
        assert paged_kv_indptr_buffer is not None and paged_kv_last_page_len_buffer is not None
        self._fixed_batch_size = paged_kv_last_page_len_buffer.numel()
        if paged_kv_indptr_buffer.numel() != self._fixed_batch_size + 1:
            raise ValueError(
                f"paged_kv_indptr_buffer has {paged_kv_indptr_buffer.numel()} entries, it must have "
                f"{self._fixed_batch_size + 1}, one more than paged_kv_last_page_len_buffer; slice it"
            )
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer

    @property
    def use_tensor_cores(self) -> bool:
        """What the constructor was given."""
        return self._use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
        max_sequence_kv: int | None = None,
    ) -> None:
        """Choose and prepare a kernel for a batch.

        CPU index tensors cost no host sync; GPU ones are copied to the host once.

        Args:
            indptr: int32 [batch + 1], offsets of each sequence's pages in `indices`.
            indices: int32 [indptr[-1] or more], page ids.
            last_page_len: int32 [batch], tokens in each sequence's last page, 1..page_size.
            num_qo_heads, num_kv_heads, head_dim, page_size: as the tensors of run() will have them.
            pos_encoding_mode: "NONE", "ROPE_LLAMA" (rotate q and k here) or "ALIBI".
            window_left: keys before the query's own that it sees, inclusive; -1 = all. window_right: must be 0.
            logits_soft_cap: c of c * tanh(s / c); None or 0 = off.
            q_data_type, kv_data_type, o_data_type: dtypes or names; default "float16", then as q. uint8 for an NVFP4
                cache. data_type: deprecated, stands in for those that are None.
            sm_scale: multiplies q·k; None = 1/sqrt(head_dim). rope_scale, rope_theta: None = 1 and 1e4.
            seq_lens, block_tables: redundant with the page table, which is what is read; KERNELMUX_CHECK=1 compares
                seq_lens with it. max_sequence_kv: of the longest sequence ever, for a wrapper in graph mode whose
                indices buffer says too much or too little (ours, not FlashInfer's).
            fixed_split_size: pages per split; None, -1 or 0 = free. disable_split_kv: reduce each row in one piece.
            q_len_per_req: query rows per sequence. is_causal: among those; None = yes.
            non_blocking: ignored, copies never block.

        Raises:
            ValueError: for index tensors, heads or bounds that do not fit. NoKernelError: when nothing may serve it.
        """
        options = {name: value for name, value in locals().items() if name in _OPTIONS}
        if deprecated_positional_args:
            options |= _named(deprecated_positional_args)
            warnings.warn(
                "arguments of plan() after page_size are deprecated by position; pass them by name",
                DeprecationWarning,
                stacklevel=2,
            )
        self._plan((indptr, indices, last_page_len), (num_qo_heads, num_kv_heads, head_dim, page_size), **options)

    begin_forward = plan

    def _plan(
        self,
        tables: Tables,
        sizes: tuple[int, int, int, int],
        *,
        copy: bool = True,
        host_indptr: Tensor | None = None,
        **options: Any,
    ) -> None:
        """Both plan() and fast_decode_plan(), which finds the buffers of graph mode filled (`copy` False)."""
        given = DecodeOptions(**options)
        base = intern(given.spec(sizes, self._use_cuda_graph and self.device.type == "cuda"))
        page_size, rows = sizes[3], given.q_len_per_req
        if self._use_cuda_graph:
            batch, lengths = self._fixed_batch(tables, given, page_size, copy, host_indptr)
        else:
            lengths = self._lengths(_named_tables(tables, host_indptr), tables[1], page_size, rows)
            given.check(lengths)
            batch = eager_batch(lengths, (None, tables[0], tables[2]), self.device, page_size, tables[1])
        self._finish(base, given.sm_scale, batch, lengths)
        self._q_len_per_req = rows

    def _fixed_batch(
        self,
        tables: Tables,
        given: DecodeOptions,
        page_size: int,
        copy: bool,
        host: Tensor | None,
    ) -> tuple[Batch, Lengths | None]:
        """The batch in the buffers of graph mode; lengths unless they are on the device only and nobody needs them."""
        size, rows = self._fixed_batch_size, given.q_len_per_req
        indptr, indices, last = tables
        if last.numel() != size:
            raise ValueError(
                f"the batch has {last.numel()} sequences, this wrapper's CUDA graph is made for {size}; pad the batch "
                "or make another wrapper"
            )
        if self._batch is not None and rows != self._q_len_per_req:
            raise ValueError(
                f"q_len_per_req is {rows}, this wrapper's CUDA graph was planned with {self._q_len_per_req}; make "
                "another wrapper"
            )
        known = copy or (last.is_cpu and (indptr if host is None else host).is_cpu)
        lengths = self._lengths(_named_tables(tables, host), tables[1], page_size, rows) if known else None
        if lengths is not None:
            given.check(lengths)
        if self._batch is None:
            self._qo_indptr_buf = uniform_indptr(size, rows, self.device).clone()
        batch = self._graph_batch(size, lengths, page_size, (rows, size * rows), given.max_sequence_kv)
        if copy and lengths is not None:
            self._fill("_paged_kv_indptr_buf", indptr)
            self._fill("_paged_kv_indices_buf", indices[: lengths.total_kv], prefix=True)
            self._fill("_paged_kv_last_page_len_buf", last)
        return batch, lengths

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Tensor,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """Attend over the planned batch.

        Args:
            q: [batch * q_len_per_req, H, D], the rows of a sequence together.
            paged_kv_cache: (k, v), each [pages, page_size, Hkv, D] ("NHD") or [pages, Hkv, page_size, D] ("HND"), or
                one tensor with K and V along dim 1; without page_size it is 1. Strides are free but for the last.
            args: scale_q [H], scale_k [Hkv], scale_v [Hkv] of fp8 tensors, float32.
            q_scale, k_scale: multiply the logits. v_scale: multiplies the output. Numbers or one-element tensors.
            out: [rows, H, Dv] of the planned output dtype. lse: float32 [rows, H], filled when given.
            sinks: float32 [H]; exp(sinks) joins each softmax denominator.
            kv_cache_sf: block scales of an NVFP4 cache, in the cache's form with last dim D / 16.
            window_left, q_len_per_req: None, or what was planned. enable_pdl: ignored.
            skip_softmax_threshold_scale_factor: must be None or 0.

        Returns:
            out, or (out, lse) with return_lse; lse is the base-2 log-sum-exp of the logits, -inf without keys.

        Raises:
            PlanError: before plan(), or captured in a CUDA graph without use_cuda_graph.
            ValueError: for tensors or arguments that differ from the plan.
        """
        if skip_softmax_threshold_scale_factor:
            neutral(skip_softmax_threshold_scale_factor=(skip_softmax_threshold_scale_factor, (None, 0, 0.0)))
        if window_left is not None:
            self._check_window(window_left)
        if q_len_per_req is not None and q_len_per_req != self._q_len_per_req:
            raise ValueError(
                f"q_len_per_req is {q_len_per_req} in run(), {self._q_len_per_req} was planned; pass it to plan()"
            )
        k, v = self._views(paged_kv_cache)
        block_scales = None if kv_cache_sf is None else self._views(kv_cache_sf, "kv_cache_sf")
        extras = self._extras(args, sinks, block_scales, q, (k, v))
        return self._attend(q, k, v, extras, (q_scale, k_scale, v_scale, None), out, lse, return_lse)

    run_return_lse = returning_lse(run)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        pos_encoding_mode: str = "NONE",
        q_scale: Scale = None,
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
        causal = self._base is not None and self._base.spec.causal
        override = (causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        k, v = self._views(paged_kv_cache)
        return self._attend(q, k, v, None, (q_scale, k_scale, v_scale, None), None, None, return_lse, override=override)

    forward_return_lse = returning_lse(forward)


def _named(args: tuple[Any, ...]) -> dict[str, Any]:
    if len(args) > len(_LEGACY):
        raise TypeError(f"plan() got {len(args) + 7} positional arguments, it takes at most {len(_LEGACY) + 7}")
    return dict(zip(_LEGACY, args, strict=False))


def _named_tables(tables: Tables, host_indptr: Tensor | None) -> dict[str, Tensor]:
    """What lengths are read from, under the names of plan()'s arguments."""
    return {"indptr": tables[0] if host_indptr is None else host_indptr, "last_page_len": tables[2]}
