"""NVFP4 KV: rounding, packing, and the appends that quantise, against plain loops."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import kernelmux
from kernelmux.capabilities import NoKernelError
from kernelmux.dispatch.page.cache import paged_views
from kernelmux.dispatch.page.nvfp4_append import nvfp4_quantize_append_paged_kv_cache
from kernelmux.dispatch.page.nvfp4_append_mla import nvfp4_quantize_append_paged_mla_kv_cache
from kernelmux.dispatch.page.nvfp4_slots import nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
from kernelmux.dispatch.quantization.nvfp4_kv import nvfp4_kv_dequantize, nvfp4_kv_quantize
from kernelmux.dispatch.quantization.nvfp4_kv_reference import E2M1, decode_e2m1, encode_e2m1

F8 = torch.float8_e4m3fn


def one(value: float) -> Tensor:
    return torch.tensor([value])


def nearest(x: float) -> int:
    """Code of the nearest E2M1 value; of two as near, the one with the even code."""
    code = min(range(8), key=lambda c: (abs(E2M1[c] - abs(x)), c % 2))
    return code + 8 * (math.copysign(1, x) < 0)


def plain(row: list[float], global_scale: float) -> tuple[list[int], list[float]]:
    """Bytes and block scales of one row."""
    codes, scales = [], []
    for block in (row[i : i + 16] for i in range(0, len(row), 16)):
        scale = torch.tensor(max(map(abs, block)) / global_scale / 6).clamp(max=448).to(F8).float().item()
        scales.append(scale)
        codes += [nearest(x / global_scale / scale) if scale else nearest(math.copysign(0, x)) for x in block]
    return [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)], scales


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * torch.randn(*shape[:-1], 1, generator=g).exp()).to(dtype)


def test_e2m1_rounds_to_nearest_even() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.26, 0.74, 1.24, 2.51, 5.01, 100.0, math.inf, -0.0, -0.6])
    want = [0, 2, 2, 4, 4, 6, 6, 1, 1, 2, 5, 7, 7, 7, 8, 9]
    assert encode_e2m1(x).tolist() == want
    assert encode_e2m1(torch.tensor(E2M1)).tolist() == list(range(8))
    assert decode_e2m1(torch.arange(16), torch.float64).tolist() == [*E2M1, *(-v for v in E2M1)]
    assert [nearest(v) for v in x.clamp(max=1000).tolist()] == want


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 0.25, 3.0])
def test_quantize(dtype: torch.dtype, scale: float) -> None:
    x = rows(5, 48, dtype=dtype)
    x[1, :16], x[2, 16:32] = 0, 1e-12 if dtype == torch.float32 else 0
    x[3, 5] = 6 * 448 * scale * 2  # the block scale saturates
    fp4, scales = nvfp4_kv_quantize(x, one(scale))
    assert (fp4.dtype, fp4.shape, scales.dtype, scales.shape) == (torch.uint8, (5, 24), torch.uint8, (5, 3))
    want = [plain(row, scale) for row in x.double().tolist()]
    assert fp4.tolist() == [w[0] for w in want]
    assert scales.view(F8).float().tolist() == [w[1] for w in want]


@pytest.mark.parametrize("out", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dequantize(out: torch.dtype) -> None:
    x = rows(4, 32)
    fp4, scales = nvfp4_kv_quantize(x, one(0.5))
    for s in (scales, scales.view(F8)):
        got = nvfp4_kv_dequantize(fp4, s, one(0.5), out)
        assert got.dtype == out
        for r, c in itertools.product(range(4), range(32)):
            code = int(fp4[r, c // 2]) >> (4 * (c % 2)) & 15
            value = math.copysign(E2M1[code % 8], -1 if code > 7 else 1) * float(scales.view(F8)[r, c // 16]) * 0.5
            assert got[r, c].item() == torch.tensor(value).to(out).item()
    # half a step of E2M1 between 4 and 6, in units of a block's largest value, and the rounding of the block scale
    error = (nvfp4_kv_dequantize(fp4, scales, one(0.5), torch.float32) - x).abs().view(4, 2, 16)
    assert (error <= x.abs().view(4, 2, 16).amax(-1, keepdim=True) * (1 / 6 + 1 / 16)).all()


def test_default_output_and_exact_values() -> None:
    x = torch.tensor([*E2M1, *(-v for v in E2M1)]).view(1, 16).repeat(2, 2) * 4
    got = nvfp4_kv_dequantize(*nvfp4_kv_quantize(x, one(2.0)), one(2.0))
    assert got.dtype == torch.bfloat16 and torch.equal(got.float(), x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    x = rows(64, 128, dtype=dtype)
    fp4, scales = nvfp4_kv_quantize(x, one(0.7))
    got = nvfp4_kv_quantize(x.cuda(), one(0.7).cuda())
    assert torch.equal(got[0].cpu(), fp4) and torch.equal(got[1].cpu(), scales)
    back = nvfp4_kv_dequantize(*got, one(0.7).cuda(), dtype)
    assert torch.equal(back.cpu(), nvfp4_kv_dequantize(fp4, scales, one(0.7), dtype))


def test_strided_and_empty() -> None:
    x = rows(6, 64)
    strided, (fp4, scales) = x[::2, ::2], nvfp4_kv_quantize(x[::2, ::2].contiguous(), one(1.0))
    got = nvfp4_kv_quantize(strided, one(1.0))
    assert torch.equal(got[0], fp4) and torch.equal(got[1], scales)
    wide = torch.zeros(3, 32, dtype=torch.uint8)
    wide[:, ::2] = fp4
    assert torch.equal(nvfp4_kv_dequantize(wide[:, ::2], scales, one(1.0)), nvfp4_kv_dequantize(fp4, scales, one(1.0)))
    none = nvfp4_kv_quantize(x[:0], one(1.0))
    assert none[0].shape == (0, 32) and nvfp4_kv_dequantize(*none, one(1.0)).shape == (0, 64)


def stored(value: Tensor, cache: Tensor, scales: Tensor, global_scale: float) -> None:
    """A cache entry holds what the rows of `value` quantise to."""
    fp4, sf = nvfp4_kv_quantize(value.reshape(-1, value.shape[-1]), one(global_scale))
    assert torch.equal(cache.reshape(fp4.shape), fp4)
    assert torch.equal(scales.reshape(sf.shape).view(torch.uint8), sf)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["pair", "one"])
@pytest.mark.parametrize("sf_dtype", [F8, torch.uint8])
@pytest.mark.parametrize("way", ["table", "slots"])
def test_append(layout: str, form: str, sf_dtype: torch.dtype, way: str) -> None:
    """Both ways to name a place write packed values and scales there, and drop padding."""
    shape = (5, 2, 3, 2) if layout == "NHD" else (5, 2, 2, 3)  # 5 pages of 3 tokens, 2 heads
    cache, scales = torch.zeros(*shape, 16, dtype=torch.uint8), torch.zeros(*shape, 2).to(sf_dtype)
    caches = (cache, scales) if form == "one" else tuple((t[:, 0].clone(), t[:, 1].clone()) for t in (cache, scales))
    k, v = rows(4, 2, 32, seed=1, dtype=torch.bfloat16), rows(4, 2, 32, seed=2, dtype=torch.bfloat16)
    places = [(3, 2), (0, 0), None, (4, 1)]
    if way == "table":
        table = (torch.tensor([3, 0, 4]), torch.tensor([0, 2, 3]), torch.tensor([1, 2]))
        batch, positions = torch.tensor([0, 0, -1, 1]), torch.tensor([2, 3, 9, 1])
        nvfp4_quantize_append_paged_kv_cache(k, v, batch, positions, *caches, *table, 0.5, one(2.0), kv_layout=layout)
    else:
        slots = torch.tensor([11, 0, -1, 13])
        more = (torch.cat((k, k[:1])), torch.cat((v, v[:1])))  # rows past the slots are padding of the engine's
        nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(*more, slots, *caches, 0.5, 2.0, layout)
    views = [paged_views(c, layout) for c in caches]
    for part, (value, scale) in enumerate(((k, 0.5), (v, 2.0))):
        for t, place in enumerate(places):
            if place is not None:
                stored(value[t], views[0][part][place], views[1][part][place], scale)
        assert int((views[0][part].flatten(2) != 0).any(-1).sum()) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_append_mla(dtype: torch.dtype) -> None:
    ckv, kpe = rows(3, 32, dtype=dtype), rows(3, 8, seed=1, dtype=dtype)
    kpe[0, 0] = 6e4
    ckv_cache, sf = torch.zeros(4, 2, 16, dtype=torch.uint8), torch.zeros(4, 2, 2).to(F8)
    kpe_cache = torch.zeros(4, 2, 8).to(F8)
    table = (torch.tensor([2, 1]), torch.tensor([0, 1, 2]), torch.tensor([2, 1]))
    batch, positions = torch.tensor([0, -1, 1]), torch.tensor([1, 0, 0])
    nvfp4_quantize_append_paged_mla_kv_cache(
        ckv, kpe, batch, positions, ckv_cache, sf, kpe_cache, *table, 0.5, one(0.25)
    )
    for t, place in ((0, (2, 1)), (2, (1, 0))):
        stored(ckv[t], ckv_cache[place], sf[place], 0.5)
        want = (kpe[t].float() / 0.25).clamp(-448, 448).to(F8)
        assert torch.equal(kpe_cache[place].float(), want.float())
    assert int((kpe_cache.float() != 0).any(-1).sum()) == 2


def test_compiles_in_one_graph() -> None:
    x, caches = rows(2, 1, 16), [torch.zeros(2, 2, 1, 1, n, dtype=torch.uint8) for n in (8, 1)]

    def step(x: Tensor, cache: Tensor, sf: Tensor) -> Tensor:
        nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(x, x, torch.tensor([1, 0]), cache, sf, 1.0, 1.0)
        return nvfp4_kv_dequantize(*nvfp4_kv_quantize(x[:, 0], one(1.0)), one(1.0))

    copies = [c.clone() for c in caches]
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(x, *caches)
    assert torch.equal(got, step(x, *copies))
    assert all(map(torch.equal, caches, copies)) and caches[0].any()


def test_wrong_arguments() -> None:
    x, fp4 = rows(2, 32), torch.zeros(2, 16, dtype=torch.uint8)
    for error, args, text in (
        (ValueError, (x[:, :24], one(1.0)), "input has shape [2, 24], it must be [rows, a multiple of 16]; pad it"),
        (TypeError, (x.int(), one(1.0)), "input is int32, use float16, bfloat16 or float32"),
        (
            ValueError,
            (x, torch.ones(2)),
            "global_scale has shape [2], float32 on cpu; it must be one float32 value on cpu",
        ),
        (ValueError, (x, one(1.0).double()), "global_scale has shape [1], float64"),
        (NoKernelError, (x.clone().requires_grad_(), one(1.0)), "no gradient"),
    ):
        nvfp4_kv_quantize(x, one(1.0))
        with pytest.raises(error) as raised:
            nvfp4_kv_quantize(*args)
        assert text in str(raised.value)
    for error, args, text in (
        (
            ValueError,
            (fp4, fp4[:, :3], one(1.0)),
            "fp4_data has shape [2, 16], block_scales [2, 3]; give [rows, dim / 2]",
        ),
        (ValueError, (fp4, fp4[:1, :2], one(1.0)), "fp4_data has 2 rows, block_scales 1; make them equal"),
        (TypeError, (fp4.int(), fp4[:, :2], one(1.0)), "fp4_data is int32, block_scales uint8"),
        (TypeError, (fp4, fp4[:, :2], one(1.0), F8), "output_dtype is float8_e4m3fn, use float16"),
    ):
        with pytest.raises(error) as raised:
            nvfp4_kv_dequantize(*args)
        assert text in str(raised.value)


def test_wrong_append_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    k = rows(1, 1, 32)
    cache, sf = torch.zeros(2, 2, 2, 1, 16, dtype=torch.uint8), torch.zeros(2, 2, 2, 1, 2).to(F8)

    def call(k: Tensor = k, cache: Tensor = cache, sf: Tensor = sf, scale: Tensor | float = 1.0, slot: int = 0) -> None:
        slots = torch.tensor([slot])
        nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(k, k, slots, cache, sf, scale, 1.0)

    call()
    for error, kwargs, text in (
        (TypeError, {"k": k.int()}, "append_key is int32, use float16, bfloat16 or float32"),
        (TypeError, {"cache": cache.float()}, "the cache of append_key is float32 with float8_e4m3fn scales, NVFP4 is"),
        (ValueError, {"k": k[..., :24]}, "append_key has last dim 24, it must be a multiple of 16; pad it"),
        (
            ValueError,
            {"k": k[..., :16]},
            "append_key has shape [1, 1, 16], its cache [1, 16] an entry; make them [1, 8]",
        ),
        (ValueError, {"sf": sf[:1]}, "has [2, 2] as [pages, page_size], its scales [1, 2]; make them equal"),
        (ValueError, {"scale": torch.ones(2)}, "k_scale has shape [2], float32 on cpu; it must be one float32 value"),
        (ValueError, {"k": k[:0]}, "slot_mapping has shape [1], there are 0 keys and 0 values"),
        (NoKernelError, {"k": k.clone().requires_grad_()}, "no gradient"),
    ):
        with pytest.raises(error) as raised:
            call(**kwargs)
        assert text in str(raised.value)
    monkeypatch.setenv("KERNELMUX_CHECK", "1")
    kernelmux.reload()
    call(slot=3)
    with pytest.raises(ValueError, match=r"slot_mapping\[0\] is 4, the cache has 4 entries; correct the slots"):
        call(slot=4)
