"""RoPE with cosines and sines from a table: apply_rope_with_cos_sin_cache and its in-place form."""

from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from kernelmux.capabilities import Request
from kernelmux.dispatch.arguments import needs_grad, refuse_grad, shape_error
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.rope import reference
from kernelmux.dispatch.rope.describe import DIMS, FEATURES, check_cache, check_counts, rope_request

Pair = tuple[Tensor, Tensor]


def _request(
    op: str,
    positions: Tensor,
    parts: dict[str, Tensor],
    head_size: int,
    cache: Tensor,
    is_neox: bool,
    outs: tuple[Tensor | None, ...] | None,
) -> Request:
    check_cache(op, cache)
    for name, part in parts.items():
        form = "[tokens, heads * head_size] or [tokens, heads, head_size]"
        if part.ndim not in (2, 3) or head_size < 1 or part.shape[-1] % head_size:
            raise shape_error(op, name, part, form, f"head_size is {head_size}")
        if part.ndim == 3 and part.shape[-1] != head_size:
            raise shape_error(op, name, part, form, f"head_size is {head_size}")
    features = {"heads_apart"} if any(p.ndim == 3 for p in parts.values()) else set()
    if cache.stride(1) != 1 or cache.data_ptr() % 16 or cache.stride(0) % 4:
        features.add("cache_strided")
    by_head = {name: _by_head(part, head_size) for name, part in parts.items()}
    indices = {"positions": positions}
    return rope_request(
        op, by_head, indices, head_size, cache.shape[1], not is_neox, outs, features=features, cache=cache
    )


