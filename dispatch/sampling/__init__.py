"""Sampling: distributions, filters, and drawing token ids with reproducible random numbers."""

from kernelmux.dispatch.sampling.filters import (
    softmax,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_p_renorm_probs,
)
from kernelmux.dispatch.sampling.filters import top_k_renorm_prob as top_k_renorm_prob  # old names, in this module only
from kernelmux.dispatch.sampling.filters import top_p_renorm_prob as top_p_renorm_prob
from kernelmux.dispatch.sampling.sampling import (
    min_p_sampling_from_probs,
    sampling_from_logits,
    sampling_from_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_logits,
    top_k_top_p_sampling_from_probs,
    top_p_sampling_from_probs,
)
from kernelmux.dispatch.sampling.seeds import get_seed_and_offset
from kernelmux.dispatch.sampling.speculative import chain_speculative_sampling

__all__ = [
    "chain_speculative_sampling",
    "get_seed_and_offset",
    "min_p_sampling_from_probs",
    "sampling_from_logits",
    "sampling_from_probs",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]
