"""The paged KV cache: a pool of pages, and the sequences that hold them."""

from dataclasses import dataclass, field
from typing import Any

import torch

from kernelmux.engine.config import ModelConfig
from kernelmux.engine.sampler import Sampling


@dataclass(eq=False)
class Sequence:
    """One request: its tokens so far (prompt first), how many of them are cached, and the pages that hold those."""

    tokens: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 64
    stop: frozenset[int] = frozenset()
    name: Any = None
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    finished: str = ""  # "stop" or "length"

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def pending(self) -> int:
        """Tokens that are not in the cache yet: the rest of the prompt, or the one token sampled last."""
        return len(self.tokens) - self.cached


class PagePool:
    """Pages of KV memory for all layers, `pages[layer]` being [pages, 2, page_size, kv_heads, head_dim] (NHD)."""

    def __init__(self, config: ModelConfig, tokens: int, page_size: int, dtype: torch.dtype, device: torch.device):
        self.page_size, self.total = page_size, -(-tokens // page_size)
        shape = (config.layers, self.total, 2, page_size, config.kv_heads, config.head_dim)
        self.memory = torch.empty(shape, dtype=dtype, device=device)
        self.unused = list(range(self.total))

    def needed(self, tokens: int) -> int:
        """How many pages hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give the sequence pages for its first `tokens` tokens; False (and nothing given) when too few are left."""
        more = self.needed(tokens) - len(sequence.pages)
        if more > len(self.unused):
            return False
        for _ in range(more):
            sequence.pages.append(self.unused.pop())
        return True

    def release(self, sequence: Sequence) -> None:
        """Take all pages back; the sequence would have to be computed again."""
        self.unused += sequence.pages
        sequence.pages, sequence.cached = [], 0
