"""Attention of one sequence against the formula."""

import math
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelmux
from kernelmux import (
    packbits,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from kernelmux.dispatch.attention import single_plan

naive = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("naive_attention.py"))))
attend, close = naive.attend, naive.close


def tensors(
    q_len: int = 5, kv_len: int = 7, dims: tuple[int, int] = (16, 16), dtype: Any = torch.float32
) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((q_len, 4, dims[0]), (kv_len, 2, dims[0]), (kv_len, 2, dims[1]))
    return [torch.randn(s, generator=g).to(dtype) for s in shapes]


OPTIONS = [
    ({}, {}),
    ({"window_left": 2}, {"window": 2}),
    ({"logits_soft_cap": 1.5, "sm_scale": 0.5}, {"cap": 1.5, "scale": 0.5}),
    ({"pos_encoding_mode": "ALIBI"}, {"alibi": True}),
    ({"k_scale": 2.0}, {"scale": 0.5}),
]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("options", "formula"), OPTIONS)
def test_prefill(layout: str, options: dict[str, Any], formula: dict[str, Any]) -> None:
    q, k, v = tensors(dims=(16, 8))
    expected = attend(q, k, v, causal=True, **formula)
    if layout == "HND":
        k, v = (t.transpose(0, 1).contiguous() for t in (k, v))
    formula = dict(formula)
    out, lse = single_prefill_with_kv_cache(q, k, v, causal=True, kv_layout=layout, return_lse=True, **options)
    close(out, expected[0])
    close(lse, expected[1])
    close(single_prefill_with_kv_cache_return_lse(q, k, v, causal=True, kv_layout=layout, **options)[1], lse)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("options", "formula"), OPTIONS)
def test_decode(layout: str, options: dict[str, Any], formula: dict[str, Any]) -> None:
    q, k, v = tensors(1)
    expected = attend(q, k, v, **formula)
    if layout == "HND":
        k, v = (t.transpose(0, 1).contiguous() for t in (k, v))
    out, lse = single_decode_with_kv_cache(q[0], k, v, layout, return_lse=True, v_scale=3.0, **options)
    assert out.shape == (4, 16)
    assert lse.shape == (4,)
    close(out, expected[0][0] * 3)
    close(lse, expected[1][0])
    close(single_decode_with_kv_cache(q[0], k, v, layout, **options), expected[0][0])


@pytest.mark.parametrize("packed", [False, True])
def test_custom_masks(packed: bool) -> None:
    q, k, v = tensors()
    mask = torch.arange(35).reshape(5, 7) % 3 == 0
    given = {"packed_custom_mask": packbits(mask, "little"), "custom_mask": ~mask} if packed else {"custom_mask": mask}
    close(single_prefill_with_kv_cache(q, k, v, causal=True, **given), attend(q, k, v, mask=mask)[0])


def test_per_head_scales_and_output_dtypes() -> None:
    q, k, v = tensors()
    sq, sv = torch.tensor([1.0, 2.0, 0.5, 0.25]), torch.tensor([2.0, 0.5])
    expected = attend(q * sq[None, :, None], k, v * sv[None, :, None])[0]
    close(single_prefill_with_kv_cache(q, k, v, scale_q=sq, scale_v=sv), expected)
    f8 = [t.to(torch.float8_e4m3fn) for t in (q, k, v)]
    out = single_prefill_with_kv_cache(*f8, scale_q=sq, o_dtype="bfloat16", v_scale=torch.tensor(2.0))
    assert out.dtype == torch.bfloat16
    f32 = [t.float() for t in f8]
    close(out, attend(f32[0] * sq[None, :, None], *f32[1:])[0] * 2, 2e-2)
    assert single_prefill_with_kv_cache(*f8, v_scale=2.0).dtype == torch.float8_e4m3fn


