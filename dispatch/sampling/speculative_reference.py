"""Speculative sampling of a chain of draft tokens, in plain torch."""

import torch
from torch import Tensor

from kernelmux.dispatch.sampling.philox import uniform
from kernelmux.dispatch.sampling.reference import draw


@torch.no_grad()
def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    seed: int | Tensor,
    offset: int | Tensor,
    out: Tensor,
    accepted: Tensor,
    emitted: Tensor,
) -> None:
    """Write the emitted tokens into out [batch, n + 1], add to accepted and emitted [batch], all int32.

    Number i decides on draft token i: accepted while u * p_draft < p_target. Number n draws the token at the first
    rejection from max(target - draft, 0), or after n acceptances from the last target. Where nothing is left of that
    difference (equal rows), or the draft token is not in [0, vocab), the target itself is drawn from.
    """
    batch, n, vocab = draft_probs.shape
    if batch == 0:
        return
    draft, target = draft_probs.double().clamp_min(0), target_probs.double().clamp_min(0)
    u = uniform(seed, offset, range(batch), batch, n + 1, draft_probs)
    tokens = draft_token_ids.long()
    known = (tokens >= 0) & (tokens < vocab)
    at = tokens.clamp(0, vocab - 1)[..., None]
    likely = u[:, :n] * draft.gather(2, at).squeeze(2) < target[:, :n].gather(2, at).squeeze(2)
    passed = likely & known
    position = passed.int().cumprod(1).sum(1)
    rows = torch.arange(batch, device=draft.device)
    wanted = target[rows, position]
    proposed = torch.cat((draft, draft.new_zeros(batch, 1, vocab)), 1)[rows, position]
    proposed = proposed.masked_fill(~torch.nn.functional.pad(known, (0, 1), value=True)[rows, position, None], 0)
    rest = (wanted - proposed).clamp_min(0)
    ids, ok = draw(torch.where((rest > 0).any(1, keepdim=True), rest, wanted), u[:, n:])
    ids = ids.where(ok & wanted.sum(1).isfinite() & proposed.sum(1).isfinite(), 0)
    place = torch.arange(n + 1, device=draft.device)
    drafted = torch.nn.functional.pad(tokens, (0, 1))
    result = torch.where(place < position[:, None], drafted, -1)
    out.copy_(torch.where(place == position[:, None], ids[:, None], result))
    accepted.add_(passed.sum(1))
    emitted.add_(position)
