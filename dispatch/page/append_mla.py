"""append_paged_mla_kv_cache: write compressed keys of MLA into their pages."""

import torch
from torch import Tensor

from kernelmux.capabilities import Request
from kernelmux.dispatch.arguments import check_device, layout_features, needs_grad
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.page import reference
from kernelmux.dispatch.page.check import check_page_metadata
from kernelmux.dispatch.page.parts import check_part, check_tokens, part_key
from kernelmux.dispatch.page.positions import int32

_NAME = "append_paged_mla_kv_cache"


def _parts(
    append_ckv: Tensor | None, append_kpe: Tensor | None, ckv_cache: Tensor | None, kpe_cache: Tensor | None
) -> list[tuple[str, Tensor, Tensor]]:
    """The parts that have a cache, as (name, what is appended, cache)."""
    found = []
    for name, value, cache in (("append_ckv", append_ckv, ckv_cache), ("append_kpe", append_kpe, kpe_cache)):
        if cache is None:
            continue
        if value is None:
            raise ValueError(f"{_NAME}: {name} is None, its cache is given; pass both or none of them")
        if cache.ndim != 3 or value.ndim != 2:
            raise ValueError(
                f"{_NAME}: {name} has shape {list(value.shape)}, its cache {list(cache.shape)}; give [tokens, dim] and "
                "[pages, page_size, dim]"
            )
        found.append((name, value, cache))
    if not found:
        raise ValueError(f"{_NAME}: ckv_cache and kpe_cache are None, nothing can be written; pass at least one")
    return found


def _describe(
    append_ckv: Tensor | None,
    append_kpe: Tensor | None,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor | None,
    kpe_cache: Tensor | None,
    kv_indices: Tensor,
    kv_indptr: Tensor,
) -> Request:
    parts = _parts(append_ckv, append_kpe, ckv_cache, kpe_cache)
    first = parts[0][2]
    indices = {"batch_indices": batch_indices, "positions": positions, "kv_indices": kv_indices, "kv_indptr": kv_indptr}
    values = {name: value for name, value, _ in parts} | {f"the cache of {name}": cache for name, _, cache in parts}
    check_device(_NAME, first.device, values | indices)
    for name, value, cache in parts:
        check_part(_NAME, name, value, cache)
        if cache.shape[:2] != first.shape[:2]:
            raise ValueError(
                f"{_NAME}: the caches have {list(first.shape[:2])} and {list(cache.shape[:2])} as [pages, page_size]; "
                "make them equal"
            )
    tensors = [t for part in parts for t in part[1:]]
    return Request(
        op=_NAME,
        family="page",
        device=first.device,
        dtypes={n.removeprefix("append_"): c.dtype for n, _, c in parts},
        dims={"tokens": positions.shape[0], "page_size": first.shape[1]}
        | {f"{n.removeprefix('append_')}_dim": c.shape[2] for n, _, c in parts},
        features=frozenset(layout_features(*tensors) | ({"one_part"} if len(parts) == 1 else set())),
        empty=positions.shape[0] == 0,
        grad=needs_grad(*tensors),
    )


def _check(
    append_ckv: Tensor | None,
    append_kpe: Tensor | None,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor | None,
    kpe_cache: Tensor | None,
    kv_indices: Tensor,
    kv_indptr: Tensor,
) -> None:
    cache = ckv_cache if ckv_cache is not None else kpe_cache
    if cache is not None:
        size = cache.shape[:2]
        check_page_metadata(size[0], size[1], kv_indptr, kv_indices, batch_indices=batch_indices, positions=positions)


APPEND_PAGED_MLA_KV_CACHE = Op(
    _NAME,
    "page",
    reference.append_paged_mla_kv_cache,
    _describe,
    growing=("tokens",),
    dims=("page_size", "ckv_dim", "kpe_dim"),
    roles=("ckv", "kpe"),
    features=("inner_strided", "unaligned", "one_part"),
    schema="(Tensor? append_ckv, Tensor? append_kpe, Tensor batch_indices, Tensor positions, Tensor(a!)? ckv_cache, "
    "Tensor(b!)? kpe_cache, Tensor kv_indices, Tensor kv_indptr) -> ()",
    check=_check,
    in_place=True,
)


def append_paged_mla_kv_cache(
    append_ckv: Tensor | None,
    append_kpe: Tensor | None,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor | None,
    kpe_cache: Tensor | None,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Write the compressed keys of new tokens into a paged MLA cache, in place.

    Tokens are placed as in `append_paged_kv_cache`.

    Args:
        append_ckv, append_kpe: [tokens, ckv_dim] and [tokens, kpe_dim] (512 and 64 in DeepSeek models), any strides,
            of their caches' dtypes.
        batch_indices, positions: integer [tokens], from `get_batch_indices_positions`; batch index -1 = dropped.
        ckv_cache, kpe_cache: [pages, page_size, ckv_dim] and [pages, page_size, kpe_dim], perhaps views of one
            buffer. None: this part is not written.
        kv_indices, kv_indptr: page ids, and the offsets [batch + 1] of each sequence's.
        kv_last_page_len: integer [batch]; not needed to place tokens, kept for compatibility.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.
        NoKernelError: when an input requires grad: the write is in place.

    Source: FlashInfer's `append_paged_mla_kv_cache`.

    >>> import torch
    >>> ckv, kpe = torch.zeros(2, 2, 4), torch.zeros(2, 2, 1)
    >>> append_paged_mla_kv_cache(
    ...     torch.ones(1, 4), torch.ones(1, 1), torch.tensor([0]), torch.tensor([1]), ckv, kpe, torch.tensor([1]),
    ...     torch.tensor([0, 1]), torch.tensor([2]))
    >>> ckv.sum(-1).tolist(), kpe.sum().item()
    ([[0.0, 0.0], [0.0, 4.0]], 1.0)
    """
    for part in (append_ckv, append_kpe):
        if part is not None:
            check_tokens(_NAME, part, None, batch_indices, positions)
    batch_indices, positions = int32(batch_indices, "batch_indices"), int32(positions, "positions")
    kv_indices, kv_indptr = int32(kv_indices, "kv_indices"), int32(kv_indptr, "kv_indptr")
    args = (append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr)
    if torch.compiler.is_compiling():
        torch.ops.kernelmux.append_paged_mla_kv_cache(*args)
    else:
        _append_paged_mla_kv_cache(*args)


def _append_paged_mla_kv_cache(
    append_ckv: Tensor | None,
    append_kpe: Tensor | None,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor | None,
    kpe_cache: Tensor | None,
    kv_indices: Tensor,
    kv_indptr: Tensor,
) -> None:
    args = (append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr)
    op = APPEND_PAGED_MLA_KV_CACHE
    key = (
        None if ckv_cache is None or append_ckv is None else part_key(append_ckv, ckv_cache),
        None if kpe_cache is None or append_kpe is None else part_key(append_kpe, kpe_cache),
        (append_ckv is None, append_kpe is None),
        (batch_indices.device, positions.device, kv_indices.device, kv_indptr.device),
        op.bucket(positions.shape[0]),
        PREFER.get(),
    )
    run = op.cache.get(key) or op.pick(key, args)
    run(*args)


APPEND_PAGED_MLA_KV_CACHE.eager = _append_paged_mla_kv_cache
