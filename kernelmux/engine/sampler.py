"""Turn rows of logits into tokens. A row's token depends on that row, its parameters, its seed and its index only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kernelmux as km

MAX_SEED = 2**63 - 1
NUMBERS = 32  # random numbers that one draw may use, at most


@dataclass(frozen=True)
class Sampling:
    """How one request draws. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        limits = (
            ("temperature", self.temperature >= 0, "at least 0; 0 is greedy"),
            ("top_k", self.top_k >= 0, "at least 0; 0 is off"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1; 1 is off"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1; 0 is off"),
            ("seed", 0 <= self.seed <= MAX_SEED, f"0 to {MAX_SEED}"),
        )
        for name, good, limit in limits:
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)}, {limit}")

    @property
    def kind(self) -> str:
        """Which function draws. Chosen by a request's own parameters alone, so that its neighbours don't matter."""
        if self.temperature == 0:
            return "greedy"
        return "min_p" if self.min_p > 0 else "top_k_top_p"


def sample(logits: Tensor, how: Sequence[Sampling], index: Sequence[int]) -> list[int]:
    """Draw one token per row of logits [rows, vocab]; `index[r]` counts the tokens that row r's request drew before."""
    rows: dict[str, list[int]] = {}
    for row, sampling in enumerate(how):
        rows.setdefault(sampling.kind, []).append(row)
    tokens = [0] * len(how)
    for kind, members in rows.items():
        part = logits if len(members) == len(how) else logits[members]
        if kind == "greedy":
            drawn = km.top_k(part, 1, tie_break=km.TopKTieBreak.SMALL)[1].flatten()
        else:
            drawn = _draw(part, [how[r] for r in members], [index[r] for r in members])
        for row, token in zip(members, drawn.tolist(), strict=True):
            tokens[row] = token
    return tokens


def _draw(logits: Tensor, how: Sequence[Sampling], index: Sequence[int]) -> Tensor:
    def column(values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(logits.device, non_blocking=True)

    vocab = logits.shape[-1]
    probs = km.softmax(logits, temperature=column([s.temperature for s in how], torch.float32))
    top_k = column([min(s.top_k or vocab, vocab) for s in how], torch.int32)
    top_p = column([s.top_p for s in how], torch.float32)
    offset = column([NUMBERS * i for i in index], torch.int64)
    random: dict[str, Any] = {"seed": column([s.seed for s in how], torch.int64), "offset": offset}
    if how[0].kind == "top_k_top_p":
        return km.top_k_top_p_sampling_from_probs(probs, top_k, top_p, **random)
    probs = km.top_p_renorm_probs(km.top_k_renorm_probs(probs, top_k), top_p)
    return km.min_p_sampling_from_probs(probs, column([s.min_p for s in how], torch.float32), **random)
