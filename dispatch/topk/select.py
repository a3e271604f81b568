"""top_k: the k largest elements of each row."""

import torch
from torch import Tensor

from kernelmux.capabilities import Request
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.topk import reference
from kernelmux.dispatch.topk.arguments import check_scores, choice_features, layout, layout_features, tie_break_of
from kernelmux.dispatch.topk.tie import TopKTieBreak


def _describe(
    input: Tensor,
    k: int,
    sorted: bool,
    deterministic: bool,
    tie_break: int,
    values: Tensor | None,
    indices: Tensor | None,
) -> Request:
    features = layout_features(input) | choice_features(deterministic, tie_break)
    return Request(
        op="top_k",
        family="topk",
        device=input.device,
        dtypes={"input": input.dtype},
        dims={"rows": input.shape[0], "columns": input.shape[1], "k": k},
        features=frozenset(features | ({"sorted"} if sorted else set())),
        empty=input.shape[0] == 0,
        grad=_grad(input),
    )


TOP_K = Op(
    "top_k",
    "topk",
    reference.top_k,
    _describe,
    growing=("rows", "columns"),
    dims=("k",),
    roles=("input",),
    features=("sorted", "deterministic", "tie_break", "strided", "unaligned"),
    schema="(Tensor input, SymInt k, bool sorted, bool deterministic, int tie_break, Tensor(a!) values, "
    "Tensor(b!) indices) -> ()",
)


def top_k(
    input: Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
) -> tuple[Tensor, Tensor]:
    """Find the k largest elements of each row: `torch.topk(input, k, dim=-1, sorted=sorted)`.

    Args:
        input: [rows, columns], any strides, float16, bfloat16, float32 or float64; a NaN counts as the largest.
        k: 1 to columns.
        sorted: largest first; else in any order.
        deterministic: the same selection in the same order from run to run, also among equal values.
        tie_break: which of the values equal to the k-th are taken: `TopKTieBreak.SMALL` or `LARGE` indices, or any.
            It settles the selection, not the order.
        dsa_graph_safe: accepted for compatibility; every call may be captured in a CUDA graph.

    Returns:
        (values, indices), [rows, k]: the dtype of input, and int64.

    Raises:
        ValueError, TypeError: for a shape or dtype that does not fit, k outside 1 to columns, or another tie_break.

    Source: FlashInfer's `top_k`.

    >>> import torch
    >>> values, indices = top_k(torch.tensor([[1.0, 3.0, 2.0, 3.0]]), 1, tie_break=TopKTieBreak.LARGE)
    >>> values.tolist(), indices.tolist()
    ([[3.0]], [[3]])
    """
    check_scores(input)
    if not 1 <= k <= input.shape[1]:
        raise ValueError(f"k is {k}, at least 1 and at most the {input.shape[1]} columns; choose another k")
    tie_break = tie_break_of(tie_break)
    if torch.compiler.is_compiling():
        if _grad(input):
            return reference.top_k(input, k, sorted, deterministic, tie_break)
        values = input.new_empty(input.shape[0], k)
        indices = torch.empty(input.shape[0], k, dtype=torch.int64, device=input.device)
        torch.ops.kernelmux.top_k(input, k, sorted, deterministic, tie_break, values, indices)
        return values, indices
    return _top_k(input, k, sorted, deterministic, tie_break, None, None)


def _top_k(
    input: Tensor,
    k: int,
    sorted: bool,
    deterministic: bool,
    tie_break: int,
    values: Tensor | None,
    indices: Tensor | None,
) -> tuple[Tensor, Tensor]:
    key = (layout(input), k, sorted, deterministic, tie_break, TOP_K.bucket(input.shape[0], input.shape[1]),
           values is None, _grad(input), PREFER.get())  # fmt: skip
    args = (input, k, sorted, deterministic, tie_break, values, indices)
    run = TOP_K.cache.get(key) or TOP_K.pick(key, args)
    return run(*args)  # type: ignore[no-any-return]


def _grad(input: Tensor) -> bool:
    return input.requires_grad and torch.is_grad_enabled()


TOP_K.eager = _top_k
topk = top_k
