"""Softmax, renormalisation, masking, and the sampling functions: supports, distributions, and what is deterministic."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from compare.case import Case, Results, Side
from torch import Tensor

DRAWS, VOCAB = 100000, 97


def base(side: Side, vocab: int = VOCAB, rows: int = 1, ties: bool = False) -> Tensor:
    """Probabilities [rows, vocab]; the smallest of a small vocabulary is drawn about 100 times in DRAWS.

    With ties, the third to sixth largest are equal, so that top-k 4 and top-p 0.5 have their boundary among them.
    """
    p = side.rand(rows, vocab, seed=3).abs().add(0.1).cpu()
    if ties:
        p = torch.full((rows, vocab), 0.1 / (vocab - 6))
        p[:, [5, 60, 7, 20, 33, 90]] = torch.tensor([0.2, 0.14, 0.14, 0.14, 0.14, 0.14])
    return (p / p.sum(-1, keepdim=True)).to(side.device)


def draws(
    side: Side, name: str, filters: dict[str, Any], logits: bool = False, ties: bool = False, **kwargs: Any
) -> Results:
    """DRAWS rows with one distribution: the row index is the stream of random numbers."""
    p = base(side, ties=ties).expand(DRAWS, -1).contiguous()
    if logits:
        p = p.log() + 3
        p[:, 11] = -torch.inf
    made = getattr(side, name)(p, *filters.values(), seed=side.seed, offset=0, **kwargs)
    if not kwargs.get("return_valid"):
        return {"samples": made}
    return {"samples": made[0], "valid": made[1]}


def large(side: Side, name: str, filters: dict[str, Any]) -> Results:
    """A real vocabulary with nearly all mass on 24 tokens."""
    vocab, rows = (128256, 2000) if side.device.type == "cuda" else (8192, 500)
    p = torch.full((vocab,), 1e-4 / vocab)
    p[torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:24]] = (torch.arange(24.0) + 6) / 24
    p = (p / p.sum()).to(side.device)
    made = getattr(side, name)(p.expand(rows, -1).contiguous(), *filters.values(), seed=side.seed, offset=0)
    return {"samples": made}


def per_row(side: Side, name: str, filters: dict[str, Any]) -> Results:
    """Four distributions, one filter value each, reached through `indices`: filters follow the distribution row."""
    p = base(side, rows=4)
    indices = (torch.arange(DRAWS) % 4).to(torch.int32).to(side.device)
    values = [side.ints(v, torch.int32 if isinstance(v[0], int) else torch.float32) for v in filters.values()]
    made = getattr(side, name)(p, *values, indices=indices, seed=side.seed, offset=0)
    return {f"samples of row {row}": made[row::4] for row in range(4)}


def one_hot(side: Side, name: str, filters: dict[str, Any]) -> Results:
    """One-hot rows give their token whatever the filters; a row of zeros gives 0 and is not valid."""
    hot = side.ints([0, 96, 41, 7, 12], torch.int64)
    p = torch.nn.functional.one_hot(hot, VOCAB).float()
    p[4] = 0
    made, valid = getattr(side, name)(p, *filters.values(), return_valid=True, seed=side.seed, offset=0)
    return {"token": made, "valid": valid}


def greedy(side: Side, name: str, filters: dict[str, Any]) -> Results:
    """Filters so strict that the largest probability is all that is left."""
    return {"token": getattr(side, name)(base(side, rows=50), *filters.values(), seed=side.seed, offset=0)}


def repeat(side: Side, name: str, filters: dict[str, Any]) -> Results:
    """The same seed and offset give the same tokens, another offset or seed gives others; also through a generator."""
    p = base(side).expand(64, -1).contiguous()
    draw = partial(getattr(side, name), p, *filters.values())
    first = draw(seed=1, offset=0)
    state = torch.Generator(device=side.device).manual_seed(5)
    again = torch.Generator(device=side.device).manual_seed(5)
    one, two, same = draw(generator=state), draw(generator=state), draw(generator=again)
    answers = [
        torch.equal(first, draw(seed=1, offset=0)),
        torch.equal(first, draw(seed=2, offset=0)),
        torch.equal(first, draw(seed=1, offset=400)),
        torch.equal(one, two),
        torch.equal(one, same),
    ]
    return {"same": torch.tensor(answers)}


def softmax(side: Side, temperature: Any = None, dtype: torch.dtype = torch.float32, vocab: int = 1000) -> Results:
    x = side.rand(33, vocab, seed=1).mul(4).to(dtype)
    if temperature != 0.0:
        x[3, ::2] = -torch.inf
    x[5] = 1e4
    if temperature == "tensor":
        temperature = side.rand(33, seed=2).abs().add(0.3)
    return {"out": side.softmax(x, temperature)}


def filtered(
    side: Side, name: str, value: Any, dtype: torch.dtype = torch.float32, ties: bool = False, vocab: int = VOCAB
) -> Results:
    p = base(side, vocab, 6, ties).to(dtype)
    if name == "top_k_mask_logits":
        p = p.float().log().to(dtype)
        p[2, 5:9] = -torch.inf
    if isinstance(value, list):
        value = side.ints(value, torch.int32 if isinstance(value[0], int) else torch.float32)
    return {"out": getattr(side, name)(p, value)}


FILTERS: dict[str, dict[str, Any]] = {
    "sampling_from_probs": {},
    "top_p_sampling_from_probs": {"top_p": 0.55},
    "top_k_sampling_from_probs": {"top_k": 9},
    "min_p_sampling_from_probs": {"min_p": 0.4},
    "top_k_top_p_sampling_from_probs": {"top_k": 20, "top_p": 0.6},
}
PER_ROW: dict[str, dict[str, Any]] = {
    "sampling_from_probs": {},
    "top_p_sampling_from_probs": {"top_p": [0.2, 0.5, 0.8, 1.0]},
    "top_k_sampling_from_probs": {"top_k": [1, 5, 30, VOCAB]},
    "min_p_sampling_from_probs": {"min_p": [0.9, 0.5, 0.1, 0.0]},
    "top_k_top_p_sampling_from_probs": {"top_k": [1, 5, 30, VOCAB], "top_p": [0.9, 0.5, 0.8, 0.3]},
}
GREEDY: dict[str, dict[str, Any]] = {
    "top_p_sampling_from_probs": {"top_p": 1e-6},
    "top_k_sampling_from_probs": {"top_k": 1},
    "min_p_sampling_from_probs": {"min_p": 1.0},
    "top_k_top_p_sampling_from_probs": {"top_k": 1, "top_p": 1.0},
}


def _probs_cases(name: str, filters: dict[str, Any]) -> list[Case]:
    def case(features: str, run: Any, explained: str = "", **kwargs: Any) -> Case:
        return Case(name, features, "sampling", "exact", partial(run, name=name, filters=filters, **kwargs), explained)

    zeros = "upstream's min-p gives its last token for a row of zeros and calls it valid; here it gives 0, not valid"
    text = ", ".join(f"{k} {v}" for k, v in filters.items()) or "plain"
    found = [
        case(f"{text}: distribution", draws, return_valid=True),
        case(f"{text}: distribution, deterministic=False", draws, deterministic=False),
        replace(case(f"{text}: vocabulary of 128256", large), module="topk" if "top_k" in filters else "sampling"),
        case("one-hot rows and a row of zeros", one_hot, zeros if name.startswith("min_p") else ""),
        case("seeds, offsets, generators", repeat),
        Case(name, "indices, filters per row", "sampling", "exact", partial(per_row, name=name, filters=PER_ROW[name])),
    ]
    if name in GREEDY:
        found.append(Case(name, "greedy", "sampling", "exact", partial(greedy, name=name, filters=GREEDY[name])))
    return found


def _combined_cases() -> list[Case]:
    def case(name: str, features: str, **kwargs: Any) -> Case:
        return Case(name, features, "sampling", "exact", partial(draws, name=name, **kwargs))

    probs, logits = "top_k_top_p_sampling_from_probs", "top_k_top_p_sampling_from_logits"
    both = {"top_k": 12, "top_p": 0.12}  # after top-k the largest tokens hold more: the two orders keep different sets
    return [
        case(probs, "top_k 12, top_p 0.12, joint", filters=both, filter_apply_order="joint"),
        case(probs, "top_k 12, top_p 0.12, top_k_first", filters=both),
        case(
            probs,
            "ties at the boundary, joint",
            filters={"top_k": 4, "top_p": 0.9},
            ties=True,
            filter_apply_order="joint",
        ),
        case(probs, "ties at the boundary, top_k_first", filters={"top_k": 4, "top_p": 0.9}, ties=True),
        case(logits, "top_k 12, top_p 0.12, joint", filters=both, logits=True, filter_apply_order="joint"),
        case(logits, "top_k 12, top_p 0.12, top_k_first", filters=both, logits=True),
        case("sampling_from_logits", "a token at -inf", filters={}, logits=True),
        case("top_k_sampling_from_probs", "top_k 4, ties at the boundary", filters={"top_k": 4}, ties=True),
        case("top_p_sampling_from_probs", "top_p 0.5, ties at the boundary", filters={"top_p": 0.5}, ties=True),
        case("top_k_sampling_from_probs", "top_k past the vocabulary", filters={"top_k": 1000}),
        case("top_p_sampling_from_probs", "top_p 1", filters={"top_p": 1.0}),
        case("min_p_sampling_from_probs", "min_p 0", filters={"min_p": 0.0}),
    ]


def _value_cases() -> list[Case]:
    def case(name: str, features: str, **kwargs: Any) -> Case:
        return Case(name, features, "sampling", "elementwise", partial(filtered, name=name, **kwargs))

    half = (torch.bfloat16, torch.float16)
    found = [
        Case("softmax", features, "sampling", "elementwise", partial(softmax, **kwargs))
        for features, kwargs in (
            ("plain", {}),
            ("temperature 0.7", {"temperature": 0.7}),
            ("temperature per row", {"temperature": "tensor"}),
            ("temperature 0", {"temperature": 0.0}),
            ("bf16 logits, vocabulary 32001", {"dtype": torch.bfloat16, "vocab": 32001}),
        )
    ]
    for k in (1, 10, VOCAB, 1000):
        found += [case(name, f"top_k {k}", value=k) for name in ("top_k_renorm_probs", "top_k_mask_logits")]
    for name in ("top_k_renorm_probs", "top_k_mask_logits"):
        found += [case(name, f"top_k per row, {str(d)[6:]}", value=[1, 3, 10, 50, VOCAB, 2], dtype=d) for d in half]
        found.append(case(name, "top_k 4, ties at the boundary", value=4, ties=True))
        found.append(case(name, "top_k 50, vocabulary 32000", value=50, vocab=32000))
    return [
        *found,
        *(case("top_p_renorm_probs", f"top_p {p}", value=p) for p in (0.1, 0.9, 1.0)),
        case("top_p_renorm_probs", "top_p per row", value=[0.01, 0.3, 0.5, 0.9, 0.99, 1.0]),
        case("top_p_renorm_probs", "top_p 0.5, ties at the boundary", value=0.5, ties=True),
        case("top_p_renorm_probs", "top_p 0.9, vocabulary 32000", value=0.9, vocab=32000),
    ]


def cases() -> list[Case]:
    found = [case for name, filters in FILTERS.items() for case in _probs_cases(name, filters)]
    return [*found, *_combined_cases(), *_value_cases()]
