"""Cases of the attention op, drawn from what a kernel declares."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from conformance.edges import inside
from kernelmux.capabilities import AttentionSpec, Device, Kernel, Limit

KV_LENS = (37, 1, 0, 300, 64, 1000)
Q_LENS = (17, 5, 0, 130, 3, 1)  # an empty sequence, one that has more queries than keys, and one without keys
PREFILL_KV_LENS = (37, 2, 9, 300, 0, 700)


@dataclass(frozen=True)
class Case:
    """One batch of attention and the layout of its tensors."""

    name: str
    phase: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (64, 64)
    page_size: int = 16
    causal: bool = False
    window_left: int = -1
    lse: bool = False
    sinks: bool = False
    no_split: bool = False
    graph: bool = False
    hnd: bool = False
    kv_strides_differ: bool = False
    fused_q: bool = False  # q is a slice of a fused projection, out one of a wider buffer

    def __str__(self) -> str:
        return f"{self.phase}-{self.name}"

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            self.phase, *self.heads, *self.dims, self.page_size, *self.dtypes, causal=self.causal,
            window_left=self.window_left, use_cuda_graph=self.graph, disable_split=self.no_split,
        )  # fmt: skip

    @property
    def uses(self) -> frozenset[str]:
        """Features that the layout and the arguments of run() add to those of the spec."""
        flags = {"lse": self.lse, "sinks": self.sinks, "kv_strides_differ": self.kv_strides_differ}
        return frozenset(name for name, holds in flags.items() if holds)


def cases(kernel: Kernel, device: Device) -> list[Case]:
    """Every case that the kernel declares to serve on a device."""
    from conformance.attention_run import request_of

    found: dict[str, Case] = {}
    drafts: Iterable[Case] = _drafts(kernel)
    if kernel.support.device == "cpu":
        drafts = [_shorter(d) for d in drafts if not d.name.startswith(("page-2", "page-32", "page-64-", "page-1024"))]
    for case in drafts:
        if not kernel.support.reasons(request_of(case), device):
            found.setdefault(str(case), case)
    return list(found.values())


def _shorter(case: Case) -> Case:
    """With lengths that a CPU's reference takes in milliseconds; those below 40 stay as they are."""
    return replace(case, **{n: tuple(min(x, 40 + x // 20) for x in getattr(case, n)) for n in ("q_lens", "kv_lens")})


def _drafts(kernel: Kernel) -> Iterator[Case]:
    combos = sorted(kernel.support.dtypes or (), key=str)
    for phase in kernel.support.phases:
        base = _plain(kernel, phase, combos[-1])
        for dtypes in combos:
            name = "-".join(str(d).removeprefix("torch.") for d in dtypes)
            yield replace(base, name=name, dtypes=dtypes, causal=True, lse=True, heads=(32, 8), dims=(128, 128))
            yield replace(base, name=f"{name}-plain", dtypes=dtypes)
        yield from _masks(base)
        yield from _shapes(kernel, base)
        yield from _layouts(base)
        if kernel.graph_safe:
            yield from _graphs(base)


def _plain(kernel: Kernel, phase: str, dtypes: tuple[torch.dtype, ...]) -> Case:
    least = kernel.support.dims.get("q_len", Limit()).min or 1
    sinks = "sinks" in kernel.support.features
    lse = "lse" in kernel.support.features
    if phase == "decode":
        page = _page_size(kernel)
        return Case("", phase, (least,) * len(KV_LENS), KV_LENS, dtypes, page_size=page, lse=lse, sinks=sinks)
    page_size = 0 if phase == "ragged" else _page_size(kernel)
    return Case("", phase, Q_LENS, PREFILL_KV_LENS, dtypes, page_size=page_size, lse=lse, sinks=sinks)


def _page_size(kernel: Kernel) -> int:
    """16 where the kernel takes it, else the nearest that it takes."""
    limit = kernel.support.dims.get("page_size", Limit())
    return min((p for p in (16, 1, 128) if limit.problem(p) is None), key=lambda p: abs(p - 16))


def _masks(base: Case) -> Iterator[Case]:
    yield replace(base, name="causal", causal=True)
    yield replace(base, name="causal-no-lse", causal=True, lse=False)
    for window in (0, 31, 1 << 20):
        yield replace(base, name=f"window-{window}", window_left=window)
        yield replace(base, name=f"causal-window-{window}", causal=True, window_left=window)
    if base.phase == "decode":
        yield replace(base, name="four-rows", q_lens=(4,) * len(base.kv_lens), causal=True)
        yield replace(base, name="four-rows-window", q_lens=(4,) * len(base.kv_lens), causal=True, window_left=2)
    else:
        yield replace(base, name="single-rows", q_lens=(1,) * len(base.kv_lens), causal=True)
        yield replace(base, name="one-sequence", q_lens=(200,), kv_lens=(333,), causal=True)
        yield replace(base, name="long", q_lens=(300, 700), kv_lens=(1300, 700), causal=True, heads=(4, 1))


def _shapes(kernel: Kernel, base: Case) -> Iterator[Case]:
    causal = replace(base, causal=True)
    for heads in ((3, 3), (9, 3), (4, 1), (28, 4), (8, 1), (40, 8), (64, 8), (96, 8)):
        yield replace(causal, name=f"heads-{heads[0]}-{heads[1]}", heads=heads)
    limit = kernel.support.dims.get("head_dim_qk", Limit())
    for dim in sorted({64, 72, 80, 96, 112, 128, 136, 160, 192, 248, 256, *inside(limit), limit.multiple_of or 64}):
        yield replace(causal, name=f"dim-{dim}", dims=(dim, dim), heads=(4, 2))
    for dims in ((192, 128), (128, 64), (64, 128)):
        yield replace(causal, name=f"dims-{dims[0]}-{dims[1]}", dims=dims, heads=(4, 2))
    for page in (1, 2, 4, 5, 8, 32, 64, 128, 256, 1024) if base.page_size else ():
        yield replace(causal, name=f"page-{page}", page_size=page)
        yield replace(causal, name=f"page-{page}-dim-128", page_size=page, dims=(128, 128))
    if base.page_size:
        yield replace(causal, name="page-64-dim-256", page_size=64, dims=(256, 256))
        yield replace(causal, name="page-64-dim-192", page_size=64, dims=(192, 192))
    yield replace(causal, name="no-split", no_split=True)
    many = 33
    q_lens = base.q_lens[:1] * many if base.phase == "decode" else tuple(i % 5 for i in range(many))
    yield replace(causal, name="many", q_lens=q_lens, kv_lens=tuple(i * 7 % 90 for i in range(many)))


def _layouts(base: Case) -> Iterator[Case]:
    causal = replace(base, causal=True)
    yield replace(causal, name="fused-q", fused_q=True, heads=(9, 3))
    if base.page_size:
        yield replace(causal, name="hnd", hnd=True)
        yield replace(causal, name="hnd-fused-q", hnd=True, fused_q=True, heads=(6, 2), dims=(128, 128), page_size=64)
        yield replace(causal, name="k-nhd-v-hnd", kv_strides_differ=True)


def _graphs(base: Case) -> Iterator[Case]:
    yield replace(base, name="graph", graph=True)
    yield replace(base, name="graph-causal", graph=True, causal=True, dims=(128, 128), heads=(8, 2))
    yield replace(base, name="graph-causal-window", graph=True, causal=True, window_left=9)
    yield replace(base, name="graph-no-split", graph=True, causal=True, no_split=True)
    yield replace(base, name="graph-no-lse", graph=True, causal=True, lse=False, hnd=base.page_size > 0)