def _by_head(x: Tensor, head_size: int) -> Tensor:
    """As the reference's, but with the stride of the first dim kept when that has one element: rows grow."""
    if x.ndim == 3:
        return x
    row, step = x.stride()
    return x.as_strided((x.shape[0], x.shape[1] // head_size, head_size), (row, head_size * step, step))


def _describe(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
) -> Request:
    parts, outs = {"query": query, "key": key}, (query_rope, key_rope)
    return _request("apply_rope_with_cos_sin_cache", positions, parts, head_size, cos_sin_cache, is_neox, outs)


def _describe_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> Request:
    parts = {"query": query, "key": key}
    return _request("apply_rope_with_cos_sin_cache_inplace", positions, parts, head_size, cos_sin_cache, is_neox, None)


def check_positions(positions: Tensor, cos_sin_cache: Tensor) -> None:
    """Deep check: every position has a row in the cache. Reads positions on the host."""
    limit = cos_sin_cache.shape[0]
    wrong = (positions < 0) | (positions >= limit)
    if bool(wrong.any()):
        at = int(wrong.int().argmax())
        raise ValueError(
            f"positions[{at}] is {int(positions[at])}, cos_sin_cache has positions 0..{limit - 1}; make it longer"
        )


def _check(positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, *rest: Any) -> None:
    check_positions(positions, cos_sin_cache)


_ROLES, _FEATURES = ("q", "k", "positions"), (*FEATURES, "heads_apart", "cache_strided")
WITH_CACHE = Op(
    "apply_rope_with_cos_sin_cache", "rope", reference.apply_rope_with_cos_sin_cache, _describe,
    growing=("tokens",), dims=DIMS, roles=_ROLES, features=_FEATURES, check=_check,
    schema="(Tensor positions, Tensor query, Tensor key, int head_size, Tensor cos_sin_cache, bool is_neox, "
    "Tensor(a!) query_rope, Tensor(b!) key_rope) -> ()",
)  # fmt: skip
WITH_CACHE_INPLACE = Op(
    "apply_rope_with_cos_sin_cache_inplace", "rope", reference.apply_rope_with_cos_sin_cache_inplace,
    _describe_inplace, growing=("tokens",), dims=DIMS, roles=_ROLES, features=_FEATURES, check=_check, in_place=True,
    schema="(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_size, Tensor cos_sin_cache, bool is_neox) "
    "-> ()",
)  # fmt: skip


def apply_rope_with_cos_sin_cache(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> Pair:
    """Rotate queries and keys with cosines and sines from a table.

    With half = rotary_dim / 2, the pair i of a head of token t turns by the cosine cos_sin_cache[positions[t], i] and
    the sine cos_sin_cache[positions[t], half + i]: (x, y) becomes (x cos - y sin, x sin + y cos). Pairs are the dims
    (i, i + half), or (2i, 2i + 1) when is_neox is False. Dims past rotary_dim are copied.

    Args:
        positions: int32 or int64 [tokens], each a row of the table.
        query: [tokens, num_qo_heads * head_size] or [tokens, num_qo_heads, head_size], any strides.
        key: [tokens, num_kv_heads * head_size] or [tokens, num_kv_heads, head_size], of query's dtype.
        head_size: the size of a head.
        cos_sin_cache: float32 [max_position, rotary_dim], cosines in the first half of a row and sines in the second.
        is_neox: True for rotate-half (NeoX, Llama), False for adjacent pairs (GPT-J).

    Returns:
        (query, key), new tensors of the same shapes and dtypes.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together, or a cache not in float32.

    Source: Su et al., "RoFormer" (2021); FlashInfer's `apply_rope_with_cos_sin_cache`.

    >>> import torch
    >>> angles = torch.arange(4.0)[:, None]
    >>> cache = torch.cat((angles.cos(), angles.sin()), -1)
    >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    >>> apply_rope_with_cos_sin_cache(torch.tensor([0, 1]), x, x, 2, cache)[0]
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415]])
    """
    if not is_compiling():
        return _apply(positions, query, key, head_size, cos_sin_cache, is_neox, None, None)
    if needs_grad(query, key):
        return reference.apply_rope_with_cos_sin_cache(positions, query, key, head_size, cos_sin_cache, is_neox)
    outs = torch.empty_like(query), torch.empty_like(key)
    torch.ops.kernelmux.apply_rope_with_cos_sin_cache(positions, query, key, head_size, cos_sin_cache, is_neox, *outs)
    return outs


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    """Rotate queries and keys with cosines and sines from a table, in place.

    Args and Raises are those of `apply_rope_with_cos_sin_cache`; NoKernelError when query or key requires grad.

    Source: FlashInfer's `apply_rope_with_cos_sin_cache_inplace`.

    >>> import torch
    >>> angles = torch.arange(4.0)[:, None]
    >>> cache = torch.cat((angles.cos(), angles.sin()), -1)
    >>> qk = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    >>> apply_rope_with_cos_sin_cache_inplace(torch.tensor([1]), qk[:, :2], qk[:, 2:], 2, cache)
    >>> qk
    tensor([[ 0.5403,  0.8415, -0.8415,  0.5403]])
    """
    if is_compiling():
        refuse_grad("apply_rope_with_cos_sin_cache_inplace", query, key)
        torch.ops.kernelmux.apply_rope_with_cos_sin_cache_inplace(
            positions, query, key, head_size, cos_sin_cache, is_neox
        )
    else:
        _inplace(positions, query, key, head_size, cos_sin_cache, is_neox)


def _apply(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
) -> Pair:
    op, written = WITH_CACHE, None
    if query_rope is not None and key_rope is not None:
        written = (query_rope.stride(), key_rope.stride(), (query_rope.data_ptr() | key_rope.data_ptr()) & 15 == 0)
    if not positions.is_contiguous():
        positions = positions.contiguous()
    which = (_key(op, positions, query, key, cos_sin_cache), head_size, is_neox, written)
    args = (positions, query, key, head_size, cos_sin_cache, is_neox, query_rope, key_rope)
    run = op.cache.get(which) or op.pick(which, args)
    return run(*args)  # type: ignore[no-any-return]


def _inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    op = WITH_CACHE_INPLACE
    if not positions.is_contiguous():
        positions = positions.contiguous()
    which = (_key(op, positions, query, key, cos_sin_cache), head_size, is_neox)
    run = op.cache.get(which) or op.pick(which, (positions, query, key, head_size, cos_sin_cache, is_neox))
    run(positions, query, key, head_size, cos_sin_cache, is_neox)


def _key(op: Op, positions: Tensor, query: Tensor, key: Tensor, cache: Tensor) -> tuple[object, ...]:
    rows, columns = query.shape, key.shape
    tokens = rows[0] if rows else -1
    if not rows or not columns or columns[0] != tokens or positions.numel() != tokens or positions.ndim != 1:
        check_counts(op.name, {"query": query, "key": key}, {"positions": positions})
    return (
        query.dtype, key.dtype is query.dtype, positions.dtype, query.device, key.device, positions.device,
        rows[1] if len(rows) == 2 else rows[1:], columns[1] if len(columns) == 2 else columns[1:],
        query.stride(), key.stride(), cache.dtype, cache.device, cache.shape[-1], cache.stride(),
        cache.data_ptr() & 15 == 0,
        (query.data_ptr() | key.data_ptr()) & 15 == 0,
        is_grad_enabled() and (query.requires_grad or key.requires_grad), op.bucket(tokens), PREFER.get(),
    )  # fmt: skip


def _eager(*args: Any) -> None:
    _apply(*args)


WITH_CACHE.eager = _eager
WITH_CACHE_INPLACE.eager = _inplace
