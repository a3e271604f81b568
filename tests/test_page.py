"""Appending to paged caches against plain loops over tokens."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import kernelmux
from kernelmux.capabilities import NoKernelError
from kernelmux.dispatch.page import append, reference
from kernelmux.dispatch.page.append import append_paged_kv_cache
from kernelmux.dispatch.page.append_mla import append_paged_mla_kv_cache
from kernelmux.dispatch.page.cache import paged_views
from kernelmux.dispatch.page.check import check_page_metadata
from kernelmux.dispatch.page.positions import get_batch_indices_positions, get_seq_lens

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]


def ints(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


class Pages:
    """Sequences of `lens` tokens, the last `new` of each about to be appended, on pages in random order."""

    def __init__(self, page: int, new: Sequence[int] = (3, 0, 1, 5), lens: Sequence[int] = (3, 7, 9, 5)) -> None:
        counts = [-(-n // page) for n in lens]
        self.page, self.pages = page, sum(counts) + 2
        order = torch.randperm(self.pages, generator=torch.Generator().manual_seed(page))[: sum(counts)]
        self.indices = torch.cat((order, ints([-1]))).int()
        self.indptr = ints([0, *itertools.accumulate(counts)])
        self.last = ints([n - (c - 1) * page for n, c in zip(lens, counts, strict=True)])
        self.tokens = [(b, lens[b] - n + t) for b, n in enumerate(new) for t in range(n)]
        self.batch, self.positions = (ints(list(x)) for x in zip(*self.tokens, strict=True))
        self.table = (self.indices, self.indptr, self.last)

    def place(self, b: int, position: int) -> tuple[int, int]:
        return int(self.indices[int(self.indptr[b]) + position // self.page]), position % self.page


def values(tokens: int, *entry: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(tokens, *entry, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["pair", "one"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_append(page: int, layout: str, form: str, dtype: torch.dtype) -> None:
    """Every token lands in its place, in any order, and nothing else changes."""
    p, heads, dim = Pages(page), 2, 5
    shape = (p.pages, page, heads, dim) if layout == "NHD" else (p.pages, heads, page, dim)
    cache = values(p.pages * 2, *shape[1:], dtype=dtype, seed=9)
    cache = cache.unflatten(0, (p.pages, 2)) if form == "one" else tuple(cache.chunk(2))
    want = [c.clone() for c in paged_views(cache, layout)]
    k, v = (
        values(len(p.tokens), heads, dim, dtype=dtype, seed=1),
        values(len(p.tokens), heads, dim, dtype=dtype, seed=2),
    )
    for t, token in enumerate(p.tokens):
        want[0][p.place(*token)], want[1][p.place(*token)] = k[t], v[t]
    order = torch.randperm(len(p.tokens), generator=torch.Generator().manual_seed(3))
    append_paged_kv_cache(k[order], v[order], p.batch[order], p.positions[order], cache, *p.table, layout)
    assert all(same(got, w) for got, w in zip(paged_views(cache, layout), want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_append_on_a_gpu(dtype: torch.dtype) -> None:
    """The same bytes as on the CPU, without a host sync, padding dropped."""
    p, heads, dim = Pages(3), 2, 5
    k = values(12, heads, dim, dtype=dtype)
    want, batch = torch.zeros(p.pages, 2, 3, heads, dim).to(dtype), torch.cat((p.batch, ints([-1] * 3)))
    positions, got = torch.cat((p.positions, ints([10**6] * 3))), want.cuda()
    append_paged_kv_cache(k, k, batch, positions, want, *p.table)
    there = [t.cuda() for t in (k, k, batch, positions)]
    table = [t.cuda() for t in p.table]
    torch.cuda.set_sync_debug_mode("error")
    try:
        reference.append_paged_kv_cache(*there, *paged_views(got, "NHD"), *table[:2])
        got_positions = get_batch_indices_positions(table[1], table[2], 12)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(got.cpu(), want)
    for a, b in zip(got_positions, get_batch_indices_positions(p.indptr, p.last, 12), strict=True):
        assert torch.equal(a.cpu(), b)


def test_page_size_one_without_its_dim() -> None:
    p, k, v = Pages(1), values(9, 2, 4, seed=1), values(9, 2, 4, seed=2)
    want = torch.zeros(p.pages, 2, 1, 2, 4)
    append_paged_kv_cache(k, v, p.batch, p.positions, want, *p.table)
    for layout in ("NHD", "HND"):
        one, pair = torch.zeros(p.pages, 2, 2, 4), (torch.zeros(p.pages, 2, 4), torch.zeros(p.pages, 2, 4))
        append_paged_kv_cache(k, v, p.batch, p.positions, one, *p.table, layout)
        append_paged_kv_cache(k, v, p.batch, p.positions, pair, *p.table, layout)
        assert torch.equal(one, want[:, :, 0]) and torch.equal(torch.stack(pair, 1), one)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("padded", [[2, 5], [0, 8], list(range(9))])
def test_padding_is_dropped(dtype: torch.dtype, padded: list[int]) -> None:
    """Tokens of batch index -1 touch nothing, whatever their position and values; also when all of them are such."""
    p = Pages(3)
    k, v = values(9, 2, 4, seed=1), values(9, 2, 4, seed=2)
    batch, positions, cache = p.batch.to(dtype), p.positions.to(dtype), torch.full((p.pages, 2, 3, 2, 4), 7.0)
    batch[padded], positions[padded], k[padded] = -1, 10**6, float("nan")
    want = cache.clone()
    for t in set(range(9)) - set(padded):
        page, entry = p.place(*p.tokens[t])
        want[page, 0, entry], want[page, 1, entry] = k[t], v[t]
    append_paged_kv_cache(k, v, batch, positions, cache, p.indices.to(dtype), p.indptr.to(dtype), p.last.to(dtype))
    assert torch.equal(cache, want)


def test_strides() -> None:
    """k and v sliced out of a fused projection, caches that are views with gaps and different strides."""
    p, fused = Pages(3), values(9 * 2, 8, 8)
    k, v = fused[::2, 1:3, ::2], fused[::2, 4:6].transpose(1, 2)[:, ::4].transpose(1, 2)
    assert k.shape == (9, 2, 4) and v.shape == (9, 2, 2)
    k_cache = torch.zeros(p.pages, 2, 5, 6)[:, :, 1:4, :4].transpose(1, 2)
    v_cache = torch.zeros(p.pages, 3, 2, 4)[..., ::2]
    want = (torch.zeros(k_cache.shape), torch.zeros(v_cache.shape))
    append_paged_kv_cache(k, v, p.batch, p.positions, (k_cache, v_cache), *p.table)
    append_paged_kv_cache(k.contiguous(), v.contiguous(), p.batch, p.positions, want, *p.table)
    assert torch.equal(k_cache, want[0]) and torch.equal(v_cache, want[1]) and want[1].any()


def test_nothing_to_append() -> None:
    cache, none = torch.zeros(2, 2, 3, 1, 4), ints([])
    append_paged_kv_cache(values(0, 1, 4), values(0, 1, 4), none, none, cache, none, ints([0]), none)
    append_paged_mla_kv_cache(values(0, 4), values(0, 1), none, none, cache[:, 0, :, 0], None, none, ints([0]), none)
    assert not cache.any()
    append_paged_kv_cache(  # no sequence has pages, and all tokens are padding
        values(2, 1, 4), values(2, 1, 4), ints([-1, -1]), ints([0, 0]), cache, none, ints([0]), none)  # fmt: skip
    assert not cache.any()


def test_offsets_past_two_to_the_31() -> None:
    """A page whose first byte lies beyond 2^31; the memory is reserved, not used."""
    cache = torch.empty(131_100, 16, 8, 128, dtype=torch.float8_e4m3fn)
    assert cache[131_099].storage_offset() > 2**31
    k = values(1, 8, 128, dtype=cache.dtype)
    append_paged_kv_cache(k, k, ints([0]), ints([5]), (cache, cache), ints([131_099]), ints([0, 1]), ints([6]))
    assert same(cache[131_099, 5], k[0])


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("parts", ["both", "ckv", "kpe"])
def test_append_mla(page: int, parts: str) -> None:
    """Two views of one buffer; a part without a cache is left out."""
    p, buffer = Pages(page), torch.zeros(Pages(page).pages, page, 12)
    want = buffer.clone()
    ckv, kpe = values(9, 8, seed=1), values(9, 4, seed=2)
    for t, token in enumerate(p.tokens):
        want[p.place(*token)] = torch.cat((ckv[t] * (parts != "kpe"), kpe[t] * (parts != "ckv")))
    ckv_cache, kpe_cache = buffer[..., :8], buffer[..., 8:]
    append_paged_mla_kv_cache(
        ckv if parts != "kpe" else None, kpe, p.batch, p.positions,
        ckv_cache if parts != "kpe" else None, kpe_cache if parts != "ckv" else None, *p.table,
    )  # fmt: skip
    assert torch.equal(buffer, want)


def test_get_seq_lens() -> None:
    lens = get_seq_lens(ints([0, 2, 2, 3, 6]), ints([3, 0, 1, 16]), 16)
    assert lens.tolist() == [19, 0, 1, 48] and lens.dtype == torch.int32
    assert get_seq_lens(ints([0]), ints([]), 16).tolist() == []


@pytest.mark.parametrize("new", [(3, 0, 1, 5), (0, 0), (0, 2, 0), (1,), ()])
@pytest.mark.parametrize("extra", [0, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_get_batch_indices_positions(new: tuple[int, ...], extra: int, dtype: torch.dtype) -> None:
    lens = [n + 10 * b for b, n in enumerate(new)]
    indptr = ints([0, *itertools.accumulate(new)], dtype)
    tokens = [(b, 10 * b + t) for b, n in enumerate(new) for t in range(n)] + [(-1, 0)] * extra
    buffers = (torch.full((20,), 99, dtype=torch.int32), torch.full((20,), 99, dtype=torch.int32))
    got = get_batch_indices_positions(indptr, ints(lens, dtype), len(tokens))
    assert [t.dtype for t in got] == [torch.int32] * 2
    assert list(zip(*(t.tolist() for t in got), strict=True)) == tokens
    filled = get_batch_indices_positions(indptr, ints(lens, dtype), len(tokens), *buffers)
    assert filled[0] is buffers[0] and filled[1] is buffers[1]
    for buffer, want in zip(buffers, got, strict=True):
        assert torch.equal(buffer[: len(tokens)], want) and (buffer[len(tokens) :] == 99).all()


def test_the_whole_way_of_an_engine() -> None:
    """Positions of a padded batch, then an append: padding never reaches the cache."""
    p = Pages(3)
    lens = get_seq_lens(p.indptr, p.last, 3)
    batch, positions = get_batch_indices_positions(ints([0, 3, 3, 4, 9]), lens, 12)
    assert (batch[:9].tolist(), positions[:9].tolist()) == (p.batch.tolist(), p.positions.tolist())
    got, want = torch.zeros(p.pages, 2, 3, 2, 4), torch.zeros(p.pages, 2, 3, 2, 4)
    k = values(12, 2, 4)
    append_paged_kv_cache(k, k, batch, positions, got, *p.table)
    append_paged_kv_cache(k[:9], k[:9], p.batch, p.positions, want, *p.table)
    assert torch.equal(got, want)


def test_compiles_in_one_graph() -> None:
    p, k = Pages(3), values(9, 2, 4)

    def step(k: Tensor, cache: Tensor, ckv: Tensor) -> Tensor:
        batch, positions = get_batch_indices_positions(ints([0, 3, 3, 4, 9]), get_seq_lens(p.indptr, p.last, 3), 9)
        append_paged_kv_cache(k, k * 2, batch, positions, cache, *p.table, "HND")
        append_paged_mla_kv_cache(k[:, 0], None, batch, positions, ckv, None, *p.table)
        return cache.sum()

    got, want = ((torch.zeros(p.pages, 2, 2, 3, 4), torch.zeros(p.pages, 3, 4)) for _ in range(2))
    torch.compile(step, backend="aot_eager", fullgraph=True)(k, *got)
    step(k, *want)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]) and got[1].any()


def call(**changes: object) -> None:
    p = Pages(3)
    k, cache = values(9, 2, 4), torch.zeros(p.pages, 2, 3, 2, 4)
    given = {"append_key": k, "append_value": k, "batch_indices": p.batch, "positions": p.positions}
    given |= {"paged_kv_cache": cache, "kv_indices": p.indices, "kv_indptr": p.indptr, "kv_last_page_len": p.last}
    append_paged_kv_cache(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"kv_layout": "nhd"}, ValueError, "kv_layout is 'nhd', it must be 'NHD' or 'HND'"),
        ({"paged_kv_cache": 3}, TypeError, "paged_kv_cache is a int, it must be one tensor or a pair"),
        ({"paged_kv_cache": torch.zeros(9, 3, 2, 4)}, ValueError, "shape [9, 3, 2, 4], one tensor must be [pages, 2,"),
        ({"paged_kv_cache": (torch.zeros(9, 4),) * 2}, ValueError, "a part of shape [9, 4], it must be 4-D, or 3-D"),
        ({"append_key": values(9, 2, 4).half()}, ValueError, "append_key is float16, its cache float32; an append"),
        ({"append_value": values(9, 2, 5)}, ValueError, "append_value has shape [9, 2, 5], its cache holds entries of"),
        ({"append_value": values(8, 2, 4)}, ValueError, "the two parts hold 9 and 8 tokens"),
        ({"positions": ints([0])}, ValueError, "batch_indices has shape [9], positions [1], there are 9 tokens"),
        ({"batch_indices": torch.zeros(9)}, TypeError, "batch_indices is float32, it must be int32 or int64; convert"),
        ({"kv_indices": ints([0]).to("meta")}, ValueError, "kv_indices is on meta"),
        (
            {"paged_kv_cache": (torch.zeros(20, 3, 2, 4), torch.zeros(19, 3, 2, 4))},
            ValueError,
            "caches are [20, 3, 2, 4] and [19, 3, 2, 4] as [pages, page_size, heads, dim]; give keys",
        ),
        ({"append_key": values(9, 2, 4).requires_grad_()}, NoKernelError, "no gradient"),
    ],
)
def test_wrong_arguments(changes: dict[str, object], error: type[Exception], text: str) -> None:
    call()  # a decision in the cache must not let them through
    with pytest.raises(error) as raised:
        call(**changes)
    assert text in str(raised.value)


def test_wrong_mla_arguments() -> None:
    p, ckv, cache = Pages(3), values(9, 8), torch.zeros(Pages(3).pages, 3, 8)
    for args, text in (
        ((ckv, ckv, None, None), "ckv_cache and kpe_cache are None, nothing can be written; pass at least one"),
        ((None, ckv, cache, None), "append_ckv is None, its cache is given; pass both or none of them"),
        ((ckv[:, None], ckv, cache, cache), "append_ckv has shape [9, 1, 8], its cache"),
        ((ckv, ckv, cache, cache[:-1]), "as [pages, page_size]; make them equal"),
        ((ckv.half(), ckv, cache, cache), "append_ckv is float16, its cache float32"),
    ):
        with pytest.raises(ValueError) as raised:
            append_paged_mla_kv_cache(args[0], args[1], p.batch, p.positions, args[2], args[3], *p.table)
        assert text in str(raised.value)


def test_wrong_position_arguments() -> None:
    with pytest.raises(ValueError, match="kv_indptr has 2 offsets, kv_last_page_len 2 lengths; give one offset more"):
        get_seq_lens(ints([0, 1]), ints([1, 1]), 16)
    with pytest.raises(ValueError, match="append_indptr has 2 offsets, seq_lens 2 lengths"):
        get_batch_indices_positions(ints([0, 1]), ints([1, 1]), 1)
    with pytest.raises(TypeError, match="positions is int64, it must be int32"):
        get_batch_indices_positions(ints([0, 1]), ints([1]), 1, ints([0]), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"batch_indices has shape \[1\], nnz is 2; pass a larger buffer"):
        get_batch_indices_positions(ints([0, 2]), ints([2]), 2, ints([0]), ints([0, 0]))


def test_deep_checks_name_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (ints([0, 2, 3]), ints([5, 1, 0, -1]))
    check_page_metadata(6, 4, *table, ints([4, 1]), ints([0, 1, -1]), ints([7, 3, 99]))
    for args, text in (
        ((5, 4, *table), "kv_indices[0] is 5, the cache has pages 0..4; correct the page table"),
        ((6, 4, ints([0, 2, 4]), table[1]), "kv_indices[3] is -1, the cache has pages 0..5"),
        ((6, 4, ints([0, 2, 1]), table[1]), "kv_indptr[2] is 1, less than the offset before it"),
        ((6, 4, ints([-1, 2]), table[1]), "kv_indptr[0] is -1, it must not be negative"),
        ((6, 4, ints([0, 9]), table[1]), "kv_indptr[-1] is 9, kv_indices has 4 entries; pass all of kv_indices"),
        ((6, 4, ints([]), table[1]), "kv_indptr has shape [0], it must be [batch + 1]"),
        ((6, 4, *table, ints([0, 1])), "kv_last_page_len[0] is 0, it must be 1..4 for a sequence that has pages"),
        ((6, 4, *table, ints([4, 5])), "kv_last_page_len[1] is 5, it must be 1..4"),
        ((6, 4, *table, ints([4])), "kv_last_page_len has shape [1], kv_indptr describes 2 sequences"),
        ((6, 4, *table, None, ints([0, 2]), ints([0, 0])), "batch_indices[1] is 2, kv_indptr describes 2 sequences"),
        (
            (6, 4, *table, None, ints([1]), ints([4])),
            "positions[0] is 4, sequence 1 has pages for 4 tokens; add the new",
        ),
    ):
        with pytest.raises(ValueError) as raised:
            check_page_metadata(*args)
        assert text in str(raised.value)
    monkeypatch.setenv("KERNELMUX_CHECK", "1")
    kernelmux.reload()
    call()
    with pytest.raises(ValueError, match=r"positions\[0\] is 100, sequence 0 has pages for 3 tokens"):
        call(positions=ints([100] * 9))


def test_equal_keys_give_equal_requests() -> None:
    """One token or many, in a bucket, share a decision, and it does not hang on their number."""
    p, cache = Pages(3), torch.zeros(Pages(3).pages, 2, 3, 2, 4)
    k = torch.zeros(9, 3, 4)[:, :2]
    kernelmux.reload()
    for n in (1, 2, 9):
        append_paged_kv_cache(k[:n], k[:n], p.batch[:n], p.positions[:n], cache, *p.table)
    assert len(append.APPEND_PAGED_KV_CACHE.cache) == 1
    views = paged_views(cache, "NHD")
    requests = [
        append._describe(k[:n], k[:n], p.batch[:n], p.positions[:n], *views, p.indices, p.indptr) for n in (1, 9)
    ]
    assert requests[0].features == requests[1].features
