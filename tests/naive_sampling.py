"""What the samplers should do, in plain Python floats (float64), and a chi-square test."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def off(k: int, vocab: int) -> bool:
    return k <= 0 or k >= vocab


def top_k_set(p: Sequence[float], k: int) -> set[int]:
    if off(k, len(p)):
        return set(range(len(p)))
    return {i for i in range(len(p)) if sum(other > p[i] for other in p) < k}


def top_p_set(p: Sequence[float], top_p: float) -> set[int]:
    if top_p >= 1:
        return set(range(len(p)))
    nucleus = {i for i in range(len(p)) if math.fsum(other for other in p if other > p[i]) < top_p}
    return nucleus | {i for i in range(len(p)) if p[i] == max(p)}


def renormalised(p: Sequence[float], kept: set[int]) -> list[float]:
    total = math.fsum(p[i] for i in kept)
    return [p[i] / total if i in kept and total else 0.0 for i in range(len(p))]


def filtered(p: Sequence[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, joint: bool = False) -> list:
    """The distribution that is drawn from."""
    kept = top_k_set(p, top_k)
    kept = kept & top_p_set(p if joint or off(top_k, len(p)) else renormalised(p, kept), top_p)
    kept = {i for i in kept if p[i] >= min_p * max(p)}
    return renormalised(p, kept)


def single(value: float) -> float:
    """A number as a float32 argument holds it."""
    return torch.tensor(value, dtype=torch.float32).item()


def assert_distributed(ids: Tensor, expected: Sequence[float]) -> None:
    """ids are draws from `expected`: none outside the support, and a chi-square below its 4 sigma point."""
    counts = torch.bincount(ids.flatten().long(), minlength=len(expected)).tolist()
    assert len(counts) == len(expected), "an id is not in the vocabulary"
    outside = [i for i, n in enumerate(counts) if n and not expected[i]]
    assert not outside, f"drawn outside the support: {outside[:5]}"
    cells = [(n, ids.numel() * e) for n, e in zip(counts, expected, strict=True) if e > 0]
    assert all(mean >= 4 for _, mean in cells), "too few draws for this test"
    degrees = len(cells) - 1
    if degrees == 0:
        return
    statistic = sum((n - mean) ** 2 / mean for n, mean in cells)
    spread = 2 / (9 * degrees)
    sigmas = ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    assert sigmas < 4, f"chi-square {statistic:.1f} of {degrees} degrees, {sigmas:.1f} sigma"
