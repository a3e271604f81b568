"""Attention over paged and ragged KV caches, and what goes with it."""

from kernelmux.dispatch.attention.bidirectional import BatchPrefillWithCausalBidirectionalRangesWrapper
from kernelmux.dispatch.attention.decode import BatchDecodeWithPagedKVCacheWrapper
from kernelmux.dispatch.attention.decode_graph import CUDAGraphBatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from kernelmux.dispatch.attention.merge import merge_state, merge_state_in_place, merge_states
from kernelmux.dispatch.attention.packbits import packbits, segment_packbits
from kernelmux.dispatch.attention.prefill import BatchPrefillWithPagedKVCacheWrapper
from kernelmux.dispatch.attention.ragged import BatchPrefillWithRaggedKVCacheWrapper
from kernelmux.dispatch.attention.single import (
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "packbits",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
