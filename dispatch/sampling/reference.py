"""Sampling in plain torch: softmax, filters, and drawing token ids.

Every filter keeps an upper set of its row, {i : p_i >= threshold}, so ties with the last kept element are all kept.
Sums over a row are accumulated in float64. A row that holds a NaN, an infinity or nothing positive has no distribution:
its sample is 0 and it is not valid.
"""

import math
from typing import Any

import torch
from torch import Tensor

from kernelmux.dispatch.sampling.philox import uniform

_CHUNK = 1 << 24  # elements worked on at a time, so that the float64 copies stay small


def softmax(logits: Tensor, temperature: float | Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Softmax of logits / temperature. Temperature 0: uniform over the elements above -inf. All -inf: zeros."""
    x = _work(logits)
    masked = x == -math.inf
    empty = masked.all(-1, keepdim=True)
    if temperature is not None:
        t = _column(temperature, x.dtype, x)
        still = t == 0
        peak = x.detach().amax(-1, keepdim=True).masked_fill(empty, 0)
        x = torch.where(still, 0.0, (x - peak) / t.masked_fill(still, 1)).masked_fill(masked, -math.inf)
    probs = torch.softmax(x.masked_fill(empty, 0), -1).masked_fill(empty, 0)
    return probs.float() if out is None else out.copy_(probs)


def top_p_renorm_probs(probs: Tensor, top_p: float | Tensor, out: Tensor | None = None) -> Tensor:
    """Zero what lies outside the top-p set, divide by the sum of the rest; float32."""
    kept = _renormalise(probs, top_p=top_p)
    return kept.float() if out is None else out.copy_(kept)


def top_k_renorm_probs(probs: Tensor, top_k: int | Tensor, out: Tensor | None = None) -> Tensor:
    """Zero what lies below the k-th largest, divide by the sum of the rest; the dtype of probs."""
    kept = _renormalise(probs, top_k=top_k)
    return kept.to(probs.dtype) if out is None else out.copy_(kept)


def min_p_renorm_probs(probs: Tensor, min_p: float | Tensor) -> Tensor:
    """Zero what lies below min_p times the largest, divide by the sum of the rest; float32."""
    return _renormalise(probs, min_p=min_p).float()


def top_k_cut_probs(probs: Tensor, top_k: int | Tensor) -> Tensor:
    """Zero what lies below the k-th largest, and leave the rest as it is."""
    return probs.masked_fill(probs < top_k_threshold(probs.detach(), top_k), 0)


def scale_logits(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """logits / temperature, at least float32; 0 for temperature 0; -inf stays."""
    x = _work(logits)
    t = _column(temperature, x.dtype, x)
    return torch.where(t == 0, 0.0, x / t.masked_fill(t == 0, 1)).masked_fill(x == -math.inf, -math.inf)


def top_k_mask_logits(logits: Tensor, top_k: int | Tensor, out: Tensor | None = None) -> Tensor:
    """Set what lies below the k-th largest to -inf. NaN counts as the largest and is kept."""
    masked = logits.masked_fill(logits < top_k_threshold(logits.detach(), top_k), -math.inf)
    return masked if out is None else out.copy_(masked)


@torch.no_grad()
def sampling_from_probs(
    probs: Tensor,
    indices: Tensor | None,
    top_k: int | Tensor | None,
    top_p: float | Tensor | None,
    min_p: float | Tensor | None,
    joint: bool,
    seed: int | Tensor,
    offset: int | Tensor,
    out: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Draw one id per output from the rows' filtered probabilities, by inverting their running sum at number 0.

    Args:
        indices: [batch], the row of each output; None: output i draws from row i.
        top_k, top_p, min_p: the filters; a value, one per row of probs, or None for off.
        joint: top_p looks at the probabilities as given; else at those renormalised after top_k.
    """
    batch = probs.shape[0] if indices is None else indices.shape[0]
    if out is None:
        out = torch.empty(batch, dtype=torch.int32 if indices is None else indices.dtype, device=probs.device)
    for rows in _chunks(batch, probs.shape[1]):
        at = _rows(rows, indices)
        p = _work(probs[at]).clamp_min(0)
        k, q, m = _at(top_k, at), _at(top_p, at), _at(min_p, at)
        u = uniform(seed, offset, rows, batch, 1, probs)
        ids, ok = draw(torch.where(p >= threshold(p, k, q, m, joint), p, 0), u)
        ok &= p.sum(-1).isfinite()
        out[rows.start : rows.stop] = ids.where(ok, 0)
        if valid is not None:
            valid[rows.start : rows.stop] = ok
    return out


@torch.no_grad()
def sampling_from_logits(
    logits: Tensor, indices: Tensor | None, seed: int | Tensor, offset: int | Tensor, out: Tensor | None = None
) -> Tensor:
    """Draw argmax(logits + g) with g_v = -log(-log(1 - u_v)), u_v number v: distributed as softmax(logits)."""
    batch = logits.shape[0] if indices is None else indices.shape[0]
    if out is None:
        out = torch.empty(batch, dtype=torch.int32 if indices is None else indices.dtype, device=logits.device)
    for rows in _chunks(batch, logits.shape[1]):
        x = logits[_rows(rows, indices)].double()
        u = uniform(seed, offset, rows, batch, logits.shape[1], logits)
        ids = (x - u.neg().log1p().neg().log()).argmax(-1)
        ok = (x.amax(-1) > -math.inf) & ~x.isnan().any(-1)
        out[rows.start : rows.stop] = ids.where(ok, 0)
    return out


def draw(weight: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The first index of positive weight at which the running sum passes u of the total; and whether there is one.

    u [rows, 1] lies in (0, 1). An index without weight is never taken, however the sums round.
    """
    sums = weight.cumsum(-1, dtype=torch.float64).masked_fill(weight <= 0, 0)
    total = sums.amax(-1, keepdim=True)
    return (sums > u * total).byte().argmax(-1), (total > 0).squeeze(-1)


def threshold(
    probs: Tensor,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    joint: bool = False,
) -> Tensor:
    """The least probability that all filters keep: [rows or 1, 1] float64."""
    least = probs.new_full((1, 1), -math.inf, dtype=torch.float64)
    ordered = None
    if top_p is not None or isinstance(top_k, Tensor):
        ordered = probs.sort(-1, descending=True).values
    if top_k is not None:
        least = top_k_threshold(probs, top_k, ordered).double()
    if top_p is not None and ordered is not None:
        least = torch.maximum(least, _top_p_threshold(ordered.double(), top_p, None if joint else least))
    if min_p is not None:
        limit = _column(min_p, torch.float32, probs).double()
        least = torch.maximum(least, limit * probs.amax(-1, keepdim=True))
    return least


def top_k_threshold(values: Tensor, top_k: int | Tensor, ordered: Tensor | None = None) -> Tensor:
    """The k-th largest of each row; -inf where k <= 0 or k >= vocab: [rows or 1, 1]. `ordered`: the rows, sorted."""
    vocab = values.shape[-1]
    if isinstance(top_k, int):
        if not 0 < top_k < vocab:
            return values.new_full((1, 1), -math.inf)
        return values.topk(top_k).values[:, -1:] if ordered is None else ordered[:, top_k - 1, None]
    if ordered is None:
        ordered = values.sort(-1, descending=True).values
    k = top_k[:, None].long()
    return ordered.gather(-1, k.clamp(1, vocab) - 1).masked_fill((k <= 0) | (k >= vocab), -math.inf)


def _top_p_threshold(ordered: Tensor, top_p: float | Tensor, least: Tensor | None) -> Tensor:
    """The least p_i with (sum of all p_j > p_i) < top_p, or the maximum; -inf where top_p >= 1: [rows, 1].

    `ordered` holds the rows sorted downwards, float64. With `least`, they are first cut there and renormalised.
    """
    limit = _column(top_p, torch.float32, ordered).double()
    share = limit
    if least is not None:
        ordered = ordered.masked_fill(ordered < least, 0)
        share = limit * ordered.sum(-1, keepdim=True).where(least > -math.inf, 1)
    count = (ordered.cumsum(-1)[:, :-1] < share).sum(-1, keepdim=True)
    return ordered.gather(-1, count).masked_fill(limit >= 1, -math.inf)


def _renormalise(probs: Tensor, top_k: Any = None, top_p: Any = None, min_p: Any = None) -> Tensor:
    p = _work(probs).clamp_min(0)
    kept = torch.where(p >= threshold(p.detach(), top_k, top_p, min_p), p, 0).double()
    total = kept.sum(-1, keepdim=True)
    spoilt = p.detach().sum(-1, keepdim=True).isnan()
    return (kept / total.masked_fill(total == 0, 1)).masked_fill(spoilt, math.nan)


def _work(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _column(value: float | Tensor, dtype: torch.dtype, like: Tensor) -> Tensor:
    """A parameter as [rows or 1, 1]; scalars are rounded to the dtype just as tensors are."""
    if isinstance(value, Tensor):
        return value.to(dtype)[:, None]
    return torch.full((1, 1), value, dtype=dtype, device=like.device)


def _rows(outputs: range, indices: Tensor | None) -> Any:
    """What selects the distributions of some outputs."""
    at = slice(outputs.start, outputs.stop)
    return at if indices is None else indices[at].long()


def _at(value: Any, rows: Any) -> Any:
    return value[rows] if isinstance(value, Tensor) else value


def _chunks(batch: int, vocab: int) -> list[range]:
    step = max(1, _CHUNK // max(1, vocab))
    return [range(start, min(batch, start + step)) for start in range(0, batch, step)]
