"""A cached decision skips validation: calls with equal keys must be described by equal Requests, rows apart.

Each op is called in many ways; instead of a decision, the key and the Request of every call are kept and compared.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelmux as km
from kernelmux.capabilities import Request
from kernelmux.dispatch.state import OPS

FP8 = torch.float8_e4m3fn
ROOM = torch.zeros(1 << 18, dtype=torch.float64)
ROWS = (1, 2, 3, 7)


def matrix(*shape: int, dtype: torch.dtype = torch.bfloat16, at: int = 0, pad: int = 0, step: int = 1) -> Tensor:
    """A view of ROOM: `at` elements in, rows `pad` wider than needed, the last dim with `step`."""
    strides = [step]
    for i in range(len(shape) - 2, -1, -1):
        strides.insert(0, strides[0] * shape[i + 1] + (pad if i == len(shape) - 2 else 0))
    return ROOM.view(dtype).as_strided(shape, strides, at)


def views(rows: int, *rest: int, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> Iterator[Tensor]:
    for dtype, at, pad, step in itertools.product(dtypes, (0, 1, 8), (0, 4, 8), (1, 2)):
        yield matrix(rows, *rest, dtype=dtype, at=at, pad=pad, step=step)


def norms(rows: int) -> Iterator[Callable[[], Any]]:
    w = torch.ones(24)
    for x in [*views(rows, 24, dtypes=(torch.bfloat16, torch.float32)), *views(rows, 3, 24), *views(rows, 1, 24)]:
        for weight in (w, w.bfloat16(), torch.ones(48)[::2], torch.ones(25)[1:]):
            yield lambda x=x, weight=weight: km.rmsnorm(x, weight)
            yield lambda x=x, weight=weight: km.layernorm(x, w, weight)
            yield lambda x=x, weight=weight: km.fused_add_rmsnorm(torch.zeros(x.shape), x, weight)
        for out in (torch.zeros(x.shape), torch.zeros(x.shape, dtype=x.dtype), matrix(*x.shape, at=1, pad=4)):
            yield lambda x=x, out=out: km.rmsnorm(x, w, out=out)
            yield lambda x=x, out=out: km.fused_add_rmsnorm_quant(out.to(FP8), x, out, w, 1.0)
            yield lambda x=x, out=out: km.rmsnorm_quant(out.to(FP8), x, w, torch.ones(1))


def activations(rows: int) -> Iterator[Callable[[], Any]]:
    apart = matrix(4, rows, 16).transpose(0, 1)
    for x in [
        *views(rows, 24),
        *views(rows, 12),
        *views(rows, 3, 24),
        *views(rows, 1, 24),
        *views(rows, 2, 1, 16),
        apart,
    ]:
        yield lambda x=x: km.silu_and_mul(x)
        half = x.shape[-1] // 2
        for out in (torch.zeros(*x.shape[:-1], half), matrix(*x.shape[:-1], half, at=1, pad=8)):
            yield lambda x=x, out=out: km.silu_and_mul(x, out)


def products(rows: int) -> Iterator[Callable[[], Any]]:
    for k, n in ((24, 8), (12, 8), (1, 8), (24, 1)):
        for a in [*views(rows, k), *[t.T for t in views(k, rows) if rows > 1]]:
            for b in (matrix(n, k).T, matrix(k, n), matrix(n, k, at=1).T, matrix(n, k, pad=4).T, matrix(k, n, step=2)):
                yield lambda a=a, b=b: km.mm_bf16(a, b)
                yield lambda a=a, b=b: km.mm_bf16(
                    a, b, torch.zeros(b.shape[1]), out=torch.zeros(len(a), b.shape[1]).bfloat16()
                )
    for k, n, m in itertools.product((24, 12), (8, 4), (1, 2, 5)):
        for a in views(rows, m, k):
            for b in (
                matrix(rows, n, k).transpose(1, 2),
                matrix(rows, k, n),
                matrix(rows, n, k, pad=4).transpose(1, 2),
            ):
                yield lambda a=a, b=b: km.bmm_bf16(a, b)


def ropes(rows: int) -> Iterator[Callable[[], Any]]:
    for x, index in itertools.product([*views(rows, 3, 16), *views(rows, 1, 12)], (torch.int32, torch.int64)):
        positions = torch.zeros(rows, dtype=index)
        flat, cache = x.flatten(1), torch.zeros(4, x.shape[-1])
        for rotary, interleave in ((None, False), (8, False), (8, True)):
            yield lambda x=x, p=positions, r=rotary, i=interleave: km.apply_rope_pos_ids(x, x, p, r, i)
            yield lambda x=x, p=positions, r=rotary, i=interleave: km.apply_llama31_rope_pos_ids_inplace(x, x, p, r, i)
            yield lambda x=x, p=positions, r=rotary: km.apply_rope(x, x, torch.zeros_like(p[:1]), p[:0], r)
        for held in (cache, torch.zeros(4, 2 * x.shape[-1])[:, : x.shape[-1]], torch.zeros(4, x.shape[-1], 2)[..., 0]):
            for part in (x, flat, matrix(*flat.shape, pad=4)):
                yield lambda part=part, p=positions, c=held: km.apply_rope_with_cos_sin_cache(
                    p, part, part, c.shape[1], c
                )
        yield lambda x=x, p=positions, c=cache: km.rope_quantize_fp8(x, x[:, 0], None, None, c, p)
        yield lambda x=x, p=positions, c=cache: km.rope_quantize_fp8(x, x, x, x, c, p)
        yield lambda x=x, p=positions, c=cache: km.rope_quantize_fp8(x, x, x, x, c, p, q_nope_out=x.to(FP8))


def facts(request: Request) -> tuple[object, ...]:
    op = OPS[request.op]
    still = {name: size for name, size in request.dims.items() if name not in op.growing}
    return request.op, request.dtypes, still, request.features, request.empty, request.grad, request.device


@pytest.mark.parametrize("family", [norms, activations, products, ropes])
def test_equal_keys_are_described_alike(family: Callable[[int], Iterator[Callable[[], Any]]]) -> None:
    seen: dict[object, list[tuple[object, ...]]] = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        for op in OPS.values():

            def pick(key: Any, args: Any, backend: str = "auto", op: Any = op) -> Callable[..., None]:
                found, known = facts(op.describe(*args)), seen[op.name, key]
                if found not in known:
                    known.append(found)
                return lambda *args: None

            patch.setattr(op, "pick", pick)
            patch.setattr(op, "cache", {})
        for rows in ROWS:
            for call in family(rows):
                call()
    assert len(seen) > 30
    assert [(key, known) for key, known in seen.items() if len(known) > 1] == []
    features = {feature for known in seen.values() for feature in known[0][3]}  # type: ignore[attr-defined]
    assert "unaligned" in features and len(features) > 2


def test_keys_are_shared_between_row_counts() -> None:
    w = torch.ones(8)
    OPS["rmsnorm"].cache.clear()
    for rows in (2, 3, 5):
        km.rmsnorm(torch.zeros(rows, 8), w)
    assert len(OPS["rmsnorm"].cache) == 1


def test_every_name_in_a_request_is_declared() -> None:
    """Dims, roles and features of these families' Requests are among those that their ops declare for `explain`."""
    wrong = []
    with pytest.MonkeyPatch.context() as patch:
        for op in OPS.values():

            def pick(key: Any, args: Any, backend: str = "auto", op: Any = op) -> Callable[..., None]:
                request = op.describe(*args)
                extra = (
                    {*request.dims} - {*op.dims} | {*request.dtypes} - {*op.roles} | request.features - {*op.features}
                )
                wrong.extend([(op.name, name) for name in extra])
                return lambda *args: None

            patch.setattr(op, "pick", pick)
            patch.setattr(op, "cache", {})
        for family in (norms, activations, products, ropes):
            for call in family(2):
                call()
    assert not wrong
