"""Pages read slot by slot: each slot of a page is taken for a page of one key, where it lies.

With several query rows cuDNN reads past a sequence's end in its last page, and what it finds there matters. In a table
of slots nothing lies past the end: the columns behind a sequence's last key repeat that key.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kernelmux.backends.cudnn.attention import MIN_KV_LEN, Plan, bound, warm
from kernelmux.capabilities import AttentionSpec, Batch, Request, RunExtras, Runner, Unsupported


def warm_slots(request: Request) -> bool:
    """Whether the graph of such a batch with pages of one key was built."""
    return warm(replace(request, dims={**request.dims, "page_size": 1}))


def plan_slots(spec: AttentionSpec, batch: Batch) -> Runner:
    """Plan one paged batch of any page size; the strides, seen in run(), say which ids the slots have."""
    return _Slots(spec, batch).run


class _Slots(Plan):
    """A plan for pages of one key, over a table of slots that follows the table of pages."""

    def __init__(self, spec: AttentionSpec, batch: Batch) -> None:
        self.page_size = spec.page_size
        super().__init__(replace(spec, page_size=1), batch)

    def _keys(self) -> tuple[int, Tensor | None]:
        self.batch.block_table()  # asked for before the table of slots, so refreshed before it
        self.batch.kv_len()
        width = self.batch.table_width * self.page_size
        return width if self.spec.use_cuda_graph else bound(width, MIN_KV_LEN), None

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float, extras: RunExtras | None
    ) -> None:
        step = _slots_per_page(k)
        if step != _slots_per_page(v):
            raise Unsupported("keys and values lie differently in their pages")
        rows = (k.shape[0] - 1) * step + self.page_size
        if rows >= 1 << 31:
            raise Unsupported(f"the cache has {rows} slots, 32-bit ids reach {(1 << 31) - 1}")
        self.table = self._table(step)
        k, v = (t.as_strided((rows, 1, *t.shape[2:]), (t.stride(1), *t.stride()[1:])) for t in (k, v))
        super().run(q, k, v, out, lse, scale, extras)

    def _table(self, step: int) -> Tensor:
        """Slot ids [batch, keys], where neighbouring pages are `step` slots apart; refreshed with the batch."""
        batch, size = self.batch, self.page_size
        pages, kv_len = batch.block_table(), batch.kv_len()

        def fill(out: Tensor) -> None:
            last = (kv_len - 1).clamp_(min=0)[:, None]
            key = torch.arange(out.shape[1], dtype=torch.int32, device=out.device).minimum(last)
            out.copy_(pages.gather(1, (key // size).long())).mul_(step).add_(key % size)

        return batch._form(f"cudnn_slots_{step}", (batch.size, self.kv_len), fill)


def _slots_per_page(cache: Tensor) -> int:
    """Distance of neighbouring pages in slots."""
    slots, rest = divmod(cache.stride(0), cache.stride(1))
    if rest:
        raise Unsupported(
            f"pages are {cache.stride(0)} elements apart, not a multiple of the {cache.stride(1)} of a slot"
        )
    return slots
