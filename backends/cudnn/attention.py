"""Attention through cuDNN graphs: which graph a batch needs, and the pointers that it runs on."""

import ctypes
import math
from dataclasses import replace
from threading import get_ident

import torch
from torch import Tensor

from kernelmux.backends.cudnn import graph as graphs
from kernelmux.backends.cudnn.rows import Fix, keyless_rows
from kernelmux.capabilities import AttentionSpec, Batch, Request, RunExtras, Runner, Unsupported

LOG2E = math.log2(math.e)
MIN_KV_LEN, MIN_PACKED_Q_LEN = 256, 16  # the least bounds that graphs are built for
MAX_GATHERED_BYTES = 1 << 30
_warm: set[tuple[object, ...]] = set()  # what is known of the graphs that were built, in a Request's terms


def warm(request: Request) -> bool:
    """Whether a graph for such a batch was built in this process. Strides are taken to be those of that time."""
    names = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo")
    d = request.dims
    static = (request.dtypes["q"], *(d[n] for n in names), d.get("page_size", 0))
    flags = tuple(f in request.features for f in ("causal", "window", "lse", "sinks"))
    return _facts(request.phase, d["batch"], d["q_len"], d["kv_len"], static, flags) in _warm


def warm_gathered(request: Request) -> bool:
    """The same for paged batches whose keys are gathered: their graph is that of a ragged batch."""
    ragged = replace(request, phase="ragged", dims={**request.dims, "page_size": 0})
    return warm(ragged)


def _facts(
    phase: str, batch: int, q_len: int, kv_len: int, static: tuple[object, ...], flags: tuple[bool, ...]
) -> tuple[object, ...]:
    q_bound = q_len if phase == "decode" or q_len == 1 else bound(q_len, MIN_PACKED_Q_LEN)
    return phase, batch, q_bound, bound(kv_len, MIN_KV_LEN), static, flags


def bound(length: int, least: int) -> int:
    """The power of two that is built for, so that few graphs serve all lengths."""
    return max(least, 1 << (max(length, 1) - 1).bit_length())


def plan(spec: AttentionSpec, batch: Batch) -> Runner:
    """Plan one batch: lengths, page table and bounds now; the graph when run() shows the strides."""
    return Plan(spec, batch).run


