"""rope_quantize_fp8_append_paged_kv_cache: RoPE from a table, 8-bit floats, and the write to a paged cache."""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kernelmux.capabilities import Request, dtype_name
from kernelmux.dispatch.arguments import check_fp8, needs_grad, refuse_grad, shape_error
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.page.cache import LAYOUTS, paged_views
from kernelmux.dispatch.page.check import check_page_metadata
from kernelmux.dispatch.rope import quantize_reference as reference
from kernelmux.dispatch.rope.cos_sin_cache import check_positions
from kernelmux.dispatch.rope.quantize_check import DIMS, FEATURES, ROLES, facts, quantize_request, still

OP = "rope_quantize_fp8_append_paged_kv_cache"
Pair = tuple[Tensor, Tensor]
_PER_TOKEN = ("pos_ids", "batch_indices", "positions")


def _describe(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    v: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    is_neox: bool,
    quant_scale_q: float,
    quant_scale_kv: float,
    q_rope_out: Tensor | None,
    q_nope_out: Tensor | None,
) -> Request:
    check_fp8(OP, "paged_kv_cache", k_cache.dtype)
    parts = {"q_rope": q_rope, "k_rope": k_rope, "q_nope": q_nope, "k_nope": k_nope} | ({} if v is None else {"v": v})
    indices = {"pos_ids": pos_ids, "kv_indices": kv_indices, "kv_indptr": kv_indptr}
    indices |= {"batch_indices": batch_indices, "positions": positions}
    outs = {"q_rope_out": q_rope_out, "q_nope_out": q_nope_out}
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    request = quantize_request(OP, parts, cos_sin_cache, indices, is_neox, k_cache.dtype, outs, caches, _PER_TOKEN)
    _check_caches(k_rope, k_nope, v, k_cache, v_cache)
    return request


def _check_caches(k_rope: Tensor, k_nope: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor) -> None:
    if k_rope.ndim != (2 if v is None else 3):
        want = "[tokens, rope_dim]" if v is None else "[tokens, heads, rope_dim]"
        raise shape_error(OP, "k_rope", k_rope, want, "v is None for multi-head latent attention, and only there")
    nope = 0 if k_nope is None else k_nope.shape[-1]
    heads = [] if v is None else [k_rope.shape[1]]
    if v is None:
        wanted = (nope, k_rope.shape[-1])
    else:
        wanted = (k_rope.shape[-1] + nope, v.shape[-1])
        if v.ndim != 3 or v.shape[1] != k_rope.shape[1]:
            raise shape_error(OP, "v", v, ["tokens", *heads, "head_dim"], "give it the heads of k_rope")
    for cache, width in zip((k_cache, v_cache), wanted, strict=True):
        if list(cache.shape[2:]) != [*heads, width]:
            form = ["pages", "page_size", *heads, width]
            raise shape_error(OP, "paged_kv_cache", cache, form, "this is its NHD form; make it fit the parts")
    if k_cache.shape[:2] != v_cache.shape[:2]:
        got = f"{list(k_cache.shape[:2])} and {list(v_cache.shape[:2])}"
        raise ValueError(f"{OP}: caches have [pages, page_size] of {got}; give both the same pages")
    if k_cache.dtype != v_cache.dtype:
        raise TypeError(
            f"{OP}: caches are {dtype_name(k_cache.dtype)} and {dtype_name(v_cache.dtype)}; make them equal"
        )


def _check(*args: Any) -> None:
    cache, pos_ids, k_cache, kv_indices, kv_indptr, batch, positions = (args[i] for i in (5, 6, 7, 9, 10, 11, 12))
    check_positions(pos_ids, cache)
    size = k_cache.shape[:2]
    check_page_metadata(size[0], size[1], kv_indptr, kv_indices, batch_indices=batch, positions=positions)


