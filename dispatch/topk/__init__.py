"""Top-k selection, and its use for the keys of sparse attention."""

from kernelmux.dispatch.topk.select import top_k
from kernelmux.dispatch.topk.select import topk as topk  # the other name, in this module only
from kernelmux.dispatch.topk.tie import TopKTieBreak
from kernelmux.dispatch.topk.transform import top_k_page_table_transform, top_k_ragged_transform

__all__ = ["TopKTieBreak", "top_k", "top_k_page_table_transform", "top_k_ragged_transform"]
