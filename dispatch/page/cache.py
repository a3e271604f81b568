"""The forms in which callers hand over a paged cache, and one view that every kernel takes."""

from typing import Any

from torch import Tensor

LAYOUTS = ("NHD", "HND")


def paged_views(cache: Any, kv_layout: str, name: str = "paged_kv_cache") -> tuple[Tensor, Tensor]:
    """Keys and values as views [pages, page_size, heads, dim] of a cache in any of its forms; nothing is copied.

    Forms: a pair of [pages, page_size, heads, dim] tensors ("NHD") or [pages, heads, page_size, dim] ("HND"), or one
    tensor with keys and values along dim 1. One dim less means a page size of 1.

    Raises:
        ValueError, TypeError: for another layout, form or number of dims.

    >>> import torch
    >>> k, v = paged_views(torch.zeros(4, 2, 8, 16, 64), "HND")
    >>> k.shape, v.shape
    (torch.Size([4, 16, 8, 64]), torch.Size([4, 16, 8, 64]))
    """
    if kv_layout not in LAYOUTS:
        raise ValueError(f"kv_layout is {kv_layout!r}, it must be 'NHD' or 'HND'")
    if isinstance(cache, Tensor):
        if cache.ndim not in (4, 5) or cache.shape[1] != 2:
            raise ValueError(
                f"{name} has shape {list(cache.shape)}, one tensor must be [pages, 2, page_size, heads, dim] (or HND, "
                f"or without page_size); pass (k_cache, v_cache) if they are apart"
            )
        pair = cache.unbind(1)
    elif isinstance(cache, tuple | list) and len(cache) == 2:
        pair = (cache[0], cache[1])
    else:
        raise TypeError(f"{name} is a {type(cache).__name__}, it must be one tensor or a pair (k_cache, v_cache)")
    return _nhd(pair[0], kv_layout, name), _nhd(pair[1], kv_layout, name)


def _nhd(cache: Tensor, kv_layout: str, name: str) -> Tensor:
    if cache.ndim == 3:
        return cache.unsqueeze(1)
    if cache.ndim != 4:
        raise ValueError(f"{name} has a part of shape {list(cache.shape)}, it must be 4-D, or 3-D for a page size of 1")
    return cache if kv_layout == "NHD" else cache.transpose(1, 2)
