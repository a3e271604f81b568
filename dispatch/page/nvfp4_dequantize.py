"""nvfp4_kv_dequantize_paged: the pages of an NVFP4 cache as plain keys and values."""

import torch
from torch import Tensor

from kernelmux.capabilities import Request, dtype_name
from kernelmux.dispatch.arguments import (
    check_device,
    check_integers,
    check_writable,
    layout_features,
    needs_grad,
    shape_error,
)
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.page import nvfp4_reference as reference
from kernelmux.dispatch.page.cache import paged_views
from kernelmux.dispatch.page.nvfp4_parts import check_nvfp4_part, scale_tensor

_NAME = "nvfp4_kv_dequantize_paged"


def _describe(
    k_cache: Tensor,
    v_cache: Tensor,
    k_sf: Tensor,
    v_sf: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    output_k: Tensor,
    output_v: Tensor,
) -> Request:
    caches = {"k_cache": k_cache, "v_cache": v_cache, "scales of k_cache": k_sf, "scales of v_cache": v_sf}
    outputs = {"output_k": output_k, "output_v": output_v}
    check_device(_NAME, k_cache.device, {**caches, "block_tables": block_tables, "seq_lens": seq_lens, **outputs})
    check_integers(_NAME, {"block_tables": block_tables, "seq_lens": seq_lens})
    check_writable(_NAME, {**outputs})
    batch = seq_lens.numel()
    if seq_lens.ndim != 1 or block_tables.ndim != 2 or block_tables.shape[0] != batch:
        got = f"block_tables has shape {list(block_tables.shape)}, seq_lens {list(seq_lens.shape)}"
        raise ValueError(f"{_NAME}: {got}, they must be [batch, pages] and [batch]; give one row per sequence")
    for name, out, cache, scales in (("output_k", output_k, k_cache, k_sf), ("output_v", output_v, v_cache, v_sf)):
        if out.ndim != 4 or out.shape[0] != batch:
            raise shape_error(_NAME, name, out, f"[{batch}, max_seq_len, heads, head_dim]", "one entry per sequence")
        check_nvfp4_part(_NAME, name, out.flatten(0, 1), cache, scales)
    if output_k.dtype != output_v.dtype or output_k.shape[:3] != output_v.shape[:3]:
        got = (
            f"{list(output_k.shape)} {dtype_name(output_k.dtype)}, {list(output_v.shape)} {dtype_name(output_v.dtype)}"
        )
        raise ValueError(f"{_NAME}: output_k and output_v are {got}; give both one dtype and the same tokens and heads")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        got = f"{list(k_cache.shape)} and {list(v_cache.shape)} as [pages, page_size, heads, head_dim / 2]"
        raise ValueError(f"{_NAME}: caches are {got}; give keys and values the same pages and heads")
    features = layout_features(k_cache, v_cache, output_k, output_v)
    if k_cache.stride() != v_cache.stride():
        features.add("kv_strides_differ")
    return Request(
        op=_NAME,
        family="page",
        device=k_cache.device,
        dtypes={"out": output_k.dtype},
        dims={
            "batch": batch,
            "kv_len": output_k.shape[1],
            "page_size": k_cache.shape[1],
            "num_kv_heads": k_cache.shape[2],
            "head_dim": output_k.shape[3],
            "head_dim_vo": output_v.shape[3],
        },
        features=frozenset(features),
        empty=output_k.numel() + output_v.numel() == 0,
        grad=needs_grad(output_k, output_v),
    )


