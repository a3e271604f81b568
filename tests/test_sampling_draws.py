"""Drawing ids: the exact support, the distribution, and that a row depends on nothing else."""

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelmux
from kernelmux.dispatch.sampling import (
    min_p_sampling_from_probs,
    reference,
    sampling_from_logits,
    sampling_from_probs,
    softmax,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_logits,
    top_k_top_p_sampling_from_probs,
    top_p_sampling_from_probs,
)

naive = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("naive_sampling.py"))))
DRAWS = 4000
# Multiples of 1/16, so that sums and ties are exact: ties at the boundaries, a peak, zeros, all equal.
PROBS = torch.tensor(
    [
        [4, 2, 2, 2, 2, 1, 1, 1, 1, 0],
        [7, 3, 3, 1, 1, 1, 0, 0, 0, 0],
        [0, 0, 8, 0, 0, 8, 0, 0, 0, 0],
        [1.6] * 10,
    ]
) / 16  # fmt: skip
ROWS = torch.arange(len(PROBS), dtype=torch.int32).repeat_interleave(DRAWS)

FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": 0.5},
    "top_p_boundary": {"top_p": 0.4375},
    "top_k": {"top_k": 2},
    "min_p": {"min_p": 0.4},
    "top_k_first": {"top_k": 4, "top_p": 0.75},
    "joint": {"top_k": 4, "top_p": 0.75, "joint": True},
}


def call(probs: Tensor, filters: dict[str, Any], **rest: Any) -> Any:
    """The public function for some filters."""
    f = dict(filters)
    if "top_k" in f and "top_p" in f:
        order = "joint" if f.pop("joint", False) else "top_k_first"
        return top_k_top_p_sampling_from_probs(probs, f["top_k"], f["top_p"], filter_apply_order=order, **rest)
    if "top_k" in f:
        return top_k_sampling_from_probs(probs, f["top_k"], **rest)
    if "top_p" in f:
        return top_p_sampling_from_probs(probs, f["top_p"], **rest)
    if "min_p" in f:
        return min_p_sampling_from_probs(probs, f["min_p"], **rest)
    return sampling_from_probs(probs, **rest)


def expected(row: list[float], filters: dict[str, Any]) -> list[float]:
    f = {k: naive.single(v) if isinstance(v, float) else v for k, v in filters.items()}
    return naive.filtered(row, **f)


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
def test_distribution(filters: dict[str, Any]) -> None:
    ids = call(PROBS, filters, indices=ROWS, seed=1234, offset=8)
    assert ids.dtype == torch.int32
    assert ids.shape == (len(ROWS),)
    for row, drawn in zip(PROBS.tolist(), ids.view(len(PROBS), DRAWS), strict=True):
        naive.assert_distributed(drawn, expected(row, filters))


@pytest.mark.parametrize("filters", list(FILTERS.values())[1:], ids=list(FILTERS)[1:])
def test_per_row_parameters_belong_to_the_distribution(filters: dict[str, Any]) -> None:
    """Tensors have one value per row of probs, whatever indices picks, and equal the numbers."""
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    tensors = {}
    for name, value in filters.items():
        tensors[name] = value
        if name in neutral:
            tensors[name] = torch.tensor([value, neutral[name], value, value])
    indices = torch.tensor([3, 1, 1, 0, 2, 0] * 500)
    ids = call(PROBS, tensors, indices=indices, seed=5, offset=0)
    assert ids.dtype == torch.int64
    filtered = call(PROBS, filters, indices=indices, seed=5, offset=0)
    plain = sampling_from_probs(PROBS, indices=indices, seed=5, offset=0)
    assert torch.equal(ids, torch.where(indices == 1, plain, filtered))


@pytest.mark.parametrize("make", ["logits", "masked", "shifted"])
def test_distribution_of_logits(make: str) -> None:
    logits = PROBS.log()
    if make == "masked":
        logits = top_k_mask_logits(logits, 4)
    elif make == "shifted":
        logits = logits - 50000
    ids = sampling_from_logits(logits, indices=ROWS, seed=3, offset=4)
    for row, drawn in zip(softmax(logits).tolist(), ids.view(len(PROBS), DRAWS), strict=True):
        naive.assert_distributed(drawn, row)


