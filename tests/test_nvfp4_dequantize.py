"""nvfp4_kv_dequantize_paged against its own rows through nvfp4_kv_dequantize, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

import kernelmux as km
from kernelmux.capabilities import NoKernelError

F8 = torch.float8_e4m3fn
PAGE, HEADS, DIMS = 4, 3, (32, 48)


class Case:
    """Three sequences of 9, 0 and 4 tokens in random pages; scales that no sequence uses are NaN."""

    def __init__(self, layout: str = "NHD", one: bool = False, device: str = "cpu") -> None:
        g = torch.Generator().manual_seed(3)
        self.layout, self.lens = layout, (9, 0, 4)
        pages = torch.randperm(7, generator=g)[:4].tolist()
        table = [pages[:3], [99, -1, -1], [pages[3], -1, 99]]
        self.v_scale = torch.full((1,), 3.0, device=device)
        self.table, self.seq_lens = torch.tensor(table, device=device), torch.tensor(self.lens, device=device)
        used = torch.zeros(7, PAGE, dtype=torch.bool)
        for row, n in zip(table, self.lens, strict=True):
            for t in range(n):
                used[row[t // PAGE], t % PAGE] = True
        self.nhd: list[tuple[Tensor, Tensor]] = []
        for dim in (DIMS[0], DIMS[0] if one else DIMS[1]):
            packed = torch.randint(0, 256, (7, PAGE, HEADS, dim // 2), generator=g, dtype=torch.uint8)
            scales = torch.rand(7, PAGE, HEADS, dim // 16, generator=g).add(0.1)
            scales[~used] = torch.nan
            self.nhd.append((packed.to(device), scales.to(F8).to(device)))
        caches = [self.form([pair[i] for pair in self.nhd]) for i in range(2)]
        self.cache, self.sf = [torch.stack(c, 1) if one else tuple(c) for c in caches]

    def form(self, parts: list[Tensor]) -> list[Tensor]:
        return [p if self.layout == "NHD" else p.transpose(1, 2).contiguous() for p in parts]

    def outputs(self, dtype: torch.dtype = torch.bfloat16, tokens: int = 10) -> tuple[Tensor, Tensor]:
        made = [torch.full((3, tokens, HEADS, p.shape[-1] * 2), 7.0, dtype=dtype) for p, _ in self.nhd]
        return made[0].to(self.table.device), made[1].to(self.table.device)

    def call(self, out: tuple[Tensor, Tensor], **given: Any) -> None:
        args = {"paged_kv_cache": self.cache, "kv_cache_sf": self.sf, "block_tables": self.table,
                "seq_lens": self.seq_lens, "k_scale": 0.5, "v_scale": self.v_scale,
                "output_k": out[0], "output_v": out[1], "kv_layout": self.layout}  # fmt: skip
        km.nvfp4_kv_dequantize_paged(**{**args, **given})

    def check(self, out: tuple[Tensor, Tensor]) -> None:
        for (packed, scales), got, scale in zip(self.nhd, out, (0.5, 3.0), strict=True):
            factor = torch.tensor([scale], device=packed.device)
            for b, n in enumerate(self.lens):
                assert (got[b, n:] == 7).all()
                for t in range(min(n, got.shape[1])):
                    page, place = int(self.table[b, t // PAGE]), t % PAGE
                    want = km.nvfp4_kv_dequantize(packed[page, place], scales[page, place], factor, got.dtype)
                    assert torch.equal(got[b, t], want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_token_below_its_length(layout: str, one: bool, dtype: torch.dtype) -> None:
    case = Case(layout, one)
    out = case.outputs(dtype)
    case.call(out)
    case.check(out)


def test_strided_outputs_and_the_bytes_of_scales() -> None:
    case = Case()
    wide = [torch.full((3, 10, HEADS, 2 * o.shape[-1]), 7.0) for o in case.outputs()]
    out = wide[0][..., ::2], wide[1][..., ::2]
    case.call(out, kv_cache_sf=tuple(s.view(torch.uint8) for s in case.sf), block_tables=case.table.int())
    case.check(out)
    assert all((w[..., 1::2] == 7).all() for w in wide)


def test_fewer_tokens_than_a_sequence_has() -> None:
    case = Case()
    out = case.outputs(tokens=6)
    case.call(out)
    case.check(out)
    case.call(case.outputs(tokens=0))


def test_compiled() -> None:
    case = Case()
    out = case.outputs()
    torch.compile(case.call, backend="aot_eager", fullgraph=True)(out)
    case.check(out)


@pytest.mark.gpu
def test_on_a_gpu_and_in_a_graph() -> None:
    case = Case("HND", device="cuda")
    out = case.outputs()
    scale = torch.full((1,), 0.5, device="cuda")
    case.call(out, k_scale=scale)
    case.check(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.call(out, k_scale=scale)
    for o in out:
        o.fill_(7)
    graph.replay()
    case.check(out)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c: {"seq_lens": c.seq_lens[:2]}, ValueError, "they must be [batch, pages] and [batch]"),
        (lambda c: {"seq_lens": c.seq_lens.float()}, TypeError, "seq_lens is float32, it must be int32 or int64"),
        (lambda c: {"output_k": c.outputs()[0][0]}, ValueError, "output_k has shape [10, 3, 32], it must be"),
        (lambda c: {"output_k": c.outputs()[0][:2]}, ValueError, "output_k has shape [2, 10, 3, 32], it must be [3"),
        (lambda c: {"output_k": c.outputs()[0].int()}, TypeError, "output_k is int32"),
        (lambda c: {"output_k": c.outputs()[0].half()}, ValueError, "give both one dtype"),
        (lambda c: {"output_k": c.outputs()[0][:, :1].expand(3, 10, 3, 32)}, ValueError, "it is written to"),
        (lambda c: {"output_v": c.outputs()[1][..., :32]}, ValueError, "make them [3, 16]"),
        (lambda c: {"output_k": c.outputs()[0].to("meta")}, ValueError, "output_k is on meta"),
        (lambda c: {"k_scale": torch.ones(2)}, ValueError, "k_scale has shape [2]"),
        (lambda c: {"paged_kv_cache": (c.cache[0].float(), c.cache[1])}, TypeError, "NVFP4 is uint8"),
        (lambda c: {"kv_layout": "NDH"}, ValueError, "kv_layout is 'NDH'"),
        (lambda c: {"output_k": c.outputs(torch.float32)[0].requires_grad_(),
                    "output_v": c.outputs(torch.float32)[1]}, NoKernelError, "grad"),
    ],
)  # fmt: skip
def test_wrong_arguments(change: Any, error: type[Exception], message: str) -> None:
    case = Case()
    with pytest.raises(error) as raised:
        case.call(case.outputs(), **change(case))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"seq_lens": torch.tensor([9, 0, 13])}, "seq_lens[2] is 13; the outputs have 10 tokens"),
        (lambda c: {"seq_lens": torch.tensor([9, -1, 4])}, "seq_lens[1] is -1"),
        (lambda c: {"seq_lens": torch.tensor([9, 1, 4])}, "block_tables[1, 0] is 99, the cache has pages 0..6"),
    ],
)
def test_deep_checks(change: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    monkeypatch.setenv("KERNELMUX_CHECK", "1")
    km.reload()
    case.call(case.outputs())
    with pytest.raises(ValueError) as raised:
        case.call(case.outputs(), **change(case))
    assert message in str(raised.value)
