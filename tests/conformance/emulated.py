"""Libraries emulated on a CPU, so that adapters are tested where no GPU is: same arguments, same bad habits.

Each answers as its library was seen to answer: natural logarithms, heads before rows, its values for rows without
keys, rows that stay unwritten. They are strict about what the library only assumes.
"""

import ctypes
import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kernelmux.backends.cudnn import graph as cudnn_graph
from kernelmux.backends.cudnn.graph import Built, Layout


def formula(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int, right: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One sequence: out [n, heads, dim] and natural lse [n, heads]; 0 and -inf in rows without keys."""
    (n, heads, _), m = q.shape, k.shape[0]
    k, v = (t.double().repeat_interleave(heads // k.shape[1], 1) for t in (k, v))
    s = torch.einsum("ihd,jhd->hij", q.double(), k) * scale
    p, j = torch.arange(n)[:, None] + m - n, torch.arange(m)
    right = 0 if causal else right
    hidden = ((j > p + right) & torch.tensor(right >= 0)) | ((j < p - left) & torch.tensor(left >= 0))
    s = s.masked_fill(hidden, -math.inf)
    if sinks is not None:
        s = torch.cat((s, sinks.double()[:, None, None].expand(-1, n, 1)), -1)
        v = torch.cat((v, torch.zeros_like(v[:1]) if m else v.new_zeros(1, *v.shape[1:])))
    lse = torch.logsumexp(s, -1) if s.shape[-1] else s.new_full(s.shape[:2], -math.inf)
    weights = (s - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    return torch.einsum("hij,jhd->ihd", weights, v), lse.T


def flash_attn_3_fwd(*args: Any) -> tuple[Tensor, Tensor, None, None]:
    """torch.ops.flash_attn_3.fwd, on paged keys or packed ones."""
    q, k, v, _, _, _, out, q_starts, k_starts, _, _, used, max_q, max_k, table = args[:15]
    scale, causal, left, right = args[23:27]
    sinks = args[34] if len(args) > 34 else None
    assert len(args) in (34, 35) and args[27:31] == (0, 0.0, False, None) and isinstance(args[31], int)
    assert q.dtype == k.dtype == v.dtype and all(t.stride(-1) == 1 for t in (q, k, v, out))
    assert sinks is None or (sinks.dtype == torch.bfloat16 and sinks.is_contiguous())
    for index in (q_starts, k_starts, used):
        assert index is None or (index.dtype == torch.int32 and index.is_contiguous())
    assert (table is None) == (k_starts is not None) and (q_starts is None) == (max_q is None)
    batch = used.shape[0] if table is not None else k_starts.shape[0] - 1
    starts = q_starts.tolist() if q_starts is not None else [i * q.shape[1] for i in range(batch + 1)]
    rows, results = q.flatten(0, 1) if q_starts is None else q, out.flatten(0, 1) if q_starts is None else out
    assert q_starts is None or max_q >= max(b - a for a, b in itertools.pairwise(starts))
    lse = torch.full((q.shape[-2], rows.shape[0]), math.nan)
    for i in range(batch):
        at = slice(starts[i], starts[i + 1])
        if table is None:
            assert max_k >= k_starts[i + 1] - k_starts[i]
            keys, values = (t[k_starts[i] : k_starts[i + 1]] for t in (k, v))
        else:
            assert table.dtype == torch.int32 and table.stride(-1) == 1 and table.shape[0] == batch
            pages = table[i, : -(-int(used[i]) // k.shape[1])].long()
            keys, values = (t[pages].flatten(0, 1)[: int(used[i])] for t in (k, v))
        o, sums = formula(rows[at], keys, values, scale, causal, left, right, sinks)
        blind = formula(rows[at], keys, values, scale, causal, left, right)[1] == -math.inf
        sums = sums.masked_fill(blind, -math.inf)  # also with sinks
        results[at], lse[:, at] = o.to(out.dtype), sums.T.float()
    assert results.data_ptr() == out.data_ptr()
    return out, lse if q_starts is not None else lse.unflatten(1, (batch, -1)).transpose(0, 1), None, None


def install_flash_attn_3(patch: Any) -> None:
    arguments = SimpleNamespace(arguments=[None] * 35)
    default = type("fwd", (), {"_schema": arguments, "__call__": lambda self, *args: flash_attn_3_fwd(*args)})()
    patch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(fwd=SimpleNamespace(default=default)), raising=False)


def torch_flash(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, max_q: int, max_k: int, dropout: float,
    causal: bool, debug: bool, *, scale: float, window_size_left: int, window_size_right: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """aten::_flash_attention_forward: an LSE of +inf for rows without keys."""
    out, lse = torch.full_like(q, math.nan), torch.full((q.shape[1], q.shape[0]), math.nan)
    for i in range(q_starts.shape[0] - 1):
        at, keys = slice(q_starts[i], q_starts[i + 1]), slice(k_starts[i], k_starts[i + 1])
        assert at.stop - at.start <= max_q and keys.stop - keys.start <= max_k
        o, sums = formula(q[at], k[keys], v[keys], scale, causal, window_size_left, window_size_right)
        out[at], lse[:, at] = o.to(q.dtype), sums.T.masked_fill(-math.inf == sums.T, math.inf).float()
    return out, lse


class Cudnn:
    """A graph's execution, from nothing but its layout and the pointers, in the order of its tensors' ids."""

    def __init__(self, at: Layout) -> None:
        self.at = at
        g = cudnn_graph
        stats, packed_kv = at.lse_stride is not None, at.page_size == 0
        present = {
            g.Q: True, g.K: True, g.V: True, g.OUT: True, g.STATS: stats, g.Q_LEN: True, g.KV_LEN: True,
            g.TABLE: not packed_kv, g.SCALE: True, g.SINK: at.sinks, g.Q_START: at.packed_q,
            g.OUT_START: at.packed_q, g.STATS_START: at.packed_q and stats, g.K_START: packed_kv, g.V_START: packed_kv,
        }  # fmt: skip
        self.ids = [i for i, there in sorted(present.items()) if there]
        assert at.window_left < 0 or at.causal
        assert not at.sinks or at.q_len > 1
        assert not at.page_size or at.kv_len % at.page_size == 0
        assert at.packed_q or not packed_kv, "no engine takes packed keys beside dense queries"

    def launch(self, pointers: Sequence[int], workspace: int) -> None:
        assert len(pointers) == len(self.ids)
        p, at, g = dict(zip(self.ids, pointers, strict=True)), self.at, cudnn_graph
        q_lens, kv_lens = (memory(p[i], torch.int32, (at.batch,)).tolist() for i in (g.Q_LEN, g.KV_LEN))
        scale = memory(p[g.SCALE], torch.float32, (1,)).item()
        sinks = memory(p[g.SINK], torch.float32, (at.num_qo_heads,)) if at.sinks else None
        for i, (n, m) in enumerate(zip(q_lens, kv_lens, strict=True)):
            assert n <= at.q_len and m <= at.kv_len
            if n == 0 or (m == 0 and n > 1):
                continue  # left unwritten
            q = self._rows(p, g.Q, g.Q_START, i, n, at.num_qo_heads, at.dim_qk, at.q_stride, at.dtype)
            k, v = self._keys(p, i, m)
            o, sums = formula(q, k, v, scale, at.causal, at.window_left, -1, sinks)
            out = self._rows(p, g.OUT, g.OUT_START, i, n, at.num_qo_heads, at.dim_vo, at.out_stride, at.dtype)
            blind = (sums == -math.inf).all(1)
            if n > 1:  # nothing is known of such rows: the worst
                o[blind], sums[blind] = math.nan, math.nan
            out.copy_(o)
            if at.lse_stride is not None:
                stride = (*at.lse_stride, 1)
                lse = self._rows(p, g.STATS, g.STATS_START, i, n, at.num_qo_heads, 1, stride, torch.float32)
                lse.copy_(sums[..., None])

    def _rows(
        self, p: dict[int, int], tensor: int, start: int, i: int, n: int, heads: int, dim: int,
        stride: tuple[int, ...], dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        offset = i * (self.at.q_len if tensor < 6 else 0) * stride[0]
        if start in p:
            offset = int(memory(p[start], torch.int64, (self.at.batch + 1,))[i])
        return memory(p[tensor] + offset * dtype.itemsize, dtype, (n, heads, dim), stride)

    def _keys(self, p: dict[int, int], i: int, m: int) -> list[Tensor]:
        at, g, found = self.at, cudnn_graph, []
        parts = ((g.K, g.K_START, at.dim_qk, at.k_stride), (g.V, g.V_START, at.dim_vo, at.v_stride))
        for tensor, start, dim, stride in parts:
            if not at.page_size:
                found.append(self._rows(p, tensor, start, i, m, at.num_kv_heads, dim, stride, at.dtype))
                continue
            width = at.kv_len // at.page_size
            tile = min(-(-m // 64) * 64, at.kv_len) if at.q_len > 1 else m
            table = memory(p[g.TABLE], torch.int32, (at.batch, width))[i, : -(-tile // at.page_size)].long()
            cache = memory(p[tensor], at.dtype, (at.pages, at.page_size, at.num_kv_heads, dim), stride)
            keys = cache[table].flatten(0, 1)[:tile]
            found.append(keys[:m] + keys[m:].sum() * 0)  # a whole tile is read, and what is NaN in it matters
        return found


def install_cudnn(patch: Any) -> None:
    def built(device: torch.device, layout: Layout) -> Built:
        return Built(None, 16, lambda stream: None, Cudnn(layout).launch)

    patch.setattr(cudnn_graph, "built", built)
    patch.setattr(cudnn_graph, "workspace", lambda *args: torch.empty(16, dtype=torch.uint8))
    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)


def memory(address: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int] = ()) -> Tensor:
    """The tensor at an address."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    if not stride:
        stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    count = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).as_strided(tuple(shape), tuple(stride))