def test_a_large_vocabulary_of_logits() -> None:
    """Philox blocks beyond the first, at an offset inside a block."""
    logits = torch.full((1, 3001), -math.inf)
    logits[0, [0, 1000, 2999, 3000]] = torch.tensor([1.0, 2.0, 3.0, 4.0]).log()
    ids = sampling_from_logits(logits.expand(2000, -1), seed=3, offset=5)
    naive.assert_distributed(ids, softmax(logits)[0].tolist())


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("order_free", [None, "tensors"])
def test_top_k_top_p_from_logits(joint: bool, order_free: str | None) -> None:
    filters = {"top_k": 4, "top_p": 0.75, "joint": joint}
    k: Any = 4 if order_free is None else torch.full((4,), 4, dtype=torch.int32)
    p: Any = 0.75 if order_free is None else torch.full((4,), 0.75)
    order = "joint" if joint else "top_k_first"
    ids = top_k_top_p_sampling_from_logits(PROBS.log() + 7, k, p, ROWS, order, seed=9, offset=0)
    for row, drawn in zip(softmax(PROBS.log()).tolist(), ids.view(len(PROBS), DRAWS), strict=True):
        kept = {i for i, x in enumerate(expected(row, filters)) if x}
        assert set(drawn.tolist()) <= kept
    for row, drawn in zip(PROBS.tolist(), ids.view(len(PROBS), DRAWS), strict=True):
        if row != PROBS[0].tolist():  # its ties at 1/8 may come apart in the softmax
            naive.assert_distributed(drawn, expected(row, filters))


@pytest.mark.parametrize("order", ["top_k_first", "joint"])
def test_random_supports_equal_plain_python(order: str) -> None:
    """Every row, many parameters: the threshold that the reference finds keeps the naive set."""
    probs = torch.softmax(2 * torch.randn(12, 29, generator=torch.Generator().manual_seed(2)), -1)
    probs = torch.cat((probs, (probs * 64).round() / 64))  # and rows full of ties
    for top_k in (0, 1, 3, 10, 28, 29):
        for top_p in (0.0, 0.1, 0.5, 0.9, 0.999, 1.0):
            for min_p in (0.0, 0.1, 1.0):
                got = probs.double() >= reference.threshold(probs, top_k, top_p, min_p, order == "joint")
                for i, row in enumerate(probs.tolist()):
                    f = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "joint": order == "joint"}
                    want = [x > 0 for x in expected(row, f)]
                    assert (got[i] & (probs[i] > 0)).tolist() == want, (i, f)


@pytest.mark.parametrize("top_k", [0, 1, 5, 50, -1])
@pytest.mark.parametrize("top_p", [0, 1e-6, 1, 1.5])
def test_sentinels(top_k: int, top_p: float) -> None:
    """top_k 0 or less and vocab or more are off, top_p 1 or more is off and 0 is greedy: in every form alike."""
    probs = torch.tensor([0.1, 0.15, 0.3, 0.25, 0.2]).expand(3000, -1)
    want = [0.0, 0, 1, 0, 0] if top_k == 1 or top_p < 1 else probs[0].tolist()
    k, p = torch.full((3000,), top_k, dtype=torch.int32), torch.full((3000,), float(top_p))
    for order in ("top_k_first", "joint"):
        ids = top_k_top_p_sampling_from_probs(probs, top_k, top_p, filter_apply_order=order, seed=1, offset=0)
        naive.assert_distributed(ids, want)
        for a, b in ((k, top_p), (top_k, p), (k, p)):
            again = top_k_top_p_sampling_from_probs(probs, a, b, filter_apply_order=order, seed=1, offset=0)
            assert torch.equal(ids, again)
        logits = top_k_top_p_sampling_from_logits(probs.log(), top_k, top_p, filter_apply_order=order, seed=1, offset=0)
        assert torch.equal(ids, logits)
    ids = top_k_sampling_from_probs(probs, top_k, seed=1, offset=0)
    naive.assert_distributed(ids, [0.0, 0, 1, 0, 0] if top_k == 1 else probs[0].tolist())
    ids = top_p_sampling_from_probs(probs, top_p, seed=1, offset=0)
    naive.assert_distributed(ids, [0.0, 0, 1, 0, 0] if top_p < 1 else probs[0].tolist())


