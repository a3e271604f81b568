"""cuDNN graphs: built once per layout, thread and device, and executed with plain pointers."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelmux.capabilities import Unsupported

# Tensor ids in a graph. Execution takes pointers in ascending order of those that the graph has.
Q, K, V, OUT, STATS, Q_LEN, KV_LEN, TABLE, SCALE, SINK, Q_START, OUT_START, STATS_START, K_START, V_START = range(1, 16)


class Layout(NamedTuple):
    """Everything baked into a graph. A hashable key; the device and the library are those of the cache's owner."""

    dtype: torch.dtype
    batch: int
    q_len: int  # rows of the longest sequence, or a bound when queries are packed
    kv_len: int  # the same for keys; with pages a multiple of the page size
    num_qo_heads: int
    num_kv_heads: int
    dim_qk: int
    dim_vo: int
    page_size: int  # 0: keys and values are packed
    pages: int
    packed_q: bool
    causal: bool
    window_left: int
    sinks: bool
    q_stride: tuple[int, ...]  # [rows, heads, dim]
    k_stride: tuple[int, ...]
    v_stride: tuple[int, ...]
    out_stride: tuple[int, ...]
    lse_stride: tuple[int, ...] | None


@dataclass(slots=True)
class Built:
    """A graph ready to run: its tensor ids in the order of the pointers, its workspace, and the call."""

    graph: Any
    workspace: int
    set_stream: Callable[[int], None]
    launch: Callable[[Sequence[int], int], None]


class _Local(threading.local):
    """cuDNN handles are not thread-safe: each thread has its own, and the graphs made with them."""

    def __init__(self) -> None:
        self.handles: dict[int, Any] = {}
        self.graphs: dict[tuple[int, Layout], Built] = {}
        self.workspaces: dict[tuple[int, int], Tensor] = {}


_local = _Local()


def built(device: torch.device, layout: Layout) -> Built:
    """The graph of a layout, built on the spot (tens of milliseconds) when it is not there. Never evicted: a CUDA
    graph may hold its kernels."""
    key = (device.index, layout)
    found = _local.graphs.get(key)
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            raise Unsupported("its graph for these strides is not built; run once before the capture")
        found = _local.graphs[key] = _build(handle(device.index), layout)
    return found


def handle(index: int) -> Any:
    """This thread's handle on a device."""
    if index not in _local.handles:
        import cudnn

        try:
            _local.handles[index] = cudnn.create_handle()
        except Exception as error:
            raise Unsupported(f"cuDNN gives no handle: {error}") from error
    return _local.handles[index]


def workspace(index: int, stream: int, size: int, captured: bool) -> Tensor:
    """Scratch memory: of the capture's own pool when captured, else one buffer per stream of this thread."""
    if captured:
        return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", index))
    found = _local.workspaces.get((index, stream))
    if found is None or found.numel() < size:
        found = torch.empty(max(size, 1 << 20), dtype=torch.uint8, device=torch.device("cuda", index))
        _local.workspaces[index, stream] = found
    return found


