"""Drawing token ids from probabilities or logits.

Shared by all: draws are made with Philox numbers of (seed, offset), see `kernelmux.dispatch.sampling.philox`, so equal
seeds and offsets give equal ids; ids lie in [0, vocab); output i depends on its row, its filters and its numbers alone.
"""

from typing import Any

import torch
from torch import Tensor

from kernelmux.dispatch.sampling.arguments import check_distributions, min_p_of, refuse_nan, top_k_of, top_p_of
from kernelmux.dispatch.sampling.draw import Filters, Seed, Source, from_logits, from_probs
from kernelmux.dispatch.sampling.filters import softmax

_NUMBERS = 32  # that an output of a filtered draw takes from a generator
_ORDERS = ("top_k_first", "joint")


def sampling_from_probs(
    probs: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
) -> Any:
    """Draw one id per output from categorical distributions; like `torch.multinomial(probs, 1)`.

    Args:
        probs: [rows, vocab], any strides, float16, bfloat16, float32 or float64; need not sum to 1.
        indices: integers [batch], the row that each output draws from; None: output i draws from row i.
        deterministic: accepted for compatibility; equal seeds give equal ids either way.
        generator: where seed and offset come from when they are not given; None: the device's default generator, which
            moves on (see `get_seed_and_offset`).
        check_nan: raise for a NaN in probs; waits for the device.
        seed, offset: two ints, or two int64 or uint64 tensors of one value, or of one value per output. With a seed
            of its own an output draws the same at any place of a batch. A call captured in a CUDA graph needs tensors.
        return_valid: also return whether each row had a distribution.

    Returns:
        ids [batch], int32, or the dtype of indices; with return_valid (ids, valid), valid bool [batch]. A row that
        sums to zero or holds a NaN gives id 0 and valid False.

    Raises:
        ValueError, TypeError: for shapes, dtypes, devices or seeds that do not fit, or a NaN found by check_nan.

    Source: FlashInfer's function of this name.

    >>> import torch
    >>> sampling_from_probs(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), seed=1, offset=0, return_valid=True)
    (tensor([1, 0], dtype=torch.int32), tensor([ True, False]))
    """
    check_distributions("probs", probs)
    return from_probs(probs, Filters(), indices, Source(generator, seed, offset), check_nan, return_valid, 1)


def top_p_sampling_from_probs(
    probs: Tensor,
    top_p: float | Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
) -> Any:
    """Draw from each row's nucleus {i : (sum of all p_j > p_i) < top_p}, in proportion to p; ties are kept.

    Equals `sampling_from_probs(top_p_renorm_probs(probs, top_p), …)` in distribution.

    Args:
        top_p: a number, or a floating tensor [rows] (indexed by row, not by output). 1 or more is off, 0 or less is
            greedy: the maximum.
        probs, indices, deterministic, generator, check_nan, seed, offset, return_valid: as in `sampling_from_probs`.

    Returns:
        ids, or (ids, valid), as `sampling_from_probs`.

    Raises:
        ValueError, TypeError: as `sampling_from_probs`.

    Source: A. Holtzman et al., "The curious case of neural text degeneration", 2020; FlashInfer's function.

    >>> import torch
    >>> top_p_sampling_from_probs(torch.tensor([[0.2, 0.7, 0.1]]), 0.5, seed=1, offset=0).tolist()
    [1]
    """
    check_distributions("probs", probs)
    filters = Filters(top_p=top_p_of(top_p, probs))
    return from_probs(probs, filters, indices, Source(generator, seed, offset), check_nan, return_valid, _NUMBERS)


def top_k_sampling_from_probs(
    probs: Tensor,
    top_k: int | Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
) -> Any:
    """Draw from each row's k most probable ids, in proportion to p; ties with the k-th are all kept.

    Args:
        top_k: an int, or an integer tensor [rows] (indexed by row). 0 or less, and vocab or more, are off.
        probs, indices, deterministic, generator, check_nan, seed, offset, return_valid: as in `sampling_from_probs`.

    Returns:
        ids, or (ids, valid), as `sampling_from_probs`.

    Raises:
        ValueError, TypeError: as `sampling_from_probs`.

    Source: FlashInfer's function of this name.

    >>> import torch
    >>> top_k_sampling_from_probs(torch.tensor([[0.2, 0.7, 0.1]]), 1, seed=1, offset=0).tolist()
    [1]
    """
    check_distributions("probs", probs)
    filters = Filters(top_k=top_k_of(top_k, probs))
    return from_probs(probs, filters, indices, Source(generator, seed, offset), check_nan, return_valid, _NUMBERS)