def test_none_is_off() -> None:
    ids = sampling_from_probs(PROBS, seed=1, offset=0)
    assert torch.equal(ids, top_k_top_p_sampling_from_probs(PROBS, None, None, seed=1, offset=0))  # type: ignore[arg-type]


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
def test_rows_without_a_distribution(filters: dict[str, Any]) -> None:
    probs = torch.full((6, 32000), 1 / 32000)
    probs[1] = math.nan
    probs[2] = 0
    probs[3, 31999] = math.nan
    probs[4, 5] = math.inf
    ids, valid = call(probs, filters, seed=1, offset=0, return_valid=True)
    assert valid.tolist() == [True, False, False, False, False, True]
    assert ids[1:5].tolist() == [0, 0, 0, 0]
    assert ((ids >= 0) & (ids < 32000)).all()
    assert torch.equal(ids, call(probs, filters, seed=1, offset=0))


def test_logits_without_a_distribution() -> None:
    logits = torch.zeros(4, 100)
    logits[1] = -math.inf
    logits[2, 50] = math.nan
    logits[3] = -math.inf
    logits[3, 99] = -1e30
    ids = sampling_from_logits(logits, seed=1, offset=0)
    assert ids[1:].tolist() == [0, 0, 99]
    assert top_k_top_p_sampling_from_logits(logits, 5, 0.9, seed=1, offset=0)[1:].tolist() == [0, 0, 99]


def test_one_hot_rows_stay_in_range() -> None:
    probs = torch.zeros(2, 32000)
    probs[0, 1] = 1
    probs[1, 31999] = 1
    indices = torch.arange(2).repeat(500)
    for filters in ({"top_k": 2**30, "top_p": 1.0}, {"top_k": 2**30, "top_p": 1.0, "joint": True}, {"min_p": 1.0}):
        ids = call(probs, filters, indices=indices, seed=3, offset=0)
        assert torch.equal(ids, torch.where(indices == 0, 1, 31999))


@pytest.mark.parametrize("u", [2.0**-33, 0.5, 1 - 2.0**-33])
def test_the_ends_of_the_running_sum(u: float) -> None:
    """At either end of u, and however badly the weights round, only weighted ids come out."""
    weight = torch.zeros(3, 5000)
    weight[0, 100:4900] = 1e-7
    weight[1, [7, 4000]] = torch.tensor([1.0, 1e-30])
    weight[2, [7, 4000]] = torch.tensor([1e-38, 1e-45])
    ids, ok = reference.draw(weight, torch.full((3, 1), u, dtype=torch.float64))
    assert ok.all()
    assert (weight.gather(1, ids[:, None]) > 0).all()


def test_strided_rows_and_dtypes() -> None:
    wide = torch.full((8, 20), math.nan)
    wide[::2, ::2] = PROBS
    for filters in FILTERS.values():
        ids = call(PROBS, filters, indices=ROWS[::50], seed=7, offset=0)
        assert torch.equal(ids, call(wide[::2, ::2], filters, indices=ROWS[::50], seed=7, offset=0))
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            if dtype == torch.float64:
                assert torch.equal(ids, call(PROBS.double(), filters, indices=ROWS[::50], seed=7, offset=0))
            low = call(PROBS.to(dtype), filters, indices=ROWS[::50].long(), seed=7, offset=0)
            assert ((low >= 0) & (low < 10)).all()
    logits = sampling_from_logits(wide[::2, ::2].log(), indices=ROWS[::50], seed=7, offset=0)
    assert torch.equal(logits, sampling_from_logits(PROBS.log(), indices=ROWS[::50], seed=7, offset=0))


def big_probs(rows: int) -> Tensor:
    return torch.softmax(torch.randn(rows, 501, generator=torch.Generator().manual_seed(4)), -1)


