"""Continuous batching: which sequences compute how many tokens in the next step, and that step's page tables."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelmux.engine.cache import PagePool, Sequence


@dataclass(frozen=True, eq=False)
class Step:
    """One forward pass over rows of tokens, decode rows first. int32 tensors on the host."""

    tokens: Tensor  # [tokens]
    qo_indptr: Tensor  # [rows + 1]: row r computes tokens qo_indptr[r] : qo_indptr[r + 1]
    kv_indptr: Tensor  # [rows + 1]: and reads pages kv_indices[kv_indptr[r] : kv_indptr[r + 1]]
    kv_indices: Tensor
    last_page_len: Tensor  # [rows]
    decode: int  # the first `decode` rows compute one token each


class Scheduler:
    """Sequences join when a slot and pages are free, compute prompt chunks beside others' decodes, and leave.

    `step_tokens` bounds the tokens of a step. When pages run out the youngest sequence gives its pages back, waits,
    and is computed again later; its tokens are the same, since they depend on its seed and their index only.
    """

    def __init__(self, pool: PagePool, max_batch: int, step_tokens: int) -> None:
        self.pool, self.max_batch, self.step_tokens = pool, max_batch, max(step_tokens, max_batch + 1)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        if not sequence.tokens:
            raise ValueError("a prompt has 0 tokens, at least 1 is needed; write some text")
        tokens, limit = len(sequence.tokens) + sequence.max_new_tokens, self.pool.total * self.pool.page_size
        if tokens > limit:
            raise ValueError(f"a prompt and its new tokens are {tokens}, the cache holds {limit}; raise cache_tokens")
        self.waiting.append(sequence)

    def next(self) -> dict[Sequence, int]:
        """The sequences of the next step, decodes first, each with how many of its pending tokens it computes."""
        chosen: dict[Sequence, int] = {}
        budget, evicted = self.step_tokens, False
        for sequence in sorted(self.running, key=lambda s: s.pending > 1):
            count = min(sequence.pending, budget)
            while sequence in self.running and not self.pool.grow(sequence, sequence.cached + count):
                youngest, evicted = self.running.pop(), True
                self.pool.release(youngest)
                self.waiting.appendleft(youngest)
                budget += chosen.pop(youngest, 0)
            if sequence in self.running and count:
                chosen[sequence] = count
                budget -= count
        while self.waiting and not evicted and budget and len(self.running) < self.max_batch:
            sequence = self.waiting[0]
            if self.pool.needed(len(sequence.tokens)) > len(self.pool.unused):
                break
            self.running.append(self.waiting.popleft())
            chosen[sequence] = min(sequence.pending, budget)
            self.pool.grow(sequence, chosen[sequence])
            budget -= chosen[sequence]
        return dict(sorted(chosen.items(), key=lambda item: item[1] > 1))

    def leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence)


def build_step(rows: Mapping[Sequence, int], page_size: int) -> Step:
    """The host tensors of a step in which each sequence computes its next `count` tokens; decode rows come first."""
    tokens: list[int] = []
    indices: list[int] = []
    qo_indptr, kv_indptr, last_page_len = [0], [0], []
    for sequence, count in rows.items():
        length = sequence.cached + count
        tokens += sequence.tokens[sequence.cached : length]
        indices += sequence.pages[: -(-length // page_size)]
        qo_indptr.append(len(tokens))
        kv_indptr.append(len(indices))
        last_page_len.append((length - 1) % page_size + 1)
    lists = (tokens, qo_indptr, kv_indptr, indices, last_page_len)
    host = [torch.tensor(values, dtype=torch.int32) for values in lists]
    return Step(host[0], host[1], host[2], host[3], host[4], decode=sum(count == 1 for count in rows.values()))