def min_p_sampling_from_probs(
    probs: Tensor,
    min_p: float | Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
) -> Any:
    """Draw from {i : p_i >= min_p * max_j p_j}, in proportion to p.

    Args:
        min_p: a number, or a floating tensor [rows] (indexed by row). 0 or less is off, 1 keeps the maximum.
        probs, indices, deterministic, generator, check_nan, seed, offset, return_valid: as in `sampling_from_probs`.

    Returns:
        ids, or (ids, valid), as `sampling_from_probs`; a min_p above 1 keeps nothing: id 0, valid False.

    Raises:
        ValueError, TypeError: as `sampling_from_probs`.

    Source: M. Nguyen et al., "Turning up the heat: min-p sampling", 2024; FlashInfer's function.

    >>> import torch
    >>> min_p_sampling_from_probs(torch.tensor([[0.2, 0.7, 0.1]]), 0.5, seed=1, offset=0).tolist()
    [1]
    """
    check_distributions("probs", probs)
    filters = Filters(min_p=min_p_of(min_p, probs))
    return from_probs(probs, filters, indices, Source(generator, seed, offset), check_nan, return_valid, _NUMBERS)


def top_k_top_p_sampling_from_probs(
    probs: Tensor,
    top_k: int | Tensor,
    top_p: float | Tensor,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
) -> Any:
    """Draw from the ids that both top_k and top_p keep, in proportion to p.

    Args:
        top_k, top_p: as in `top_k_sampling_from_probs` and `top_p_sampling_from_probs`.
        filter_apply_order: "top_k_first": top_p applies to what `top_k_renorm_probs` gives (top_k being off, to probs
            as given); "joint": both apply to probs as given.
        probs, indices, deterministic, generator, check_nan, seed, offset, return_valid: as in `sampling_from_probs`.

    Returns:
        ids, or (ids, valid), as `sampling_from_probs`.

    Raises:
        ValueError, TypeError: as `sampling_from_probs`, and for another filter_apply_order.

    Source: FlashInfer's function of this name.

    >>> import torch
    >>> probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    >>> top_k_top_p_sampling_from_probs(probs, 2, 0.5, seed=1, offset=0).tolist()  # of 4/7 and 3/7
    [0]
    """
    check_distributions("probs", probs)
    filters = Filters(top_k_of(top_k, probs), top_p_of(top_p, probs), joint=_joint(filter_apply_order))
    return from_probs(probs, filters, indices, Source(generator, seed, offset), check_nan, return_valid, _NUMBERS)


def sampling_from_logits(
    logits: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
) -> Tensor:
    """Draw from softmax(logits) without computing it: `argmax(logits + Gumbel noise)`.

    Args:
        logits: [rows, vocab], any strides, float16, bfloat16, float32 or float64; -inf is never drawn.
        indices, deterministic, generator, check_nan, seed, offset: as in `sampling_from_probs`.

    Returns:
        ids [batch], int32, or the dtype of indices. A row of nothing but -inf, or with a NaN, gives 0.

    Raises:
        ValueError, TypeError: as `sampling_from_probs`.

    Source: C. Maddison et al., "A* sampling", 2014; FlashInfer's function.

    >>> import torch
    >>> sampling_from_logits(torch.tensor([[-torch.inf, 2.0], [0.0, -torch.inf]]), seed=1, offset=0).tolist()
    [1, 0]
    """
    return from_logits(logits, indices, Source(generator, seed, offset), check_nan)


def top_k_top_p_sampling_from_logits(
    logits: Tensor,
    top_k: int | Tensor,
    top_p: float | Tensor,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
) -> Tensor:
    """Draw from softmax(logits) filtered by top_k and top_p: `top_k_top_p_sampling_from_probs(softmax(logits), …)`.

    Cutting before the softmax ("top_k_first" is `top_k_mask_logits`, softmax, top_p) gives the same distribution.

    Args:
        logits: as in `sampling_from_logits`.
        top_k, top_p, filter_apply_order: as in `top_k_top_p_sampling_from_probs`.
        indices, deterministic, generator, check_nan, seed, offset: as in `sampling_from_probs`.

    Returns:
        ids [batch], int32, or the dtype of indices.

    Raises:
        ValueError, TypeError: as `top_k_top_p_sampling_from_probs`.

    Source: FlashInfer's function of this name.

    >>> import torch
    >>> top_k_top_p_sampling_from_logits(torch.tensor([[1.0, 3.0, 2.0]]), 2, 0.5, seed=1, offset=0).tolist()
    [1]
    """
    check_distributions("logits", logits)
    filters = Filters(top_k_of(top_k, logits), top_p_of(top_p, logits), joint=_joint(filter_apply_order))
    if check_nan:
        refuse_nan("logits", logits)
    source = Source(generator, seed, offset)
    return from_probs(softmax(logits), filters, indices, source, False, False, _NUMBERS)  # type: ignore[no-any-return]


def _joint(order: str) -> bool:
    if order not in _ORDERS:
        raise ValueError(f"filter_apply_order is {order!r}, one of {', '.join(map(repr, _ORDERS))}; choose one of them")
    return order == "joint"
