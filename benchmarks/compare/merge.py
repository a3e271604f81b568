"""merge_state, merge_state_in_place, merge_states: also of states without keys."""

import math
from functools import partial

import torch
from compare.case import Case, Results, Side
from compare.kv import BF16
from torch import Tensor

ROWS, HEADS, DIM = 9, 8, 128


def state(side: Side, seed: int, dtype: torch.dtype, empty: bool) -> tuple[Tensor, Tensor]:
    v = side.rand(ROWS, HEADS, DIM, seed=seed, dtype=dtype)
    s = side.rand(ROWS, HEADS, seed=seed + 50).mul(4)
    if empty:  # rows 0 and 1 of the first state, 1 and 2 of the second: one side, both, the other
        rows = slice(seed - 1, seed + 1)
        v[rows], s[rows] = 0, -math.inf
    return v, s


def merge(side: Side, dtype: torch.dtype = BF16, empty: bool = False) -> Results:
    v, s = side.merge_state(*state(side, 1, dtype, empty), *state(side, 2, dtype, empty))
    return {"v": v, "lse": s}


def in_place(side: Side, dtype: torch.dtype = BF16, empty: bool = False, mask: torch.dtype | None = None) -> Results:
    v, s = state(side, 1, dtype, empty)
    keep = None if mask is None else side.ints([1, 0, 1, 1, 0, 0, 1, 0, 1]).to(mask)
    side.merge_state_in_place(v, s, *state(side, 2, dtype, empty), mask=keep)
    return {"v": v, "lse": s}


def many(side: Side, states: int, empty: bool = False, dtype: torch.dtype = BF16) -> Results:
    v = side.rand(ROWS, states, HEADS, DIM, seed=1, dtype=dtype)
    s = side.rand(ROWS, states, HEADS, seed=2).mul(4)
    if empty:
        v[0], s[0] = 0, -math.inf
        v[1, 1:], s[1, 1:] = 0, -math.inf
    v, s = side.merge_states(v, s)
    return {"v": v, "lse": s}


def cases() -> list[Case]:
    def case(function: str, features: str, run: partial) -> Case:
        return Case(function, features, "cascade", "attention", run)

    half = torch.float16
    return [
        case("merge_state", "bf16", partial(merge)),
        case("merge_state", "fp16", partial(merge, dtype=half)),
        case("merge_state", "states without keys", partial(merge, empty=True)),
        case("merge_state_in_place", "bf16", partial(in_place)),
        case("merge_state_in_place", "states without keys", partial(in_place, empty=True)),
        case("merge_state_in_place", "mask bool", partial(in_place, mask=torch.bool)),
        case("merge_state_in_place", "mask uint8", partial(in_place, mask=torch.uint8)),
        *(case("merge_states", f"{n} states", partial(many, states=n)) for n in (1, 2, 7, 40)),
        case("merge_states", "5 states, some without keys", partial(many, states=5, empty=True)),
    ]
