"""Decode under CUDA graphs: the positional form of the wrapper, and the plan() that replays use."""

from torch import Tensor

from kernelmux.capabilities import PlanError
from kernelmux.dispatch.attention.decode import BatchDecodeWithPagedKVCacheWrapper
from kernelmux.dispatch.attention.options import DType


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """BatchDecodeWithPagedKVCacheWrapper with use_cuda_graph=True, its buffers given by position.

    Args:
        workspace_buffer: any tensor; its device is the wrapper's.
        indptr_buffer, indices_buffer, last_page_len_buffer: int32 on the device, [batch + 1], [as many pages as ever]
            and [batch].
        kv_layout, use_tensor_cores: as in the other class.

    Source: FlashInfer's class of that name.

    >>> import torch
    >>> buffers = [torch.zeros(n, dtype=torch.int32) for n in (3, 64, 2)]
    >>> wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8), *buffers)
    >>> wrapper.is_cuda_graph_enabled
    True
    """

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            True,
            use_tensor_cores,
            indptr_buffer,
            indices_buffer,
            last_page_len_buffer,
        )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: DType | None = None,
    kv_data_type: DType | None = None,
    data_type: DType | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    """Plan a replay of a wrapper that has been planned before; bind it with functools.partial as its begin_forward.

    In graph mode the caller has filled the wrapper's buffers, and nothing is copied: only lengths that are on the CPU
    are checked against the graph's room, with no host sync. Else it is plan().

    Args:
        self: the wrapper, planned once with the same dtypes and heads; dtypes left out stay as they were.
        global_override_indptr_cpu: `indptr` on the CPU, to save reading it from the device.
        The others are plan()'s.

    Raises:
        PlanError: before the first plan(). ValueError: as plan().

    Source: FlashInfer's function of that name.

    >>> import torch
    >>> buffers = [torch.zeros(n, dtype=torch.int32) for n in (2, 8, 1)]
    >>> wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8), *buffers)
    >>> table = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [3], [2])]
    >>> wrapper.plan(*table, 4, 2, 32, 16, q_data_type=torch.float32)
    >>> for buffer, values in zip(buffers, ([0, 2], [5, 1], [7])):
    ...     buffer[: len(values)] = torch.tensor(values)
    >>> fast_decode_plan(wrapper, *buffers, 4, 2, 32, 16)
    >>> wrapper.run(torch.randn(1, 4, 32), torch.randn(8, 2, 16, 2, 32)).shape
    torch.Size([1, 4, 32])
    """
    if self._base is None:
        raise PlanError("fast_decode_plan() is called before plan(); call plan() once to choose a kernel")
    spec = self._base.spec
    self._plan(
        (indptr, indices, last_page_len),
        (num_qo_heads, num_kv_heads, head_dim, page_size),
        copy=not self._use_cuda_graph,
        host_indptr=global_override_indptr_cpu,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        q_data_type=q_data_type or data_type or spec.q_dtype,
        kv_data_type=kv_data_type or data_type or spec.kv_dtype,
        o_data_type=spec.o_dtype,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )
