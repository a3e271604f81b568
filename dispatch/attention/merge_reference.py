"""Merging attention states in plain torch. A state is (v, s): a normalised output, and the base-2 log-sum-exp."""

import math

import torch
from torch import Tensor


def merge_state(
    v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, v: Tensor | None = None, s: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge two states [rows, heads, dim], [rows, heads]."""
    merged = merge_states(torch.stack((v_a, v_b), dim=1), torch.stack((s_a, s_b), dim=1))
    return _into(*merged, v, s)


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None) -> None:
    """Merge another state into (v, s). Rows whose mask is zero keep what they hold."""
    merged_v, merged_s = merge_state(v, s, v_other, s_other)
    if mask is not None:
        keep = mask == 0
        merged_v = torch.where(keep[:, None, None], v, merged_v)
        merged_s = torch.where(keep[:, None], s, merged_s)
    v.copy_(merged_v)
    s.copy_(merged_s)


def merge_states(
    v: Tensor, s: Tensor, v_merged: Tensor | None = None, s_merged: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge n states [rows, n, heads, dim], [rows, n, heads].

    With m = max s: weights w = 2^(s - m), v = Σ w·v / Σ w, s = m + log2 Σ w. A state with s = -inf has no weight,
    whatever its v holds; without any weight v is 0 and s is -inf.
    """
    work = torch.float64 if v.dtype == torch.float64 else torch.float32
    s = s.to(work)
    peak = s.detach().amax(1) if s.shape[1] else s.new_full((s.shape[0], s.shape[2]), -math.inf)
    peak = peak.masked_fill(peak == -math.inf, 0)
    weight = (s - peak[:, None]).exp2()
    total = weight.sum(1)
    weighted = torch.where(weight[..., None] == 0, 0.0, v.to(work) * weight[..., None]).sum(1)
    mean = weighted / total.masked_fill(total == 0, 1)[..., None]
    return _into(mean.to(v.dtype), peak + total.log2(), v_merged, s_merged)


def _into(v: Tensor, s: Tensor, v_out: Tensor | None, s_out: Tensor | None) -> tuple[Tensor, Tensor]:
    return v if v_out is None else v_out.copy_(v), s if s_out is None else s_out.copy_(s)
