"""nvfp4_quantize_append_paged_mla_kv_cache: quantise compressed keys of MLA into their pages."""

import torch
from torch import Tensor

from kernelmux.capabilities import Request, dtype_name
from kernelmux.dispatch.arguments import check_device, layout_features, needs_grad
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.page import nvfp4_reference as reference
from kernelmux.dispatch.page.check import check_page_metadata
from kernelmux.dispatch.page.nvfp4_parts import INPUT_DTYPES, check_nvfp4_part, nvfp4_key, scale_tensor
from kernelmux.dispatch.page.parts import check_tokens, part_key
from kernelmux.dispatch.page.positions import int32

_NAME = "nvfp4_quantize_append_paged_mla_kv_cache"


def _describe(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor,
    ckv_sf: Tensor,
    kpe_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    ckv_scale: Tensor,
    kpe_scale: Tensor,
) -> Request:
    if append_ckv.ndim != 2 or append_kpe.ndim != 2 or ckv_cache.ndim != 3 or kpe_cache.ndim != 3:
        raise ValueError(
            f"{_NAME}: append_ckv has {append_ckv.ndim} dims, append_kpe {append_kpe.ndim}, their caches "
            f"{ckv_cache.ndim} and {kpe_cache.ndim}; give [tokens, dim] and [pages, page_size, dim]"
        )
    check_nvfp4_part(_NAME, "append_ckv", append_ckv, ckv_cache, ckv_sf)
    _check_kpe(append_kpe, kpe_cache, ckv_cache)
    named = {"append_ckv": append_ckv, "append_kpe": append_kpe, "ckv_sf_cache": ckv_sf, "kpe_cache": kpe_cache}
    indices = {"batch_indices": batch_indices, "positions": positions, "kv_indices": kv_indices, "kv_indptr": kv_indptr}
    check_device(_NAME, ckv_cache.device, named | indices)
    return Request(
        op=_NAME,
        family="page",
        device=ckv_cache.device,
        dtypes={"input": append_ckv.dtype, "kpe": append_kpe.dtype},
        dims={
            "tokens": append_ckv.shape[0],
            "page_size": ckv_cache.shape[1],
            "ckv_dim": append_ckv.shape[1],
            "kpe_dim": append_kpe.shape[1],
        },
        features=frozenset(layout_features(append_ckv, append_kpe, ckv_cache, kpe_cache)),
        empty=append_ckv.shape[0] == 0,
        grad=needs_grad(append_ckv, append_kpe),
    )


def _check_kpe(append_kpe: Tensor, kpe_cache: Tensor, ckv_cache: Tensor) -> None:
    if append_kpe.dtype not in INPUT_DTYPES or kpe_cache.dtype != torch.float8_e4m3fn:
        raise TypeError(
            f"{_NAME}: append_kpe is {dtype_name(append_kpe.dtype)}, its cache {dtype_name(kpe_cache.dtype)}; "
            "give float16, bfloat16 or float32, and a float8_e4m3fn cache"
        )
    if kpe_cache.shape[2] != append_kpe.shape[1] or kpe_cache.shape[:2] != ckv_cache.shape[:2]:
        raise ValueError(
            f"{_NAME}: kpe_cache has shape {list(kpe_cache.shape)}, it must be "
            f"{[*ckv_cache.shape[:2], append_kpe.shape[1]]} beside this ckv_cache and append_kpe"
        )


def _check(*args: Tensor) -> None:
    _, _, batch_indices, positions, ckv_cache, _, _, kv_indices, kv_indptr, _, _ = args
    size = ckv_cache.shape[:2]
    check_page_metadata(size[0], size[1], kv_indptr, kv_indices, batch_indices=batch_indices, positions=positions)


APPEND = Op(
    _NAME,
    "page",
    reference.nvfp4_quantize_append_paged_mla_kv_cache,
    _describe,
    growing=("tokens",),
    dims=("page_size", "ckv_dim", "kpe_dim"),
    roles=("input", "kpe"),
    features=("inner_strided", "unaligned"),
    schema="(Tensor append_ckv, Tensor append_kpe, Tensor batch_indices, Tensor positions, Tensor(a!) ckv_cache, "
    "Tensor(b!) ckv_sf, Tensor(c!) kpe_cache, Tensor kv_indices, Tensor kv_indptr, Tensor ckv_scale, "
    "Tensor kpe_scale) -> ()",
    check=_check,
    in_place=True,
)