def _build(handle: Any, at: Layout) -> Built:
    import cudnn

    kinds = {torch.float16: cudnn.data_type.HALF, torch.bfloat16: cudnn.data_type.BFLOAT16}
    graph = cudnn.pygraph(
        name="kernelmux_attention",
        io_data_type=kinds[at.dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    try:
        ids = _describe(cudnn, graph, kinds[at.dtype], at)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
        raise Unsupported(f"cuDNN builds no graph for it: {str(error).strip()[:400]}") from error
    launch = _launcher(graph, handle, tuple(sorted(ids)))
    return Built(graph, graph.get_workspace_size(), partial(cudnn.set_stream, handle), launch)


def _describe(cudnn: Any, graph: Any, kind: Any, at: Layout) -> set[int]:
    """Put the attention node and its tensors into the graph; returns the ids that it has."""
    ids = set()

    def tensor(uid: int, dim: Sequence[int], stride: Sequence[int], data_type: Any, **more: Any) -> Any:
        ids.add(uid)
        return graph.tensor(dim=dim, stride=stride, data_type=data_type, uid=uid, name=f"t{uid}", **more)

    int32, int64, fp32 = cudnn.data_type.INT32, cudnn.data_type.INT64, cudnn.data_type.FLOAT

    def start(uid: int, packed: bool) -> Any:
        return tensor(uid, [at.batch + 1, 1, 1, 1], [1, 1, 1, 1], int64) if packed else None

    def rows(uid: int, heads: int, length: int, dim: int, stride: tuple[int, ...], offsets: Any) -> Any:
        return tensor(uid, *_rows(at.batch, heads, length, dim, stride), kind, ragged_offset=offsets)

    def pages(uid: int, dim: int, stride: tuple[int, ...]) -> Any:
        order = [stride[0], stride[2], stride[1], stride[3]]
        return tensor(uid, [at.pages, at.num_kv_heads, at.page_size, dim], order, kind)

    lengths = ([at.batch, 1, 1, 1], [1, 1, 1, 1], int32)
    options: dict[str, Any] = {"use_padding_mask": True, "generate_stats": at.lse_stride is not None}
    options["q"] = rows(Q, at.num_qo_heads, at.q_len, at.dim_qk, at.q_stride, start(Q_START, at.packed_q))
    if at.page_size:
        width = at.kv_len // at.page_size
        table = tensor(TABLE, [at.batch, 1, width, 1], [width, width, 1, 1], int32)
        options |= {"k": pages(K, at.dim_qk, at.k_stride), "v": pages(V, at.dim_vo, at.v_stride)}
        options |= {"paged_attention_k_table": table, "paged_attention_v_table": table}
        options["paged_attention_max_seq_len_kv"] = at.kv_len
    else:
        options["k"] = rows(K, at.num_kv_heads, at.kv_len, at.dim_qk, at.k_stride, start(K_START, True))
        options["v"] = rows(V, at.num_kv_heads, at.kv_len, at.dim_vo, at.v_stride, start(V_START, True))
    options |= {"seq_len_q": tensor(Q_LEN, *lengths), "seq_len_kv": tensor(KV_LEN, *lengths)}
    options["attn_scale"] = tensor(SCALE, [1, 1, 1, 1], [1, 1, 1, 1], fp32, is_pass_by_value=True)
    if at.causal:
        options["diagonal_alignment"] = cudnn.diagonal_alignment.BOTTOM_RIGHT
        options["diagonal_band_right_bound"] = 0
        if at.window_left >= 0:
            options["diagonal_band_left_bound"] = at.window_left + 1  # cuDNN counts the diagonal
    if at.sinks:
        options["sink_token"] = tensor(SINK, [1, at.num_qo_heads, 1, 1], [at.num_qo_heads, 1, 1, 1], fp32)
    out, stats = graph.sdpa(name="sdpa", **options)
    _output(out, OUT, *_rows(at.batch, at.num_qo_heads, at.q_len, at.dim_vo, at.out_stride), kind)
    ids.add(OUT)
    if at.packed_q:
        out.set_ragged_offset(start(OUT_START, True))
    if at.lse_stride is not None:
        _output(stats, STATS, *_rows(at.batch, at.num_qo_heads, at.q_len, 1, (*at.lse_stride, 1)), fp32)
        ids.add(STATS)
        if at.packed_q:
            stats.set_ragged_offset(start(STATS_START, True))
    return ids


def _rows(batch: int, heads: int, length: int, dim: int, stride: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Dims and strides of [rows, heads, dim] seen as [batch, heads, length, dim]."""
    return [batch, heads, length, dim], [length * stride[0], stride[1], stride[0], stride[2]]


def _output(tensor: Any, uid: int, dim: list[int], stride: list[int], kind: Any) -> None:
    tensor.set_output(True).set_data_type(kind).set_dim(dim).set_stride(stride).set_uid(uid)


def _launcher(graph: Any, handle: Any, ids: tuple[int, ...]) -> Callable[[Sequence[int], int], None]:
    """How to execute: with an array of pointers where this frontend has that entry point, which takes a fifth of the
    host time, else with its documented dict of pointers."""
    try:
        lowered, raw = graph._lowered_graph, handle.backend_handle
        entry = lowered._execute_with_raw_ptrs
        index = graph._materialize_backend_plan(graph._plan_index).cpp_index
        usable = graph.selected_engine is None and tuple(graph._variant_pack_uids()) == ids and index is not None
    except Exception:
        usable = False
    if not usable:
        return lambda pointers, ws: graph.execute(dict(zip(ids, pointers, strict=True)), ws, handle=handle)
    array = (ctypes.c_void_p * len(ids))()
    address = ctypes.addressof(array)

    def launch(pointers: Sequence[int], ws: int) -> None:
        array[:] = pointers  # type: ignore[call-overload]
        entry(address, len(ids), ws, raw, index)

    return launch
