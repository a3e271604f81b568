"""append_paged_kv_cache and append_paged_mla_kv_cache: write new keys and values into their pages."""

import torch
from torch import Tensor

from kernelmux.capabilities import Request
from kernelmux.dispatch.arguments import check_device, layout_features, needs_grad
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.page import reference
from kernelmux.dispatch.page.cache import paged_views
from kernelmux.dispatch.page.check import check_page_metadata
from kernelmux.dispatch.page.parts import check_part, check_tokens
from kernelmux.dispatch.page.positions import int32


def _describe(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
) -> Request:
    op = "append_paged_kv_cache"
    check_part(op, "append_key", append_key, k_cache)
    check_part(op, "append_value", append_value, v_cache)
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"{op}: caches are {list(k_cache.shape)} and {list(v_cache.shape)} as [pages, page_size, heads, dim]; "
            "give keys and values the same pages and heads"
        )
    indices = {"batch_indices": batch_indices, "positions": positions, "kv_indices": kv_indices, "kv_indptr": kv_indptr}
    values = {"append_key": append_key, "append_value": append_value, "v_cache": v_cache}
    check_device(op, k_cache.device, values | indices)
    features = layout_features(append_key, append_value, k_cache, v_cache)
    if k_cache.stride() != v_cache.stride():
        features.add("kv_strides_differ")
    return Request(
        op=op,
        family="page",
        device=k_cache.device,
        dtypes={"kv": k_cache.dtype},
        dims={
            "tokens": append_key.shape[0],
            "page_size": k_cache.shape[1],
            "num_kv_heads": k_cache.shape[2],
            "head_dim": k_cache.shape[3],
            "head_dim_vo": v_cache.shape[3],
        },
        features=frozenset(features),
        empty=append_key.numel() == 0,
        grad=needs_grad(append_key, append_value, k_cache, v_cache),
    )


def _check(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
) -> None:
    size = k_cache.shape[:2]
    check_page_metadata(size[0], size[1], kv_indptr, kv_indices, batch_indices=batch_indices, positions=positions)


APPEND_PAGED_KV_CACHE = Op(
    "append_paged_kv_cache",
    "page",
    reference.append_paged_kv_cache,
    _describe,
    growing=("tokens",),
    dims=("page_size", "num_kv_heads", "head_dim", "head_dim_vo"),
    roles=("kv",),
    features=("inner_strided", "unaligned", "kv_strides_differ"),
    schema="(Tensor append_key, Tensor append_value, Tensor batch_indices, Tensor positions, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor kv_indices, Tensor kv_indptr) -> ()",
    check=_check,
    in_place=True,
)


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write the keys and values of new tokens into a paged cache, in place.

    Token t goes to page kv_indices[kv_indptr[b] + positions[t] // page_size], entry positions[t] % page_size, with
    b = batch_indices[t]. The page table must hold the new tokens already. A token with b = -1 is padding and is
    dropped. Tokens may come in any order.

    Args:
        append_key, append_value: [tokens, num_kv_heads, head_dim] (values: head_dim_vo), any strides, of the cache's
            dtype: nothing is converted.
        batch_indices, positions: integer [tokens], from `get_batch_indices_positions`.
        paged_kv_cache: (k_cache, v_cache), each [pages, page_size, num_kv_heads, head_dim] ("NHD") or [pages,
            num_kv_heads, page_size, head_dim] ("HND"), or one tensor with keys and values along dim 1; one dim less
            means a page size of 1. Keys and values may have different strides.
        kv_indices: integer, page ids of all sequences. Entries that no token needs are not read.
        kv_indptr: integer [batch + 1], offsets into kv_indices.
        kv_last_page_len: integer [batch]; not needed to place tokens, kept for compatibility.
        kv_layout: "NHD" or "HND".

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.
        NoKernelError: when an input requires grad: the write is in place.

    Source: FlashInfer's `append_paged_kv_cache`.

    >>> import torch
    >>> cache = torch.zeros(4, 2, 2, 1, 1)  # 4 pages of 2 tokens, 1 head of 1 element
    >>> new = torch.tensor([7.0, 8.0]).view(2, 1, 1)
    >>> append_paged_kv_cache(
    ...     new, -new, torch.tensor([0, 0]), torch.tensor([1, 2]), cache, torch.tensor([3, 1]), torch.tensor([0, 2]),
    ...     torch.tensor([1]))
    >>> cache[3, 0].flatten().tolist(), cache[1, 0].flatten().tolist()
    ([0.0, 7.0], [8.0, 0.0])
    """
    k_cache, v_cache = paged_views(paged_kv_cache, kv_layout)
    check_tokens("append_paged_kv_cache", append_key, append_value, batch_indices, positions)
    batch_indices, positions = int32(batch_indices, "batch_indices"), int32(positions, "positions")
    kv_indices, kv_indptr = int32(kv_indices, "kv_indices"), int32(kv_indptr, "kv_indptr")
    args = (append_key, append_value, batch_indices, positions, k_cache, v_cache, kv_indices, kv_indptr)
    if torch.compiler.is_compiling():
        torch.ops.kernelmux.append_paged_kv_cache(*args)
    else:
        _append_paged_kv_cache(*args)


def _append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
) -> None:
    args = (append_key, append_value, batch_indices, positions, k_cache, v_cache, kv_indices, kv_indptr)
    op = APPEND_PAGED_KV_CACHE
    key = (  # flat: this is the hot path of every layer
        append_key.dtype,
        append_value.dtype,
        k_cache.dtype,
        v_cache.dtype,
        append_key.device,
        append_value.device,
        k_cache.device,
        v_cache.device,
        batch_indices.device,
        positions.device,
        kv_indices.device,
        kv_indptr.device,
        append_key.shape[1:],
        append_value.shape[1:],
        k_cache.shape,
        v_cache.shape,
        append_key.stride(),
        append_value.stride(),
        k_cache.stride(),
        v_cache.stride(),
        (append_key.data_ptr() | append_value.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()) & 15,
        torch.is_grad_enabled() and needs_grad(append_key, append_value, k_cache, v_cache),
        op.bucket(append_key.shape[0]),
        PREFER.get(),
    )
    run = op.cache.get(key) or op.pick(key, args)
    run(*args)


APPEND_PAGED_KV_CACHE.eager = _append_paged_kv_cache
