"""single_decode_with_kv_cache and BatchDecodeWithPagedKVCacheWrapper."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from compare.case import Case, Results, Side
from compare.kv import BF16, paged

KV_LENS = (37, 1, 300, 64)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def single(
    side: Side, kv_len: int = 300, heads: tuple[int, int] = (8, 2), dim: int = 128, layout: str = "NHD", **kwargs: Any
) -> Results:
    q = side.rand(heads[0], dim, seed=1).mul(2).to(BF16)
    k, v = (side.rand(kv_len, heads[1], dim, seed=s, dtype=BF16) for s in (2, 3))
    if layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    out, lse = side.single_decode_with_kv_cache(q, k, v, kv_layout=layout, return_lse=True, **kwargs)
    return {"out": out, "lse": lse}


def batch(
    side: Side,
    kv_lens: Sequence[int] = KV_LENS,
    q_len: int = 1,
    tensor_cores: bool = False,
    plan: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    backend: str = "fa2",
    scales_as_tensors: bool = False,
    **form: Any,
) -> Results:
    p = paged(side, [q_len] * len(kv_lens), kv_lens, **form)
    layout = form.get("layout", "NHD")
    wrapper = side.BatchDecodeWithPagedKVCacheWrapper(
        side.workspace(), layout, use_tensor_cores=tensor_cores, **side.backend(backend)
    )
    options: dict[str, Any] = {"q_data_type": p.q.dtype, "kv_data_type": p.k.dtype, **(plan or {})}
    if q_len > 1:
        options["q_len_per_req"] = q_len
    wrapper.plan(*p.table, *p.heads, p.dim, p.page_size, **options)
    given = dict(run or {})
    if scales_as_tensors:
        given = {name: torch.tensor(value, device=side.device) for name, value in given.items()}
    out, lse = wrapper.run(p.q, p.cache, return_lse=True, **given)
    return {"out": out, "lse": lse}


def _single_cases() -> list[Case]:
    def case(features: str, module: str = "single-decode", **kwargs: Any) -> Case:
        return Case("single_decode_with_kv_cache", features, module, "attention", partial(single, **kwargs))

    return [
        case("GQA 8/2 NHD"),
        case("MQA 8/1 HND", heads=(8, 1), layout="HND"),
        case("sm_scale, q_scale, k_scale, v_scale", sm_scale=0.1, q_scale=0.7, k_scale=1.3, v_scale=0.5),
        case("kv_len 1", kv_len=1),
        case("tensor cores", "single-prefill", use_tensor_cores=True),
    ]


def cases() -> list[Case]:
    def case(features: str, module: str = "decode", kind: str = "attention", **kwargs: Any) -> Case:
        return Case("BatchDecodeWithPagedKVCacheWrapper", features, module, kind, partial(batch, **kwargs))

    cores = partial(case, tensor_cores=True)
    scales = {"q_scale": 0.7, "k_scale": 1.3, "v_scale": 0.5}
    return [
        *_single_cases(),
        case("MHA 4/4 NHD tuple page 16", heads=(4, 4)),
        case("GQA 8/2 NHD single page 16", form="single"),
        case("MQA 8/1 HND tuple page 16", heads=(8, 1), layout="HND"),
        case("GQA 8/2 HND single page 16", layout="HND", form="single"),
        case("GQA 8/2 page 1", page_size=1),
        case("GQA 8/2 page 1 without a page dimension", page_size=1, form="flat"),
        case("empty sequences", kv_lens=(0, 37, 0, 5)),
        case("sm_scale at plan", plan={"sm_scale": 0.05}),
        case("q_scale, k_scale, v_scale", run=scales),
        case("ALIBI", "decode-alibi", plan={"pos_encoding_mode": "ALIBI"}),
        case("ALIBI, 12 heads", "decode-alibi", heads=(12, 4), plan={"pos_encoding_mode": "ALIBI"}),
        case(
            "ROPE_LLAMA, rope_scale 2, rope_theta 5e4",
            "decode-rope",
            "attention approx",
            plan={"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 5e4},
        ),
        case("ROPE_LLAMA defaults", "decode-rope", "attention approx", plan={"pos_encoding_mode": "ROPE_LLAMA"}),
        case(
            "window_left 30 and soft cap 8",
            "decode-window-cap",
            "attention approx",
            plan={"window_left": 30, "logits_soft_cap": 8.0},
        ),
        case("fp8 KV, k_scale, v_scale", "decode-fp8", kv_dtype=E4M3, run={"k_scale": 0.8, "v_scale": 1.7}),
        case("fp8 KV without scales", "decode-fp8", kv_dtype=E4M3),
        case("head_dim 64", "decode-64", dim=64),
        case("head_dim 256", "decode-256", dim=256),
        cores("tensor cores, GQA 28/4", "prefill", heads=(28, 4)),
        cores("tensor cores, GQA 5/1 page 1", "prefill", heads=(5, 1), page_size=1),
        cores("tensor cores, empty sequences", "prefill", kv_lens=(0, 37, 0, 5)),
        cores("tensor cores, q_len_per_req 3", "prefill", q_len=3, kv_lens=(37, 3, 300, 64)),
        cores("tensor cores, fixed_split_size 2", "prefill", plan={"fixed_split_size": 2}),
        cores("tensor cores, disable_split_kv", "prefill", plan={"disable_split_kv": True}),
        cores("tensor cores, q_scale, k_scale, v_scale", "prefill", run=scales),
        cores("tensor cores, scales as tensors", "prefill", run=scales, scales_as_tensors=True),
        cores("tensor cores, window_left 30", "prefill-window", plan={"window_left": 30}),
        cores(
            "tensor cores, window_left 4, q_len_per_req 3",
            "prefill-window",
            q_len=3,
            kv_lens=(37, 3, 300, 64),
            plan={"window_left": 4},
        ),
        cores("tensor cores, ALIBI", "prefill-alibi", plan={"pos_encoding_mode": "ALIBI"}),
        cores("tensor cores, soft cap 8", "prefill-cap", "attention approx", plan={"logits_soft_cap": 8.0}),
    ]
