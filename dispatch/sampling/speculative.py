"""chain_speculative_sampling: accept or replace a chain of draft tokens."""

from typing import Any

import torch
from torch import Tensor

from kernelmux.capabilities import Request, dtype_name
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.sampling import speculative_reference as reference
from kernelmux.dispatch.sampling.draw import Seed
from kernelmux.dispatch.sampling.seeds import choose


def _describe(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    seed: int | Tensor,
    offset: int | Tensor,
    out: Tensor,
    accepted: Tensor,
    emitted: Tensor,
) -> Request:
    for name, value in (("draft_probs", draft_probs), ("target_probs", target_probs)):
        if not value.dtype.is_floating_point or value.dtype.itemsize < 2:
            raise TypeError(f"{name} is {dtype_name(value.dtype)}, it must be float16, bfloat16, float32 or float64; "
                            "convert it")  # fmt: skip
    if draft_token_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"draft_token_ids is {dtype_name(draft_token_ids.dtype)}, int32 or int64; convert it")
    tensors = {
        "draft_token_ids": draft_token_ids,
        "target_probs": target_probs,
        "accepted": accepted,
        "emitted": emitted,
    }
    for name, value in tensors.items():
        if value.device != draft_probs.device:
            raise ValueError(f"{name} is on {value.device}, draft_probs on {draft_probs.device}; move it")
    features = {"tensor_seed"} if isinstance(seed, Tensor) else set()
    if not (draft_probs.is_contiguous() and draft_token_ids.is_contiguous() and target_probs.is_contiguous()):
        features.add("strided")
    return Request(
        op="chain_speculative_sampling",
        family="sampling",
        device=draft_probs.device,
        dtypes={"draft": draft_probs.dtype, "target": target_probs.dtype, "ids": draft_token_ids.dtype},
        dims={"batch": draft_probs.shape[0], "drafts": draft_probs.shape[1], "vocab": draft_probs.shape[2]},
        features=frozenset(features),
        empty=draft_probs.shape[0] == 0,
    )


