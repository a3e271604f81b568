"""Gated activations."""

from functools import partial

import torch
from compare.case import Case, Results, Side
from compare.kv import BF16


def gated(side: Side, name: str, shape: tuple[int, ...], dtype: torch.dtype = BF16, out: bool = False) -> Results:
    x = side.rand(*shape, seed=1).mul(3).to(dtype)
    given = torch.empty(*shape[:-1], shape[-1] // 2, dtype=dtype, device=side.device) if out else None
    made = getattr(side, name)(x, out=given)
    return {"out": made if given is None else given}


def cases() -> list[Case]:
    found = []
    for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"):
        for features, kwargs in (
            ("bf16 [17, 2816]", {"shape": (17, 2816)}),
            ("fp16 [3, 5, 512], out given", {"shape": (3, 5, 512), "dtype": torch.float16, "out": True}),
            ("bf16 [9, 6840]: half a row is not a multiple of 16 bytes", {"shape": (9, 6840)}),
        ):
            found.append(Case(name, features, name, "elementwise", partial(gated, name=name, **kwargs)))
    return found