ROPE_QUANTIZE_FP8_APPEND = Op(
    OP, "rope", reference.rope_quantize_fp8_append_paged_kv_cache, _describe,
    growing=("tokens",), dims=(*DIMS, "page_size", "head_dim_vo"), roles=ROLES,
    features=(*FEATURES, "kv_strides_differ"), check=_check, in_place=True,
    schema="(Tensor q_rope, Tensor k_rope, Tensor? q_nope, Tensor? k_nope, Tensor? v, Tensor cos_sin_cache, "
    "Tensor pos_ids, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor kv_indices, Tensor kv_indptr, "
    "Tensor batch_indices, Tensor positions, bool is_neox, float quant_scale_q, float quant_scale_kv, "
    "Tensor(c!) q_rope_out, Tensor(d!) q_nope_out) -> ()",
)  # fmt: skip


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    v: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
) -> Pair:
    """Rotate, scale and round queries, keys and values to 8-bit floats, and write keys and values to a paged cache.

    Queries are made as by `rope_quantize_fp8`. A token's key is its rope part, then its nope part; its value is v *
    quant_scale_kv. Token t goes to page kv_indices[kv_indptr[b] + positions[t] // page_size], entry positions[t] %
    page_size, with b = batch_indices[t]; one with b = -1 is padding and is not written.

    Args:
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox: as in `rope_quantize_fp8`.
        v: [tokens, num_kv_heads, head_dim_vo]; None for multi-head latent attention, with 2-D k_rope and k_nope.
        paged_kv_cache: with v, the keys and values in any form that `append_paged_kv_cache` takes; without v the pair
            (ckv_cache [pages, page_size, nope_dim], kpe_cache [pages, page_size, rope_dim]). Written in place.
        kv_indices, kv_indptr, batch_indices, positions: int32 or int64; the page table and the tokens' places in it,
            as in `append_paged_kv_cache`.
        quantize_dtype: None, or the caches' dtype, float8_e4m3fn or float8_e5m2.
        quant_scale_q, quant_scale_kv: what queries, and keys and values, are multiplied by.
        page_size: that of the caches.
        kv_layout: "NHD" or "HND".
        q_rope_out, q_nope_out: None, or where to write, of the inputs' shapes.
        enable_pdl: accepted for compatibility; it changes no result.

    Returns:
        (q_rope, q_nope): the outputs given, or new tensors; q_nope None gives one of width 0.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together, or a cache not in float32.
        NoKernelError: when an input requires grad.

    Source: FlashInfer's `rope_quantize_fp8_append_paged_kv_cache`.

    >>> import torch
    >>> q, k, v = torch.ones(1, 2, 2), torch.ones(1, 1, 2), torch.full((1, 1, 2), 3.0)
    >>> cache, zero = torch.zeros(4, 2, 16, 1, 2, dtype=torch.float8_e4m3fn), torch.tensor([0])
    >>> made = rope_quantize_fp8_append_paged_kv_cache(
    ...     q, k, None, None, v, torch.tensor([[0.0, 1.0]]), zero, cache, torch.tensor([3]), torch.tensor([0, 1]),
    ...     zero, torch.tensor([5]))
    >>> made[0][0].tolist(), cache[3, :, 5].float().flatten().tolist()
    ([[-1.0, 1.0], [-1.0, 1.0]], [-1.0, 1.0, 3.0, 3.0])
    """
    k_cache, v_cache = _caches(paged_kv_cache, v, kv_layout)
    if k_cache.shape[1] != page_size:
        raise ValueError(f"{OP}: page_size is {page_size}, the caches have {k_cache.shape[1]}; pass page_size of them")
    if quantize_dtype is not None and quantize_dtype is not k_cache.dtype:
        got, want = dtype_name(quantize_dtype), dtype_name(k_cache.dtype)
        raise TypeError(f"{OP}: quantize_dtype is {got}, the caches are {want}; make them equal")
    args = (
        q_rope, k_rope, q_nope, k_nope, v, cos_sin_cache, pos_ids, k_cache, v_cache, kv_indices, kv_indptr,
        batch_indices, positions, is_neox, float(quant_scale_q), float(quant_scale_kv),
    )  # fmt: skip
    if not is_compiling():
        return _run(*args, q_rope_out, q_nope_out)
    refuse_grad(OP, q_rope, k_rope, q_nope, k_nope, v)
    rest = q_rope[..., :0] if q_nope is None else q_nope
    q_rope_out = q_rope.new_empty(q_rope.shape, dtype=k_cache.dtype) if q_rope_out is None else q_rope_out
    q_nope_out = rest.new_empty(rest.shape, dtype=k_cache.dtype) if q_nope_out is None else q_nope_out
    torch.ops.kernelmux.rope_quantize_fp8_append_paged_kv_cache(*args, q_rope_out, q_nope_out)
    return q_rope_out, q_nope_out


def _caches(paged_kv_cache: Any, v: Tensor | None, kv_layout: str) -> Pair:
    """Both caches as views [pages, page_size, heads, dim]; [pages, page_size, dim] without v."""
    if v is not None:
        return paged_views(paged_kv_cache, kv_layout)
    if kv_layout not in LAYOUTS:
        raise ValueError(f"{OP}: kv_layout is {kv_layout!r}, it must be 'NHD' or 'HND'")
    if not isinstance(paged_kv_cache, tuple | list) or len(paged_kv_cache) != 2:
        raise TypeError(f"{OP}: paged_kv_cache is a {type(paged_kv_cache).__name__}, it must be (ckv_cache, kpe_cache)")
    ckv, kpe = paged_kv_cache
    for cache in (ckv, kpe):
        if cache.ndim != 3:
            raise shape_error(OP, "paged_kv_cache", cache, "[pages, page_size, dim]", "v is None: give MLA caches")
    return ckv, kpe


def _run(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    v: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    is_neox: bool,
    quant_scale_q: float,
    quant_scale_kv: float,
    q_rope_out: Tensor | None,
    q_nope_out: Tensor | None,
) -> Pair:
    op, tokens = ROPE_QUANTIZE_FP8_APPEND, q_rope.shape[0]
    indices = [t.contiguous() for t in (pos_ids, kv_indices, kv_indptr, batch_indices, positions)]
    pos_ids, kv_indices, kv_indptr, batch_indices, positions = indices
    key = (
        facts(q_rope, tokens), facts(k_rope, tokens), facts(q_nope, tokens), facts(k_nope, tokens), facts(v, tokens),
        still(cos_sin_cache), still(k_cache), still(v_cache), k_cache.shape[0] == v_cache.shape[0], is_neox,
        *[(t.dtype, t.device, t.ndim) for t in indices], facts(q_rope_out, tokens), facts(q_nope_out, tokens),
        pos_ids.numel() == batch_indices.numel() == positions.numel() == tokens,
        needs_grad(q_rope, k_rope, q_nope, k_nope, v), op.bucket(tokens), PREFER.get(),
    )  # fmt: skip
    args = (
        q_rope, k_rope, q_nope, k_nope, v, cos_sin_cache, pos_ids, k_cache, v_cache, kv_indices, kv_indptr,
        batch_indices, positions, is_neox, quant_scale_q, quant_scale_kv, q_rope_out, q_nope_out,
    )  # fmt: skip
    run = op.cache.get(key) or op.pick(key, args)
    return run(*args)  # type: ignore[no-any-return]


def _eager(*args: Any) -> None:
    _run(*args)


ROPE_QUANTIZE_FP8_APPEND.eager = _eager