def test_nvfp4_keys_and_values() -> None:
    from kernelmux.dispatch.quantization.nvfp4_kv_reference import unpack_nvfp4

    q = tensors(dims=(32, 32))[0]
    data = [torch.randint(0, 256, (7, 2, 16), dtype=torch.uint8) for _ in range(2)]
    sf = [(torch.rand(7, 2, 2) + 0.5).to(torch.float8_e4m3fn) for _ in range(2)]
    plain = [unpack_nvfp4(d, s, torch.float32) for d, s in zip(data, sf, strict=True)]
    close(single_prefill_with_kv_cache(q, *data, kv_cache_sf=tuple(sf)), attend(q, *plain)[0])
    with pytest.raises(ValueError, match="kv_cache_sf is None and k uint8"):
        single_prefill_with_kv_cache(q, *data)
    with pytest.raises(ValueError, match="kv_cache_sf is given and k float32"):
        single_prefill_with_kv_cache(q, *plain, kv_cache_sf=tuple(sf))


def test_fewer_keys_than_queries_and_none() -> None:
    q, k, v = tensors(5, 3)
    out, lse = single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
    assert (out[:2] == 0).all()
    assert (lse[:2] == -math.inf).all()
    close(out, attend(q, k, v, causal=True)[0])
    out, lse = single_decode_with_kv_cache(q[0], k[:0], v[:0], return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert single_prefill_with_kv_cache(q[:0], k, v).shape == (0, 4, 16)


def test_growing_keys_keep_few_plans() -> None:
    q, k, v = tensors(1, 7)
    for n in range(1, 8):
        close(single_decode_with_kv_cache(q[0], k[:n], v[:n]), attend(q, k[:n], v[:n])[0][0])
    for n in range(single_plan.KEPT + 5):
        single_decode_with_kv_cache(q[0], k[:1].expand(n + 1, 2, 16), v[:1].expand(n + 1, 2, 16))
    assert len(single_plan._recent) == single_plan.KEPT


def test_decisions_are_made_anew_after_reload() -> None:
    q, k, v = tensors()
    single_prefill_with_kv_cache(q, k, v)
    with kernelmux.track():  # reloads
        single_prefill_with_kv_cache(q, k, v)
    assert [use.calls for use in kernelmux.usage()] == [1]


def test_gradients() -> None:
    q, k, v = (t.double().requires_grad_() for t in tensors(2, 3, (4, 4)))
    assert torch.autograd.gradcheck(lambda *x: single_prefill_with_kv_cache(*x, causal=True), (q, k, v))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda q, k, v: single_decode_with_kv_cache(q, k, v),
            ValueError,
            r"q has shape \[5, 4, 16\], it must be \[num",
        ),
        (lambda q, k, v: single_prefill_with_kv_cache(q[0], k, v), ValueError, r"q has shape \[4, 16\]"),
        (lambda q, k, v: single_prefill_with_kv_cache(q, k[0], v), ValueError, r"k is \[2, 16\] and v \[7, 2, 16\]"),
        (lambda q, k, v: single_prefill_with_kv_cache(q, k[1:], v), ValueError, "all but the last dim must be equal"),
        (
            lambda q, k, v: single_prefill_with_kv_cache(q[:, :3], k, v),
            ValueError,
            "num_qo_heads is 3, it must be a mul",
        ),
        (lambda q, k, v: single_prefill_with_kv_cache(q, k.half(), v), ValueError, r"v is float32, planned is float16"),
        (lambda q, k, v: single_prefill_with_kv_cache(q, k, v, kv_layout="x"), ValueError, "kv_layout is 'x'"),
        (lambda q, k, v: single_prefill_with_kv_cache(q, k, v, backend="fa3"), kernelmux.SettingError, "FlashInfer's"),
        (lambda q, k, v: single_prefill_with_kv_cache(q, k, v, o_dtype="x"), TypeError, "o_dtype is 'x'"),
        (
            lambda q, k, v: single_prefill_with_kv_cache(q, k, v, custom_mask=torch.ones(5, 6, dtype=torch.bool)),
            ValueError,
            r"custom_mask has shape \[5, 6\], it must be \[5, 7\]",
        ),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(*tensors())


def test_a_named_backend_binds() -> None:
    q, k, v = tensors()
    close(single_prefill_with_kv_cache(q, k, v, backend="reference"), attend(q, k, v)[0])
