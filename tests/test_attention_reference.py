"""The attention reference against a plain formula: one row, one head, one visible key list at a time, in float64."""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernelmux.capabilities import AttentionSpec, Batch, RunExtras
from kernelmux.dispatch.attention import mask as masks
from kernelmux.dispatch.attention import reference as module
from kernelmux.dispatch.attention.packbits import segment_packbits
from kernelmux.dispatch.attention.reference import reference
from kernelmux.dispatch.quantization.nvfp4_kv_reference import pack_nvfp4, unpack_nvfp4

CPU = torch.device("cpu")


def offsets(lengths: Iterable[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@dataclass
class Case:
    """One batch: sequences' lengths and dims, features (fields of AttentionSpec), and what `run` gets."""

    q_lens: tuple[int, ...] = (3, 1, 5)
    kv_lens: tuple[int, ...] = (7, 4, 18)
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (8, 8)
    page: int = 3  # 0 = ragged
    q_dtype: torch.dtype = torch.float64
    kv_dtype: torch.dtype = torch.float64
    o_dtype: torch.dtype = torch.float64
    features: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    scale: float = 0.3
    seed: int = 0
    hnd: bool = False
    custom: list[Tensor] = field(default_factory=list)
    items: tuple[list[int], list[list[int]]] | None = None  # prefix lengths, token positions in items

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        hq, hkv = self.heads
        self.q = torch.randn(sum(self.q_lens), hq, self.dims[0], generator=g, dtype=torch.float64).to(self.q_dtype)
        self.ks, self.vs = (
            [torch.randn(n, hkv, d, generator=g, dtype=torch.float64).to(self.kv_dtype) for n in self.kv_lens]
            for d in self.dims
        )
        if self.features.get("custom_mask") and not self.custom:
            shapes = zip(self.q_lens, self.kv_lens, strict=True)
            self.custom = [torch.rand(s, generator=g) < 0.5 for s in shapes]
        if self.features.get("multi_item") and self.items is None:
            self.items = ([2] * len(self.kv_lens), [[t % 3 for t in range(n - 2)] for n in self.kv_lens])
        if self.features.get("bidirectional") and "ranges" not in self.extras:
            ranges = [[0, 3], [5, 6], [-1, -1], [2, 2], [3, 12], [14, 17], [-1, -1], [0, 17], [16, 17]]
            self.extras["ranges"] = torch.tensor(ranges, dtype=torch.int32)

    def store(self, parts: list[Tensor], g: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Parts in a paged cache at random pages, or one after another; NaN everywhere else. Also the page ids."""
        if self.page == 0:
            return torch.cat([*parts, torch.full_like(parts[0][:1].float(), math.nan).to(parts[0].dtype)]), None
        counts = [-(-p.shape[0] // self.page) for p in parts]
        order = torch.randperm(sum(counts) + 3, generator=g)
        shape = (order.numel(), parts[0].shape[1], self.page, parts[0].shape[2])
        poison = torch.full((), math.nan).to(parts[0].dtype) if parts[0].is_floating_point() else torch.tensor(255)
        cache = torch.empty(shape if self.hnd else (shape[0], shape[2], shape[1], shape[3]), dtype=parts[0].dtype)
        cache = (cache.fill_(poison.item())).transpose(1, 2) if self.hnd else cache.fill_(poison.item())
        for part, ids in zip(parts, order[: sum(counts)].split(counts), strict=True):
            for t in range(part.shape[0]):
                cache[ids[t // self.page], t % self.page] = part[t]
        return cache, order

    def batch(self) -> Batch:
        lens = torch.tensor(self.kv_lens)
        counts = lens if self.page == 0 else -(-lens // self.page)
        order = self.store(self.ks, torch.Generator().manual_seed(1))[1]
        packed = {}
        if self.custom:
            sizes = offsets(m.numel() for m in self.custom)
            bits = segment_packbits(torch.cat([m.flatten() for m in self.custom]), sizes, bitorder="little")
            packed = {"packed_mask": bits[0], "mask_indptr": bits[1]}
        if self.items is not None:
            width = max(map(len, self.items[1])) + 1
            table = [row + [0] * (width - len(row)) for row in self.items[1]]
            packed["prefix_len"] = torch.tensor(self.items[0]).to(torch.uint32)
            packed["token_pos_in_items"] = torch.tensor(table).flatten().to(torch.uint16)
            packed["token_pos_in_items_len"] = width
        return Batch(
            device=CPU,
            size=len(self.q_lens),
            total_q=sum(self.q_lens),
            max_q_len=max(self.q_lens),
            max_kv_len=max(self.kv_lens),
            page_size=self.page,
            qo_indptr=offsets(self.q_lens),
            kv_indptr=offsets(counts.tolist()),
            kv_indices=None if order is None else torch.cat((order[: int(counts.sum())], torch.tensor([-1, -1]))).int(),
            last_page_len=None if order is None else (lens - (counts - 1).clamp(min=0) * self.page).int(),
            q_lens=self.q_lens,
            kv_lens=self.kv_lens,
            **packed,
        )

    def spec(self) -> AttentionSpec:
        phase = "prefill" if self.page else "ragged"
        dtypes = (self.q_dtype, self.kv_dtype, self.o_dtype)
        return AttentionSpec(phase, *self.heads, *self.dims, self.page, *dtypes, **self.features)

    def run(self, batch: Batch | None = None, **store: Tensor) -> tuple[Tensor, Tensor]:
        g = [torch.Generator().manual_seed(1) for _ in range(2)]
        k, v = self.store(self.ks, g[0])[0], self.store(self.vs, g[1])[0]
        out = torch.full((self.q.shape[0], self.heads[0], self.dims[1]), 77.0).to(self.o_dtype)
        lse = torch.full(self.q.shape[:2], 77.0, dtype=torch.float64)
        q, k, v = (store.get(name, tensor) for name, tensor in (("q", self.q), ("k", k), ("v", v)))
        reference(self.spec(), batch or self.batch())(q, k, v, out, lse, self.scale, RunExtras(**self.extras))
        return out, lse

    # -- the plain formula ------------------------------------------------------------------------------------------

    def sees(self, b: int, i: int, j: int, row: int) -> bool:
        f, p = self.features, i + self.kv_lens[b] - self.q_lens[b]
        window = f.get("window_left", -1)
        if window >= 0 and j < p - window:
            return False
        if self.custom:
            return bool(self.custom[b][i, j])
        if f.get("bidirectional"):
            start, end = self.extras["ranges"][row].tolist()
            causal, ranged = self.extras.get("causal_window_left", -1), self.extras.get("range_window_left", -1)
            mine = start <= j <= end and start >= 0 and (ranged < 0 or j >= p - ranged)
            return mine or (j <= p and (causal < 0 or j >= p - causal))
        if self.items is not None:
            prefix = self.items[0][b]
            if j > p or p < prefix or j < prefix:
                return j <= p
            return j > p - self.items[1][b][p - prefix]
        return j <= p or not f.get("causal")

    def rope(self, x: np.ndarray, position: int) -> np.ndarray:
        f, half = self.features, x.shape[-1] // 2
        angle = np.array([position * f["rope_theta"] ** (-d / half) / f["rope_scale"] for d in range(half)])
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
        return np.concatenate((turned.real, turned.imag), -1)

    def slope(self, h: int) -> float:
        n = 2 ** int(math.log2(self.heads[0]))
        finer = [2.0 ** (-8 * (i + 1) / (2 * n)) for i in range(2 * n)]
        return finer[1::2][h] if h < n else finer[0::2][h - n]

    def expected(self) -> tuple[Tensor, Tensor]:
        out, lse = np.zeros((self.q.shape[0], self.heads[0], self.dims[1])), np.full(self.q.shape[:2], -math.inf)
        row = 0
        for b, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            k, v = self.ks[b].double().numpy(), self.vs[b].double().numpy()
            for i in range(q_len):
                keys = [j for j in range(kv_len) if self.sees(b, i, j, row)]
                for h in range(self.heads[0]):
                    q = self.q[row, h].double().numpy()
                    out[row, h], lse[row, h] = self.one(q, k, v, keys, i, kv_len - q_len, h)
                row += 1
        return torch.tensor(out), torch.tensor(lse)

    def one(self, q: Any, k: Any, v: Any, keys: list[int], i: int, shift: int, h: int) -> tuple[Any, float]:
        f, e, at = self.features, self.extras, h // (self.heads[0] // self.heads[1])
        factor = self.scale * float(e.get("qk_scale", 1.0)) * float(e["scale_q"][h] if "scale_q" in e else 1)
        factor *= float(e["scale_k"][at] if "scale_k" in e else 1)
        s = []
        for j in keys:
            turn = f.get("pos_encoding") == "ROPE_LLAMA"
            x = self.rope(q, i + shift) @ self.rope(k[j, at], j) if turn else q @ k[j, at]
            x = float(x) * factor + (self.slope(h) * (j - i) if f.get("pos_encoding") == "ALIBI" else 0)
            s.append(f["soft_cap"] * math.tanh(x / f["soft_cap"]) if f.get("soft_cap") else x)
        logits = np.array([*s, *([float(e["sinks"][h])] if "sinks" in e else [])])
        if not np.isfinite(logits).any():
            return 0.0, -math.inf
        total = np.exp(logits - logits.max()).sum()
        p = np.exp(np.array(s) - logits.max()) / total
        value = sum((p[n] * v[j, at] for n, j in enumerate(keys)), start=np.zeros(self.dims[1]))
        return value * float(e["scale_v"][at] if "scale_v" in e else 1), (logits.max() + math.log(total)) / math.log(2)

    def check(self, atol: float = 1e-12) -> tuple[Tensor, Tensor]:
        got, want = self.run(), self.expected()
        torch.testing.assert_close(got[0].double(), want[0], atol=atol, rtol=atol)
        torch.testing.assert_close(got[1], want[1], atol=max(atol, 1e-12), rtol=1e-6)
        return got


F8, F8W, HALF, BF = torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16
HEADS = {1: (3, 3), 3: (9, 3), 4: (8, 2), 7: (7, 1), 8: (16, 2)}
# One entry per feature: fields of AttentionSpec, fields of RunExtras.
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({"causal": True}, {}),
    "window": ({"window_left": 2}, {}),
    "soft_cap": ({"soft_cap": 0.7}, {}),
    "alibi": ({"pos_encoding": "ALIBI"}, {}),
    "rope": ({"pos_encoding": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 100.0}, {}),
    "custom_mask": ({"custom_mask": True}, {}),
    "multi_item": ({"multi_item": True}, {}),
    "ranges": ({"bidirectional": True}, {}),
    "range_windows": ({"bidirectional": True}, {"causal_window_left": 1, "range_window_left": 3}),
    "sinks": ({}, {"sinks": torch.tensor([5.0, -1.0, 0.5, -math.inf])}),
    "qk_scale": ({}, {"qk_scale": torch.tensor(2.5)}),
    "head_scales": (
        {},
        {
            "scale_q": torch.tensor([0.5, 2.0, 1.0, 3.0]),
            "scale_k": torch.tensor([1.5, 0.5]),
            "scale_v": torch.tensor([4.0, 0.25]),
        },
    ),
}
EXCLUSIVE = [{"custom_mask", "multi_item", "ranges", "range_windows"}, {"alibi", "rope"}]


def case(*names: str, **kwargs: Any) -> Case:
    features, extras = {}, {}
    for name in names:
        features |= FEATURES[name][0]
        extras |= FEATURES[name][1]
    return Case(features=features, extras=extras, **kwargs)


def pairs() -> list[tuple[str, str]]:
    return [p for p in itertools.combinations(FEATURES, 2) if not any(set(p) <= group for group in EXCLUSIVE)]


@pytest.mark.parametrize("page", [0, 1, 3, 16])
@pytest.mark.parametrize("name", ["plain", *FEATURES])
def test_each_feature(name: str, page: int) -> None:
    case(*([] if name == "plain" else [name]), page=page).check()


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float64), (HALF, F8), (F8W, F8W)], ids=str)
@pytest.mark.parametrize("name", ["plain", *FEATURES])
def test_each_feature_on_a_gpu(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """The same values as on the CPU, lengths known on the host or not."""
    c = case(*([] if name == "plain" else [name]), q_dtype=dtypes[0], kv_dtype=dtypes[1])
    want, batch = c.run(), c.batch()
    moved = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.init and f.name != "_derived"}
    moved = {name: v.cuda() if isinstance(v, Tensor) else v for name, v in moved.items()} | {"device": batch.device}
    extras = RunExtras(**{n: v.cuda() if isinstance(v, Tensor) else v for n, v in c.extras.items()})
    k, v = (c.store(parts, torch.Generator().manual_seed(1))[0].cuda() for parts in (c.ks, c.vs))
    for lens in ({}, {"q_lens": None, "kv_lens": None}):
        there = Batch(**(moved | {"device": k.device} | lens))
        out, lse = torch.full_like(want[0], 77.0).cuda(), torch.full_like(want[1], 77.0).cuda()
        reference(c.spec(), there)(c.q.cuda(), k, v, out, lse, c.scale, extras)
        torch.testing.assert_close((out.cpu(), lse.cpu()), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("names", pairs(), ids="+".join)
def test_pairs_of_features(names: tuple[str, str]) -> None:
    case(*names, q_lens=(3, 4), kv_lens=(7, 11), page=4).check()


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_changes_the_answer(name: str) -> None:
    plain, got = Case().run(), case(name).run()
    assert not torch.allclose(got[0], plain[0], atol=1e-3) or name == "alibi"
    if name == "alibi":  # with a query of one row the bias is a constant only for head 0
        assert not torch.allclose(got[0][:3], plain[0][:3], atol=1e-3)


@pytest.mark.parametrize("group", HEADS)
@pytest.mark.parametrize("dims", [(8, 8), (5, 5), (72, 40), (24, 16), (3, 9)])
def test_groups_and_dims(group: int, dims: tuple[int, int]) -> None:
    Case((2, 3), (5, 9), HEADS[group], dims, page=4, features={"causal": True}).check()
    Case((2, 3), (5, 9), HEADS[group], dims, page=0, features={"pos_encoding": "ALIBI"}).check()


def test_empty_sequences_and_short_keys() -> None:
    """No queries, no keys, both, and fewer keys than queries: the rows above the diagonal see nothing."""
    out, lse = case("causal", q_lens=(0, 2, 0, 8, 3), kv_lens=(5, 0, 0, 4, 3), page=2).check()
    assert (out[:2] == 0).all() and (lse[:2] == -math.inf).all()
    assert (out[2:6] == 0).all() and (lse[2:6] == -math.inf).all() and lse[6:].isfinite().all()
    out, lse = case("causal", "sinks", q_lens=(2, 8), kv_lens=(0, 4), page=0).check()
    assert (out[:2] == 0).all()
    torch.testing.assert_close(lse[0], FEATURES["sinks"][1]["sinks"].double() / math.log(2))


@pytest.mark.parametrize("w", [0, 1, 5, 17, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_window(w: int, causal: bool) -> None:
    Case((4, 9), (20, 5), features={"window_left": w, "causal": causal}).check()


def test_window_of_one_token_sees_itself() -> None:
    c = Case((8,), (8,), (2, 2), features={"window_left": 0, "causal": True})
    torch.testing.assert_close(c.run()[0], c.vs[0])


def test_items_score_as_if_alone() -> None:
    """Each item after a shared prefix gives what it would give right behind the prefix, its delimiter left out."""
    c = Case((6,), (9,), features={"multi_item": True}, items=([3], [[0, 1, 2, 0, 1, 2]]), page=0)
    out = c.check()[0]
    for first in (4, 7):
        alone = Case((2,), (5,), features={"causal": True}, page=0)
        keep = [0, 1, 2, first, first + 1]
        alone.q, alone.ks, alone.vs = c.q[first - 3 : first - 1], [c.ks[0][keep]], [c.vs[0][keep]]
        torch.testing.assert_close(alone.run()[0], out[first - 3 : first - 1])


@pytest.mark.parametrize("kv", [F8, F8W, HALF, BF, torch.float32])
@pytest.mark.parametrize("q", [HALF, BF])
def test_kv_dtypes(q: torch.dtype, kv: torch.dtype) -> None:
    for page in (0, 3):
        case("causal", page=page, q_dtype=q, kv_dtype=kv, o_dtype=q).check(atol=2e-2 if q == BF else 2e-3)


@pytest.mark.parametrize("dtype", [F8, F8W])
def test_fp8_queries_with_head_scales(dtype: torch.dtype) -> None:
    case("causal", "head_scales", q_dtype=dtype, kv_dtype=dtype, o_dtype=HALF).check(atol=4e-3)


def test_fp8_output_saturates() -> None:
    c = Case((1, 1), (1, 1), o_dtype=F8)
    c.vs = [v * 1e4 for v in c.vs]
    torch.testing.assert_close(c.run()[0].float(), c.expected()[0].float().clamp(-448, 448), atol=0, rtol=0.07)


@pytest.mark.parametrize("page", [0, 4])
def test_nvfp4_kv(page: int) -> None:
    c = Case(page=page, dims=(32, 16), q_dtype=HALF, o_dtype=HALF, features={"nvfp4_kv": True, "causal": True})
    packed = [[pack_nvfp4(t, 0.5) for t in parts] for parts in (c.ks, c.vs)]
    want = dataclasses.replace(c, features={"causal": True})
    want.ks, want.vs = ([unpack_nvfp4(*p, torch.float64) for p in parts] for parts in packed)
    c.ks, c.vs = ([p[0] for p in parts] for parts in packed)
    scales = [c.store([p[1] for p in parts], torch.Generator().manual_seed(1))[0] for parts in packed]
    c.extras = {"k_sf": scales[0], "v_sf": scales[1].view(torch.uint8)}
    torch.testing.assert_close(c.run()[0].double(), want.expected()[0], atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("hnd", [False, True])
def test_strides(hnd: bool) -> None:
    """HND caches, K and V interleaved in one buffer, q sliced out of a fused projection, outputs with gaps."""
    c = case("causal", hnd=hnd, page=4)
    want = c.expected()
    fused = torch.full((c.q.shape[0], c.heads[0] + 3, c.dims[0] * 2), math.nan, dtype=c.q_dtype)
    q = fused[:, 1:-2, ::2].copy_(c.q)
    k, v = (c.store(parts, torch.Generator().manual_seed(1))[0] for parts in (c.ks, c.vs))
    both = torch.stack((k, v), dim=1)
    torch.testing.assert_close(c.run(q=q, k=both[:, 0], v=both[:, 1])[0], want[0])
    out = torch.zeros(c.q.shape[0], c.heads[0], c.dims[1], 2, dtype=torch.float64)[..., 0]
    lse = torch.zeros(c.heads[0], c.q.shape[0]).t()
    reference(c.spec(), c.batch())(q, both[:, 0], both[:, 1], out, lse, c.scale, None)
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(lse, want[1].float())


@pytest.mark.parametrize("name", ["causal", "window", "custom_mask", "alibi", "rope", "multi_item", "ranges"])
def test_chunks_of_rows_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = case(name).run()
    monkeypatch.setattr(module, "MAX_SCORES", 2 * 4 * 18)
    got = case(name).run()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_masked_values_may_hold_anything() -> None:
    """NaN and infinities in V reach exactly the rows that see them."""
    for names in (("causal",), ("window",), ("custom_mask", "window"), ("ranges",)):
        c = case(*names)
        clean = c.run()[0]
        bad = {0: math.nan, 3: math.inf, 6: -math.inf}
        for j, value in bad.items():
            c.vs[0][j, 0] = value
        got = c.run()[0]
        for i in range(3):
            seen = [value for j, value in bad.items() if c.sees(0, i, j, i)]
            torch.testing.assert_close(got[i, 2:], clean[i, 2:])
            if not seen:
                torch.testing.assert_close(got[i], clean[i])
            elif len(seen) == 1:
                torch.testing.assert_close(got[i, :2], torch.full_like(got[i, :2], seen[0]), equal_nan=True)
            else:
                assert got[i, :2].isnan().all()
        torch.testing.assert_close(got[3:], clean[3:])


def test_spans_hold_every_visible_key() -> None:
    c = case("causal", "window", q_lens=(5,), kv_lens=(9,))
    seq = masks.Sequence(0, 0, 5, 9)
    for first, last in itertools.combinations(range(6), 2):
        start, stop = masks.key_span(c.spec(), seq, first, last)
        seen = [j for i in range(first, last) for j in range(9) if c.sees(0, i, j, i)]
        assert (start, stop) == (min(seen), max(seen) + 1)
