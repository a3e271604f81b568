"""What one batch of attention needs: its static description and its metadata, in the forms that kernels ask for."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

NO_KEYS_LSE = float("-inf")


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Everything static about the attention of one planned batch. Hashable: it keys what adapters cache.

    `phase` is "decode" (paged KV, `q_len_per_req` query rows each), "prefill" (paged KV, any query lengths) or
    "ragged" (keys and values packed like the queries). `page_size` is 0 when ragged. `window_left` is inclusive,
    -1 = off; `soft_cap` 0.0 = off; causal masks are aligned to the bottom right.
    """

    phase: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    causal: bool = False
    window_left: int = -1
    soft_cap: float = 0.0
    pos_encoding: str = "NONE"  # "NONE", "ROPE_LLAMA" or "ALIBI"
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    custom_mask: bool = False
    multi_item: bool = False
    bidirectional: bool = False
    nvfp4_kv: bool = False  # kv_dtype is uint8: two E2M1 a byte, block scales beside the cache
    use_cuda_graph: bool = False
    fixed_split: int = 0  # pages per split, 0 = the kernel's choice
    disable_split: bool = False

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads


@dataclass(slots=True, repr=False)
class RunExtras:
    """Arguments of `run` that most calls leave out. Each one that is set is a feature of the request."""

    sinks: Tensor | None = None  # float32 [num_qo_heads], natural-log units, enters the softmax denominator and the LSE
    k_sf: Tensor | None = None  # NVFP4 block scales, NHD-strided [pages, page_size, heads, head_dim/16] (ragged: 3-D)
    v_sf: Tensor | None = None
    scale_q: Tensor | None = None  # float32 [num_qo_heads], per-head dequantisation factors of fp8 q, k, v
    scale_k: Tensor | None = None  # float32 [num_kv_heads]
    scale_v: Tensor | None = None
    qk_scale: Tensor | None = None  # float32 scalar on the device: multiplies sm_scale (tensor-valued q_scale*k_scale)
    ranges: Tensor | None = None  # int32 [total_q, 2], inclusive; (-1, -1) = none
    causal_window_left: int = -1
    range_window_left: int = -1

    def __repr__(self) -> str:
        """Shapes and numbers only: values would synchronise with the device."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        texts = [f"{n}={list(v.shape) if isinstance(v, Tensor) else v}" for n, v in given.items() if v is not None]
        return f"RunExtras({', '.join(texts)})"


# run(q, k, v, out, lse, sm_scale, extras) -> None
#   q   [total_q, num_qo_heads, head_dim_qk]      k, v  paged: [pages, page_size, num_kv_heads, dim], any strides with a
#   out [total_q, num_qo_heads, head_dim_vo]            unit last one (HND caches arrive as permuted views);
#   lse None or float32 [total_q, num_qo_heads]         ragged: [total_kv or more, num_kv_heads, dim]
# q and out have any strides with a unit last one, lse is contiguous. In graph mode q may have more rows than the
# sequences use, up to batch.total_q.
# A kernel writes every row of out (0 for a row without keys) and of lse (base 2, -inf for a row without keys).
Runner = Callable[[Tensor, Tensor, Tensor, Tensor, "Tensor | None", float, "RunExtras | None"], None]


@dataclass(slots=True)
class Batch:
    """Metadata of one planned batch. Index tensors are int32 on `device`; derived forms are built on first request.

    In graph mode the index tensors are the caller's fixed buffers: `update()` rebuilds, in place and without a host
    sync, every derived form that was asked for, so a captured `run` reads what the buffers hold at replay.
    """

    device: torch.device
    size: int  # sequences
    total_q: int  # query rows
    max_q_len: int  # upper bounds known on the host
    max_kv_len: int
    page_size: int  # 0 = ragged
    qo_indptr: Tensor  # [size + 1] rows of q
    kv_indptr: Tensor  # [size + 1] pages, or rows of k when ragged
    kv_indices: Tensor | None = None  # [pages in use or more] page ids
    last_page_len: Tensor | None = None  # [size]
    q_lens: tuple[int, ...] | None = None  # host copies, None in graph mode
    kv_lens: tuple[int, ...] | None = None
    packed_mask: Tensor | None = None  # uint8, little bit order, each sequence padded to a byte
    mask_indptr: Tensor | None = None  # [size + 1] byte offsets
    prefix_len: Tensor | None = None  # multi-item scoring: [size]
    token_pos_in_items: Tensor | None = None  # [size * token_pos_in_items_len]
    token_pos_in_items_len: int = 0
    max_item_len: Tensor | None = None
    refreshed: object = None  # the capture in which the derived forms were last rebuilt
    _derived: dict[str, tuple[Tensor, Callable[[Tensor], None]]] = field(default_factory=dict)

    @property
    def table_width(self) -> int:
        """Columns of the dense page table: pages of the longest sequence, at least 1."""
        return max(1, -(-self.max_kv_len // self.page_size))

    def _form(self, name: str, shape: tuple[int, ...], fill: Callable[[Tensor], None]) -> Tensor:
        if name not in self._derived:
            buffer = torch.zeros(shape, dtype=torch.int32, device=self.device)
            fill(buffer)
            self._derived[name] = (buffer, fill)
        return self._derived[name][0]

    def provide(self, q_len: Tensor | None = None, kv_len: Tensor | None = None) -> None:
        """Give derived forms that are known already, int32 [size] on `device`, so that they are not computed."""
        if q_len is not None:
            self._derived["q_len"] = (q_len, self._fill_q_len)
        if kv_len is not None:
            self._derived["kv_len"] = (kv_len, self._fill_kv_len)

    def q_len(self) -> Tensor:
        """Query rows of each sequence, int32 [size]."""
        return self._form("q_len", (self.size,), self._fill_q_len)

    def _fill_q_len(self, out: Tensor) -> None:
        torch.sub(self.qo_indptr[1:], self.qo_indptr[:-1], out=out)

    def kv_len(self) -> Tensor:
        """Keys of each sequence, int32 [size]."""
        return self._form("kv_len", (self.size,), self._fill_kv_len)

    def _fill_kv_len(self, out: Tensor) -> None:
        count = self.kv_indptr[1:] - self.kv_indptr[:-1]
        if self.page_size == 0:
            out.copy_(count)
            return
        assert self.last_page_len is not None
        out.copy_(((count - 1) * self.page_size + self.last_page_len).masked_fill_(count <= 0, 0))

    def block_table(self) -> Tensor:
        """Page ids, int32 [size, table_width]. Columns past a sequence's pages repeat its last one, so that a kernel
        that loads a whole tile meets no foreign memory; a sequence without pages has zeros."""
        return self._form("block_table", (self.size, self.table_width), self._fill_block_table)

    def _fill_block_table(self, out: Tensor) -> None:
        assert self.kv_indices is not None
        if self.kv_indices.numel() == 0:
            out.zero_()
            return
        first, end = self.kv_indptr[:-1, None], self.kv_indptr[1:, None]
        columns = torch.arange(out.shape[1], dtype=torch.int32, device=self.device)
        last = (end - 1).clamp_(0, self.kv_indices.numel() - 1)
        at = torch.minimum(torch.add(first, columns, out=out), last, out=out)
        out.copy_(self.kv_indices.index_select(0, at.view(-1)).view_as(out)).mul_(end > first)

    def update(self) -> None:
        """Rebuild every derived form from the index tensors, in place (captured by a CUDA graph)."""
        for buffer, fill in self._derived.values():
            fill(buffer)