SAMPLERS: dict[str, Callable[..., Any]] = {
    "probs": lambda p, **kw: sampling_from_probs(p, **kw),
    "top_p": lambda p, **kw: top_p_sampling_from_probs(p, 0.9, **kw),
    "top_k": lambda p, **kw: top_k_sampling_from_probs(p, 50, **kw),
    "min_p": lambda p, **kw: min_p_sampling_from_probs(p, 0.05, **kw),
    "joint": lambda p, **kw: top_k_top_p_sampling_from_probs(p, 50, 0.9, filter_apply_order="joint", **kw),
    "logits": lambda p, **kw: sampling_from_logits(p.log(), **kw),
    "filtered_logits": lambda p, **kw: top_k_top_p_sampling_from_logits(p.log(), 50, 0.9, **kw),
}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
def test_a_row_depends_on_itself_only(sampler: Callable[..., Any]) -> None:
    """With one seed for all, row i is the same in any batch at place i; with its own seed, at any place."""
    probs = big_probs(24)
    whole = sampler(probs, seed=77, offset=12)
    assert torch.equal(whole[:5], sampler(probs[:5], seed=77, offset=12))
    changed = probs.clone()
    changed[1::2] = changed[1::2].flip(1)
    assert torch.equal(whole[::2], sampler(changed, seed=77, offset=12)[::2])

    seeds, offsets = torch.arange(100, 124), 4 * torch.arange(24)
    own = sampler(probs, seed=seeds, offset=offsets)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    assert torch.equal(own[order], sampler(probs[order], seed=seeds[order], offset=offsets[order]))
    for i in (0, 7, 23):
        alone = sampler(probs[i : i + 1], seed=seeds[i : i + 1], offset=offsets[i : i + 1])
        assert torch.equal(own[i : i + 1], alone)
        assert torch.equal(alone, sampler(probs[i : i + 1], seed=int(seeds[i]), offset=int(offsets[i])))


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
def test_seed_and_offset_matter(sampler: Callable[..., Any]) -> None:
    probs = big_probs(64)
    first = sampler(probs, seed=1, offset=0)
    assert torch.equal(first, sampler(probs, seed=1, offset=0))
    assert torch.equal(first, sampler(probs, seed=torch.tensor([1]), offset=torch.tensor([0], dtype=torch.int64)))
    for seed, offset in ((2, 0), (1, 4), (1, 1), (1 + 2**32, 0), (1, 2**40)):
        assert (first != sampler(probs, seed=seed, offset=offset)).float().mean() > 0.5


def test_rows_are_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    probs = big_probs(24)
    for sampler in SAMPLERS.values():
        whole = sampler(probs, seed=1, offset=0)
        with monkeypatch.context() as patch:
            patch.setattr(reference, "_CHUNK", 1500)
            assert torch.equal(whole, sampler(probs, seed=1, offset=0))


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
def test_empty_batches(sampler: Callable[..., Any]) -> None:
    assert sampler(big_probs(0)).shape == (0,)
    ids = sampler(big_probs(3), indices=torch.empty(0, dtype=torch.int64), seed=1, offset=0)
    assert ids.shape == (0,)
    assert ids.dtype == torch.int64


def test_check_nan() -> None:
    probs = big_probs(3)
    probs[1, 2] = math.nan
    for name, sampler in SAMPLERS.items():
        with pytest.raises(ValueError, match=r"Input (probs|logits) contains NaN\."):
            sampler(probs, check_nan=True)
        assert sampler(probs, seed=1, offset=0)[1] == 0, name
        sampler(big_probs(2), check_nan=True)