def plan_gathered(spec: AttentionSpec, batch: Batch) -> Runner:
    """Plan one paged batch whose keys and values are copied together first, each sequence's valid ones only."""
    if batch.kv_lens is None or batch.kv_indices is None:
        raise Unsupported("the lengths are not known on the host")
    total = sum(batch.kv_lens)
    size = total * spec.num_kv_heads * (spec.head_dim_qk + spec.head_dim_vo) * spec.kv_dtype.itemsize
    if size > MAX_GATHERED_BYTES:
        raise Unsupported(f"the gathered keys would take {size >> 20} MiB, at most {MAX_GATHERED_BYTES >> 20}")
    kv_len = batch.kv_len()
    ends = torch.zeros(batch.size + 1, dtype=torch.int32, device=batch.device)
    torch.cumsum(kv_len, 0, dtype=torch.int32, out=ends[1:])
    sequence = torch.repeat_interleave(kv_len, output_size=total)
    at = torch.arange(total, device=batch.device) - ends[sequence]
    pages = batch.kv_indices[batch.kv_indptr[sequence] + at // spec.page_size].long()
    slots = at % spec.page_size
    packed = replace(
        batch, page_size=0, kv_indptr=ends, kv_indices=None, last_page_len=None, _derived={}
    )  # the mask and query fields stay
    inner = Plan(replace(spec, phase="ragged", page_size=0), packed)

    def run(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float, extras: RunExtras | None
    ) -> None:
        inner.run(q, k[pages, slots], v[pages, slots], out, lse, scale, extras)

    return run


class Plan:
    """One planned batch. Queries of one length are dense; others are packed, each sequence at its element offset."""

    def __init__(self, spec: AttentionSpec, batch: Batch) -> None:
        self.spec, self.batch = spec, batch
        single = spec.phase == "prefill" and batch.max_q_len == 1 and batch.total_q == batch.size
        self.packed = not (spec.phase == "decode" or (single and not spec.use_cuda_graph))
        self.q_len = bound(batch.max_q_len, MIN_PACKED_Q_LEN) if self.packed else batch.total_q // batch.size
        if spec.window_left >= 0 and not spec.causal and self.q_len > 1:
            raise Unsupported("cuDNN takes a window only beside a causal mask")
        self.kv_len, self.table = self._keys()
        self.lengths = (batch.q_len(), batch.kv_len())
        self.scale = ctypes.c_float()  # on the host: cuDNN reads it when a graph executes
        self.length_pointers = [t.data_ptr() for t in self.lengths]
        self.scale_pointer = ctypes.addressof(self.scale)
        self.fix: Fix | None = keyless_rows(spec, batch, self.packed) if self.q_len > 1 else None
        self.starts: dict[tuple[int, int], Tensor] = {}
        self.graphs: dict[tuple[object, ...], graphs.Built] = {}

    def _keys(self) -> tuple[int, Tensor | None]:
        """The bound on the keys, and a page table of exactly that width (in graph mode the buffers' capacity)."""
        spec, batch = self.spec, self.batch
        if not spec.page_size:
            return bound(batch.max_kv_len, MIN_KV_LEN), None
        table = batch.block_table()
        if spec.use_cuda_graph:
            return table.shape[1] * spec.page_size, table
        length = bound(batch.max_kv_len, max(MIN_KV_LEN, spec.page_size))
        missing = length // spec.page_size - table.shape[1]
        return length, torch.cat((table, table[:, -1:].expand(-1, missing)), 1).contiguous()

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float, extras: RunExtras | None
    ) -> None:
        index = q.device.index
        sinks = None if extras is None or extras.sinks is None else extras.sinks.contiguous()
        graph = self._graph(q, k, v, out, lse, sinks is not None)
        starts = self._starts(q, k, v, out, lse) if self.packed else ()
        self.scale.value = scale
        pointers = [q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()]
        if lse is not None:
            pointers.append(lse.data_ptr())
        pointers += self.length_pointers
        if self.table is not None:
            pointers.append(self.table.data_ptr())
        pointers.append(self.scale_pointer)
        if sinks is not None:
            pointers.append(sinks.data_ptr())
        pointers += [t.data_ptr() for t in starts]
        stream = torch._C._cuda_getCurrentRawStream(index)
        graph.set_stream(stream)
        space = graphs.workspace(index, stream, graph.workspace, self.spec.use_cuda_graph)
        graph.launch(pointers, space.data_ptr())
        if lse is not None:
            lse.mul_(LOG2E)
        if self.fix is not None:
            self.fix(out, lse)

    def _graph(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, sinks: bool) -> graphs.Built:
        """The graph for these strides: of this plan, of this thread, or built now."""
        lse_stride = None if lse is None else lse.stride()
        key = (get_ident(), q.stride(), k.stride(), v.stride(), out.stride(), lse_stride, k.shape[0], sinks)
        found = self.graphs.get(key)
        if found is None:
            s = self.spec
            # With one query row a causal mask changes nothing. A window that reaches all keys does neither.
            window = s.window_left if 0 <= s.window_left < self.kv_len - 1 else -1
            layout = graphs.Layout(
                s.q_dtype, self.batch.size, self.q_len, self.kv_len, s.num_qo_heads, s.num_kv_heads, s.head_dim_qk,
                s.head_dim_vo, s.page_size, k.shape[0] if s.page_size else 0, self.packed,
                (s.causal and self.q_len > 1) or window >= 0, window, sinks,
                q.stride(), k.stride(), v.stride(), out.stride(), lse_stride,
            )  # fmt: skip
            found = self.graphs[key] = graphs.built(q.device, layout)
            _warm.add(self._built_facts(lse is not None, sinks))
        return found

    def _built_facts(self, lse: bool, sinks: bool) -> tuple[object, ...]:
        s, b = self.spec, self.batch
        static = (s.q_dtype, s.num_qo_heads, s.num_kv_heads, s.head_dim_qk, s.head_dim_vo, s.page_size)
        return _facts(s.phase, b.size, b.max_q_len, b.max_kv_len, static, (s.causal, s.window_left >= 0, lse, sinks))

    def _starts(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> list[Tensor]:
        """Element offsets of each sequence in the packed tensors, in the order of the graph's ids."""
        rows = [q, out] if lse is None else [q, out, lse]
        starts = [self._start(self.batch.qo_indptr, t.stride(0), 0) for t in rows]
        if not self.spec.page_size:
            starts += [self._start(self.batch.kv_indptr, t.stride(0), 1) for t in (k, v)]
        return starts

    def _start(self, indptr: Tensor, stride: int, which: int) -> Tensor:
        if self.spec.use_cuda_graph:  # captured, to follow the caller's buffers
            return indptr.long() * stride
        found = self.starts.get((which, stride))
        if found is None:
            found = self.starts[which, stride] = indptr.long() * stride
        return found