def nvfp4_quantize_append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor,
    ckv_sf_cache: Tensor,
    kpe_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    ckv_scale: float | Tensor,
    kpe_scale: float | Tensor,
) -> None:
    """Quantise the compressed keys of new tokens into a paged MLA cache, in place: ckv to NVFP4, kpe to E4M3.

    Tokens are placed as in `append_paged_kv_cache`; ckv ~ e2m1 * block scale * ckv_scale with a scale for 16 elements,
    kpe ~ e4m3 * kpe_scale, saturated.

    Args:
        append_ckv, append_kpe: [tokens, ckv_dim] and [tokens, kpe_dim] (512 and 64 in DeepSeek models), float16,
            bfloat16 or float32; ckv_dim is a multiple of 16.
        batch_indices, positions: integer [tokens], from `get_batch_indices_positions`; batch index -1 = dropped.
        ckv_cache: uint8 [pages, page_size, ckv_dim / 2].
        ckv_sf_cache: [pages, page_size, ckv_dim / 16], float8_e4m3fn or uint8 (its bytes).
        kpe_cache: float8_e4m3fn [pages, page_size, kpe_dim].
        kv_indices, kv_indptr: page ids, and the offsets [batch + 1] of each sequence's.
        kv_last_page_len: integer [batch]; not needed to place tokens, kept for compatibility.
        ckv_scale, kpe_scale: dequantisation factors, as floats or float32 tensors of one value.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.
        NoKernelError: when an input requires grad: the write is in place.

    Source: FlashInfer's `nvfp4_quantize_append_paged_mla_kv_cache`.

    >>> import torch
    >>> ckv, scales = torch.zeros(1, 1, 8, dtype=torch.uint8), torch.zeros(1, 1, 1, dtype=torch.float8_e4m3fn)
    >>> kpe, at = torch.zeros(1, 1, 2, dtype=torch.float8_e4m3fn), torch.tensor([0])
    >>> nvfp4_quantize_append_paged_mla_kv_cache(
    ...     torch.full((1, 16), 12.0), torch.ones(1, 2), at, at, ckv, scales, kpe, at, torch.tensor([0, 1]),
    ...     torch.tensor([1]), 1.0, 0.5)
    >>> scales.float().item(), kpe.float().flatten().tolist()
    (2.0, [2.0, 2.0])
    """
    check_tokens(_NAME, append_ckv, append_kpe, batch_indices, positions)
    args = (
        append_ckv,
        append_kpe,
        int32(batch_indices, "batch_indices"),
        int32(positions, "positions"),
        ckv_cache,
        ckv_sf_cache,
        kpe_cache,
        int32(kv_indices, "kv_indices"),
        int32(kv_indptr, "kv_indptr"),
        scale_tensor(_NAME, "ckv_scale", ckv_scale, ckv_cache.device),
        scale_tensor(_NAME, "kpe_scale", kpe_scale, ckv_cache.device),
    )
    if torch.compiler.is_compiling():
        torch.ops.kernelmux.nvfp4_quantize_append_paged_mla_kv_cache(*args)
    else:
        _append(*args)


def _append(*args: Tensor) -> None:
    append_ckv, append_kpe, batch_indices, positions, ckv_cache, ckv_sf, kpe_cache, kv_indices, kv_indptr, _, _ = args
    key = (
        nvfp4_key(append_ckv, ckv_cache, ckv_sf),
        part_key(append_kpe, kpe_cache),
        (batch_indices.device, positions.device, kv_indices.device, kv_indptr.device),
        APPEND.bucket(append_ckv.shape[0]),
        PREFER.get(),
    )
    run = APPEND.cache.get(key) or APPEND.pick(key, args)
    run(*args)


APPEND.eager = _append
