"""chain_speculative_sampling: cases without chance, and the distribution of the emitted tokens."""

from functools import partial

import torch
from compare.case import Case, Results, Side
from torch import Tensor

VOCAB, DRAFTS = 41, 4


def probs(side: Side, rows: int, n: int, seed: int) -> Tensor:
    p = side.rand(rows, n, VOCAB, seed=seed).abs().add(0.05)
    return p / p.sum(-1, keepdim=True)


def call(side: Side, draft: Tensor, ids: Tensor, target: Tensor, counters: bool = False) -> Results:
    given = {}
    if counters:
        rows = draft.shape[0]
        given = {
            "maybe_output_accepted_token_num": side.ints(list(range(rows))),
            "maybe_output_emitted_draft_token_num": side.ints([5] * rows),
        }
    tokens, accepted, emitted = side.chain_speculative_sampling(draft, ids, target, **given, seed=side.seed, offset=0)
    found = {"tokens": tokens, "accepted": accepted, "emitted": emitted}
    if counters:
        found["accepted counter"] = given["maybe_output_accepted_token_num"]
        found["emitted counter"] = given["maybe_output_emitted_draft_token_num"]
    return found


def hot(side: Side, ids: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(ids.long(), VOCAB).float().to(side.device)


def certain(side: Side, counters: bool = False) -> Results:
    """One-hot draft and target: row 0 agrees everywhere, row r > 0 disagrees at draft r - 1 (and agrees after it)."""
    rows = DRAFTS + 1
    ids = torch.arange(rows)[:, None] * 3 + torch.arange(DRAFTS)
    wanted = torch.cat((ids, ids[:, -1:] + 20), 1)
    for row in range(1, rows):
        wanted[row, row - 1] = 40
    return call(side, hot(side, ids), ids.to(torch.int32).to(side.device), hot(side, wanted), counters)


def identical(side: Side) -> Results:
    """Equal draft and target: every draft token is accepted; the bonus token follows target[n]."""
    rows = 20000
    draft = probs(side, 1, DRAFTS, 1).expand(rows, -1, -1).contiguous()
    target = torch.cat((draft, probs(side, 1, 1, 2).expand(rows, -1, -1)), 1).contiguous()
    ids = torch.multinomial(draft[0].cpu(), 1, generator=torch.Generator().manual_seed(1)).T.expand(rows, -1)
    found = call(side, draft, ids.to(torch.int32).contiguous().to(side.device), target)
    tokens = found.pop("tokens")
    return {**found, "drafts": tokens[:, :-1], "samples of the bonus": tokens[:, -1]}


def chance(side: Side) -> Results:
    """Different draft and target: each position's tokens (with -1 past the end), and both counts."""
    rows = 100000
    draft = probs(side, 1, DRAFTS, 1).expand(rows, -1, -1).contiguous()
    target = probs(side, 1, DRAFTS + 1, 2).expand(rows, -1, -1).contiguous()
    ids = side.ints([[3, 17, 29, 5]]).expand(rows, -1).contiguous()
    found = call(side, draft, ids, target)
    columns = {f"samples at {i}": found["tokens"][:, i] for i in range(DRAFTS + 1)}
    return {**columns, "samples of accepted": found["accepted"], "samples of emitted": found["emitted"]}


def cases() -> list[Case]:
    name = "chain_speculative_sampling"
    return [
        Case(name, "one-hot draft and target", "sampling", "exact", certain),
        Case(name, "one-hot draft and target, counters given", "sampling", "exact", partial(certain, counters=True)),
        Case(name, "identical draft and target", "sampling", "exact", identical),
        Case(
            name,
            "different draft and target: distributions",
            "sampling",
            "exact",
            chance,
            explained="accepted counts each draft token once; FlashInfer draws again for the one that was rejected",
        ),
    ]
