"""Attention over paged and ragged KV caches, and what goes with it."""

from kernelmux.dispatch.attention.merge import merge_state, merge_state_in_place, merge_states
from kernelmux.dispatch.attention.packbits import packbits, segment_packbits

__all__ = ["merge_state", "merge_state_in_place", "merge_states", "packbits", "segment_packbits"]