def test_indices_of_other_dtypes() -> None:
    for dtype in (torch.int16, torch.uint8, torch.int8):
        ids = sampling_from_probs(PROBS, indices=torch.tensor([2, 0], dtype=dtype), seed=1, offset=0)
        assert ids.dtype == dtype
    with pytest.raises(ValueError, match=r"indices is uint8, the ids 0\.\.500 are returned in its dtype"):
        sampling_from_probs(big_probs(2), indices=torch.tensor([0], dtype=torch.uint8))


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="filter_apply_order is 'both', one of 'top_k_first', 'joint'"):
        top_k_top_p_sampling_from_probs(PROBS, 1, 0.5, filter_apply_order="both")
    with pytest.raises(ValueError, match="filter_apply_order is 'both'"):
        top_k_top_p_sampling_from_logits(PROBS, 1, 0.5, filter_apply_order="both")
    with pytest.raises(ValueError, match=r"indices has shape \[1, 1\], it must be \[batch\]"):
        sampling_from_probs(PROBS, indices=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(TypeError, match="indices is float32, it must be an integer dtype"):
        sampling_from_probs(PROBS, indices=torch.zeros(1))
    with pytest.raises(ValueError, match="indices is on meta"):
        sampling_from_probs(PROBS, indices=torch.zeros(1, dtype=torch.int32, device="meta"))
    with pytest.raises(ValueError, match=r"top_k has shape \[2\], it must be \[4\]"):
        top_k_sampling_from_probs(PROBS, torch.tensor([1, 2]), indices=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"probs has shape \[10\]"):
        sampling_from_probs(PROBS[0])
    with pytest.raises(TypeError, match="min_p is 'a', it must be a number"):
        min_p_sampling_from_probs(PROBS, "a")  # type: ignore[arg-type]


def test_indices_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELMUX_CHECK", "1")
    kernelmux.reload()
    with pytest.raises(ValueError, match=r"indices reach from 0 to 9, the rows are 0\.\.3"):
        sampling_from_probs(PROBS, indices=torch.tensor([0, 9]))
    assert sampling_from_probs(PROBS, indices=torch.tensor([0, 3])).shape == (2,)


def test_compiled_calls_equal_eager_ones() -> None:
    def both(probs: Tensor, k: Tensor, seed: Tensor, offset: Tensor) -> list[Tensor]:
        ids, valid = top_k_top_p_sampling_from_probs(probs, k, 0.9, seed=seed, offset=offset, return_valid=True)
        renormed = top_k_renorm_probs(probs, k)
        return [ids, valid, renormed, sampling_from_logits(probs.log(), seed=1, offset=4), sampling_from_probs(probs)]

    args = (big_probs(6), torch.tensor([3, 1, 0, 50, 2, 7], dtype=torch.int32), torch.tensor([5]), torch.tensor([8]))
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    eager = both(*args)
    torch.manual_seed(3)
    for a, b in zip(eager, compiled(*args), strict=True):
        assert torch.equal(a, b)
    assert torch.Tag.nondeterministic_seeded in torch.ops.kernelmux.sampling_from_probs.default.tags


def test_a_generator_outside_compiled_graphs() -> None:
    probs = big_probs(4)
    compiled = torch.compile(lambda p, g: sampling_from_probs(p, generator=g), backend="aot_eager")
    got = compiled(probs, torch.Generator().manual_seed(1))
    assert torch.equal(got, sampling_from_probs(probs, generator=torch.Generator().manual_seed(1)))


def test_compiled_calls_take_any_batch() -> None:
    def draw(probs: Tensor, seed: Tensor) -> Tensor:
        cut = top_k_mask_logits(softmax(probs, 0.7), 5)
        return top_k_top_p_sampling_from_probs(cut.clamp_min(0), 7, 0.9, seed=seed, offset=0 * seed)

    compiled = torch.compile(draw, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (2, 5, 9):
        probs = big_probs(rows)
        assert torch.equal(compiled(probs, torch.tensor([1])), draw(probs, torch.tensor([1])))


@pytest.mark.gpu
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
def test_cuda_draws_what_the_cpu_draws(sampler: Callable[..., Any]) -> None:
    """One seed, one set of numbers: only sums that round differently may part the ids, once in thousands."""
    probs = big_probs(2000)
    cpu = sampler(probs, seed=5, offset=8)
    assert (sampler(probs.cuda(), seed=5, offset=8).cpu() == cpu).float().mean() > 0.995
    seeds = torch.arange(2000)
    own = sampler(probs, seed=seeds, offset=seeds * 4)
    there = sampler(probs.cuda(), seed=seeds.cuda(), offset=seeds.cuda() * 4)
    assert (there.cpu() == own).float().mean() > 0.995


@pytest.mark.gpu
def test_captured_draws_read_their_seed_at_replay() -> None:
    probs = big_probs(64).cuda()
    seed, offset = torch.tensor([5], device="cuda"), torch.tensor([0], device="cuda")
    expected = [top_p_sampling_from_probs(probs, 0.9, seed=seed, offset=offset + 4 * i) for i in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = top_p_sampling_from_probs(probs, 0.9, seed=seed, offset=offset)
    for want in expected:
        graph.replay()
        assert torch.equal(ids, want)
        offset += 4


@pytest.mark.gpu
def test_a_captured_draw_without_seed_is_refused() -> None:
    probs = big_probs(4).cuda()
    sampling_from_probs(probs)
    with (
        pytest.raises(RuntimeError, match="a CUDA graph is being captured, no seed can be read; give seed and offset"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        sampling_from_probs(probs)