CHAIN_SPECULATIVE_SAMPLING = Op(
    "chain_speculative_sampling",
    "sampling",
    reference.chain_speculative_sampling,
    _describe,
    growing=("batch",),
    dims=("drafts", "vocab"),
    roles=("draft", "target", "ids"),
    features=("tensor_seed", "strided"),
    schema="(Tensor draft_probs, Tensor draft_token_ids, Tensor target_probs, SymInt? seed, SymInt? offset, "
    "Tensor? seeds, Tensor? offsets, Tensor(a!) out, Tensor(b!) accepted, Tensor(c!) emitted) -> ()",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None,
    maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: Seed = None,
    offset: Seed = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Verify draft tokens so that what is emitted is distributed as the target model's own samples.

    Draft token i is accepted while u_i * draft_probs[i, token] < target_probs[i, token]. At the first rejection a token
    is drawn from max(target - draft, 0), renormalised; after n acceptances one more is drawn from target_probs[n].

    Args:
        draft_probs: [batch, n, vocab], what the draft tokens were drawn from; floating, any strides.
        draft_token_ids: [batch, n], int32 or int64. An id outside [0, vocab) is no proposal: it is rejected, and the
            token is drawn from the target.
        target_probs: [batch, n + 1, vocab].
        maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num: counters [batch] to add to; int32 ones
            are updated in place, of others an int32 copy is updated and returned. None: start from 0.
        deterministic: accepted for compatibility; equal seeds give equal ids either way.
        generator, seed, offset: as in `sampling_from_probs`; per batch row.

    Returns:
        (ids, accepted, emitted), int32. ids [batch, n + 1]: the accepted draft tokens, the drawn token, then -1.
        accepted adds the number of draft tokens that pass their test, each for itself (to estimate the acceptance
        rate); emitted adds the number of draft tokens that are in ids.

    Raises:
        ValueError, TypeError: for shapes, dtypes, devices or seeds that do not fit.

    Source: C. Chen et al., "Accelerating large language model decoding with speculative sampling", 2023; FlashInfer's
    function of this name.

    >>> import torch
    >>> draft, target = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    >>> chain_speculative_sampling(draft, torch.tensor([[0]]), target, seed=1, offset=0)[0].tolist()
    [[1, -1]]
    """
    batch, n = _check_shapes(draft_probs, draft_token_ids, target_probs)
    accepted = _counter("maybe_output_accepted_token_num", maybe_output_accepted_token_num, draft_probs)
    emitted = _counter("maybe_output_emitted_draft_token_num", maybe_output_emitted_draft_token_num, draft_probs)
    out = torch.empty(batch, n + 1, dtype=torch.int32, device=draft_probs.device)
    if torch.compiler.is_compiling():
        if generator is not None:
            raise ValueError("a generator cannot enter a compiled graph; give seed and offset as tensors")
        of_seed = (None, seed) if isinstance(seed, Tensor) else (seed, None)
        of_offset = (None, offset) if isinstance(offset, Tensor) else (offset, None)
        torch.ops.kernelmux.chain_speculative_sampling(
            draft_probs, draft_token_ids, target_probs, of_seed[0], of_offset[0], of_seed[1], of_offset[1],
            out, accepted, emitted,
        )  # fmt: skip
    else:
        _eager(draft_probs, draft_token_ids, target_probs, generator, seed, offset, out, accepted, emitted)
    return out, accepted, emitted


def _eager(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    generator: torch.Generator | None,
    seed: Seed,
    offset: Seed,
    out: Tensor,
    accepted: Tensor,
    emitted: Tensor,
) -> None:
    op, batch, n = CHAIN_SPECULATIVE_SAMPLING, out.shape[0], out.shape[1] - 1
    seed, offset = choose(seed, offset, generator, batch, batch * (n + 1), draft_probs.device)
    args = (draft_probs, draft_token_ids, target_probs, seed, offset, out, accepted, emitted)
    key = (tuple([(t.dtype, t.device, t.stride()) for t in (draft_probs, draft_token_ids, target_probs)]),
           draft_probs.shape[1:], accepted.device, emitted.device, op.bucket(batch), isinstance(seed, int),
           PREFER.get())  # fmt: skip
    run = op.cache.get(key) or op.pick(key, args)
    run(*args)


def _compiled(draft: Tensor, ids: Tensor, target: Tensor, seed: Any, offset: Any, seeds: Any, offsets: Any,
              out: Tensor, accepted: Tensor, emitted: Tensor) -> None:  # fmt: skip
    seed, offset = (seed if seeds is None else seeds), (offset if offsets is None else offsets)
    _eager(draft, ids, target, None, seed, offset, out, accepted, emitted)


CHAIN_SPECULATIVE_SAMPLING.eager = _compiled


def _check_shapes(draft_probs: Tensor, draft_token_ids: Tensor, target_probs: Tensor) -> tuple[int, int]:
    if draft_probs.ndim != 3 or draft_probs.shape[2] == 0:
        raise ValueError(f"draft_probs has shape {list(draft_probs.shape)}, it must be [batch, n, vocab]; reshape it")
    batch, n, vocab = draft_probs.shape
    if draft_token_ids.shape != (batch, n):
        raise ValueError(
            f"draft_token_ids has shape {list(draft_token_ids.shape)}, draft_probs asks for {[batch, n]}; reshape it"
        )
    if target_probs.shape != (batch, n + 1, vocab):
        raise ValueError(
            f"target_probs has shape {list(target_probs.shape)}, draft_probs asks for {[batch, n + 1, vocab]}; give "
            "one row more than there are draft tokens"
        )
    return batch, n


def _counter(name: str, value: Tensor | None, like: Tensor) -> Tensor:
    if value is None:
        return torch.zeros(like.shape[0], dtype=torch.int32, device=like.device)
    if value.shape != like.shape[:1]:
        raise ValueError(
            f"{name} has shape {list(value.shape)}, it must be [{like.shape[0]}]; give one counter per row"
        )
    return value.to(torch.int32)