def _check(*args: Tensor) -> None:
    """Deep check: lengths fit the outputs and the page table, pages the cache. Reads them on the host."""
    k_cache, tables, lens, output_k = args[0], args[4].cpu().long(), args[5].cpu().long(), args[8]
    page_size, room = k_cache.shape[1], min(output_k.shape[1], tables.shape[1] * k_cache.shape[1])
    for row, n in enumerate(lens.tolist()):
        if not 0 <= n <= room:
            raise ValueError(
                f"{_NAME}: seq_lens[{row}] is {n}; the outputs have {output_k.shape[1]} tokens, block_tables "
                f"{tables.shape[1]} pages of {page_size}; correct it or make them larger"
            )
        pages = tables[row, : -(-n // page_size)]
        wrong = (pages < 0) | (pages >= k_cache.shape[0])
        if bool(wrong.any()):
            at = int(wrong.int().argmax())
            limit = f"the cache has pages 0..{k_cache.shape[0] - 1}"
            raise ValueError(f"{_NAME}: block_tables[{row}, {at}] is {int(pages[at])}, {limit}; correct the page table")


DEQUANTIZE_PAGED = Op(
    _NAME,
    "page",
    reference.nvfp4_kv_dequantize_paged,
    _describe,
    growing=("batch", "kv_len"),
    dims=("page_size", "num_kv_heads", "head_dim", "head_dim_vo"),
    roles=("out",),
    features=("inner_strided", "unaligned", "kv_strides_differ"),
    schema="(Tensor k_cache, Tensor v_cache, Tensor k_sf, Tensor v_sf, Tensor block_tables, Tensor seq_lens, "
    "Tensor k_scale, Tensor v_scale, Tensor(a!) output_k, Tensor(b!) output_v) -> ()",
    check=_check,
    in_place=True,
)


def nvfp4_kv_dequantize_paged(
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_cache_sf: Tensor | tuple[Tensor, Tensor],
    block_tables: Tensor,
    seq_lens: Tensor,
    k_scale: float | Tensor,
    v_scale: float | Tensor,
    output_k: Tensor,
    output_v: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write the keys and values of a paged NVFP4 cache, dequantised, into plain tensors, sequence by sequence.

    Token t of sequence b comes from place t % page_size of page block_tables[b, t // page_size]; each value is
    e2m1 * block scale * k_scale (or v_scale), rounded once. What lies at tokens of seq_lens[b] and later stays.

    Args:
        paged_kv_cache: uint8 in any form that `append_paged_kv_cache` takes, with a last dim of head_dim / 2.
        kv_cache_sf: block scales in the same form, last dim head_dim / 16, float8_e4m3fn or uint8 (its bytes).
        block_tables: integer [batch, pages], the pages of each sequence; those past its end are not looked at.
        seq_lens: integer [batch], tokens of each sequence. What does not fit into the outputs is left out, and
            KERNELMUX_CHECK=1 refuses it.
        k_scale, v_scale: the factors that quantising divided by, as floats or float32 tensors of one value.
        output_k, output_v: [batch, max_seq_len, num_kv_heads, head_dim] of one dtype: float16, bfloat16, float32 or
            float64.
        kv_layout: "NHD" or "HND", of the cache; the outputs are always tokens by heads.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.
        NoKernelError: when an output requires grad: the write is in place.

    Source: FlashInfer's `nvfp4_kv_dequantize_paged`.

    >>> import torch
    >>> cache = torch.full((3, 2, 1, 1, 8), 0x77, dtype=torch.uint8)  # 6 everywhere, pages of one token
    >>> scales = torch.full((3, 2, 1, 1, 1), 2.0).to(torch.float8_e4m3fn)
    >>> k, v = torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16)
    >>> nvfp4_kv_dequantize_paged(cache, scales, torch.tensor([[2, 0]]), torch.tensor([1]), 1.0, 0.5, k, v)
    >>> k[0, :, 0, 0].tolist(), v[0, :, 0, 0].tolist()
    ([12.0, 0.0], [6.0, 0.0])
    """
    k_cache, v_cache = paged_views(paged_kv_cache, kv_layout)
    k_sf, v_sf = paged_views(kv_cache_sf, kv_layout, "kv_cache_sf")
    scales = (scale_tensor(_NAME, name, s, k_cache.device) for name, s in (("k_scale", k_scale), ("v_scale", v_scale)))
    args = (k_cache, v_cache, k_sf, v_sf, block_tables, seq_lens, *scales, output_k, output_v)
    if torch.compiler.is_compiling():
        torch.ops.kernelmux.nvfp4_kv_dequantize_paged(*args)
    else:
        _dequantize(*args)


def _dequantize(*args: Tensor) -> None:
    output_k, output_v = args[8:]
    if output_k.ndim != 4:
        raise shape_error(_NAME, "output_k", output_k, "[batch, max_seq_len, heads, head_dim]", "reshape it")
    key = (
        tuple([(t.dtype, t.device, t.shape, t.stride(), t.data_ptr() & 15) for t in args[:4]]),
        tuple([(t.dtype, t.device, t.ndim) for t in args[4:6]]),
        tuple([(t.dtype, t.device, t.shape[2:], t.stride(), t.data_ptr() & 15) for t in (output_k, output_v)]),
        len({t.shape[:1] for t in args[4:6]} | {output_k.shape[:1]}) == 1 and output_k.shape[:2] == output_v.shape[:2],
        needs_grad(output_k, output_v),
        DEQUANTIZE_PAGED.bucket(output_k.shape[0], output_k.shape[1]),
        PREFER.get(),
    )
    run = DEQUANTIZE_PAGED.cache.get(key) or DEQUANTIZE_PAGED.pick(key, args)
    run(*args)


DEQUANTIZE_PAGED.eager = _dequantize
