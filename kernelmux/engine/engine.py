"""The engine: a model, its page pool, a scheduler and a sampler, one step at a time."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelmux.engine.cache import PagePool, Sequence
from kernelmux.engine.config import ModelConfig
from kernelmux.engine.model import Llama, Weights
from kernelmux.engine.sampler import sample
from kernelmux.engine.scheduler import Scheduler, build_step


@dataclass
class Totals:
    """Tokens and seconds. A step with prompt tokens counts as prefill, with all of its time; the others as decode."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    steps: int = 0


class Engine:
    """Generate with continuous batching: `submit` at any time, `step` until nothing is left, or just `generate`.

    Args:
        cache_tokens: how many tokens the paged KV cache holds, for all sequences together.
        max_batch: sequences that run at once.
        step_tokens: tokens computed in one step, at most; longer prompts are computed in chunks.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        page_size: int = 16,
        cache_tokens: int = 8192,
        max_batch: int = 16,
        step_tokens: int = 1024,
    ) -> None:
        sizes = {
            "page_size": page_size,
            "cache_tokens": cache_tokens,
            "max_batch": max_batch,
            "step_tokens": step_tokens,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} is {value}, at least 1; raise it")
        self.model = Llama(config, weights)
        self.pool = PagePool(config, cache_tokens, page_size, self.model.dtype, self.model.device)
        self.scheduler = Scheduler(self.pool, max_batch, step_tokens)
        self.totals = Totals()

    def submit(self, sequence: Sequence) -> None:
        """Queue a request; ValueError when it is empty or can never fit."""
        limit = self.model.config.max_positions
        if len(sequence.tokens) + sequence.max_new_tokens > limit:
            length = len(sequence.tokens) + sequence.max_new_tokens
            raise ValueError(f"a prompt and its new tokens are {length}, the model takes {limit}; shorten one of them")
        self.scheduler.add(sequence)

    def generate(self, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
        """Submit all and run; yield a sequence each time it gains a token, with `finished` set at its last one."""
        for sequence in sequences:
            self.submit(sequence)
        while self.scheduler.waiting or self.scheduler.running:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Compute one batch; return the sequences that gained a token."""
        start = time.perf_counter()
        rows = self.scheduler.next()
        prompt_tokens = sum(min(n, max(s.prompt_len - s.cached, 0)) for s, n in rows.items())
        hidden = self.model.forward(build_step(rows, self.pool.page_size), self.pool.memory)
        ready, last, end = [], [], 0
        for sequence, count in rows.items():
            end += count
            sequence.cached += count
            if not sequence.pending:  # every token is cached, so the last one's logits say what follows
                ready.append(sequence)
                last.append(end - 1)
        if ready:
            logits = self.model.logits(hidden[last])
            tokens = sample(logits, [s.sampling for s in ready], [len(s.new_tokens) for s in ready])
            for sequence, token in zip(ready, tokens, strict=True):
                self._extend(sequence, token)
        self._count(prompt_tokens, len(ready), time.perf_counter() - start)
        return ready

    def _extend(self, sequence: Sequence, token: int) -> None:
        sequence.tokens.append(token)
        if token in sequence.stop:
            sequence.finished = "stop"
        elif len(sequence.new_tokens) >= sequence.max_new_tokens:
            sequence.finished = "length"
        if sequence.finished:
            self.scheduler.leave(sequence)

    def _count(self, prompt_tokens: int, new_tokens: int, seconds: float) -> None:
        totals = self.totals
        totals.steps += 1
        if prompt_tokens:
            totals.prefill_tokens += prompt_tokens
            totals.prefill_seconds += seconds
        else:
            totals.decode_tokens += new_tokens
            totals.decode_seconds += seconds

    @torch.inference_mode()
    def forward(self, batch: list[list[int]], prefill: int | None = None) -> list[Tensor]:
        """Teacher-forced logits [len, vocab] of each token list: what the model says after each given token.

        `prefill`: compute only so many tokens of each list as a prompt, then the rest one by one, as decode does;
        None = all at once. Needs free pages for the whole batch.
        """
        sequences = [Sequence(list(tokens)) for tokens in batch]
        logits: list[list[Tensor]] = [[] for _ in batch]
        try:
            for sequence in sequences:
                if not self.pool.grow(sequence, len(sequence.tokens)):
                    free = len(self.pool.unused) * self.pool.page_size
                    raise ValueError(f"the cache has room for {free} more tokens, too few; raise cache_tokens")
            while any(s.pending for s in sequences):
                counts = {
                    s: s.pending if prefill is None else 1 if s.cached else prefill for s in sequences if s.pending
                }
                rows = dict(sorted(((s, min(n, s.pending)) for s, n in counts.items()), key=lambda item: item[1] > 1))
                hidden = self.model.forward(build_step(rows, self.pool.page_size), self.pool.memory)
                for sequence, part in zip(rows, self.model.logits(hidden).split(list(rows.values())), strict=True):
                    logits[sequences.index(sequence)].append(part)
                    sequence.cached += len(part)
        finally:
            for sequence in sequences:
                self.pool.release(sequence)
        return [torch.cat(parts) if parts else torch.empty(0) for parts in logits]
