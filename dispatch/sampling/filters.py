"""softmax, top_p_renorm_probs, top_k_renorm_probs, top_k_mask_logits: what happens to distributions before a draw."""

from typing import Any

import torch
from torch import Tensor

from kernelmux.capabilities import Request
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.sampling import reference
from kernelmux.dispatch.sampling.arguments import (
    check_distributions,
    float_of,
    kind,
    layout,
    layout_features,
    temperature_of,
    top_k_of,
    wants_grad,
)

Parameter = int | float | Tensor | None


def _request(op: str, role: str, x: Tensor, value: Parameter, out_dtype: torch.dtype) -> Request:
    features = layout_features(x)
    if isinstance(value, Tensor):
        features.add("per_row")
    return Request(
        op=op,
        family="sampling",
        device=x.device,
        dtypes={role: x.dtype, "out": out_dtype},
        dims={"rows": x.shape[0], "vocab": x.shape[1]},
        features=frozenset(features),
        empty=x.shape[0] == 0,
        grad=wants_grad(x),
    )


def _describe_softmax(logits: Tensor, temperature: Parameter, out: Tensor | None) -> Request:
    return _request("softmax", "logits", logits, temperature, torch.float32)


def _describe_top_p(probs: Tensor, top_p: Parameter, out: Tensor | None) -> Request:
    return _request("top_p_renorm_probs", "probs", probs, top_p, torch.float32)


def _describe_top_k(probs: Tensor, top_k: Parameter, out: Tensor | None) -> Request:
    return _request("top_k_renorm_probs", "probs", probs, top_k, probs.dtype)


def _describe_mask(logits: Tensor, top_k: Parameter, out: Tensor | None) -> Request:
    return _request("top_k_mask_logits", "logits", logits, top_k, logits.dtype)


_GIVEN: dict[str, Any] = {"growing": ("rows",), "dims": ("vocab",), "features": ("per_row", "strided", "unaligned")}
SOFTMAX = Op(
    "softmax",
    "sampling",
    reference.softmax,
    _describe_softmax,
    roles=("logits", "out"),
    schema="(Tensor logits, float? scalar, Tensor? per_row, Tensor(a!) out) -> ()",
    **_GIVEN,
)
TOP_P_RENORM_PROBS = Op(
    "top_p_renorm_probs",
    "sampling",
    reference.top_p_renorm_probs,
    _describe_top_p,
    roles=("probs", "out"),
    schema="(Tensor probs, float? scalar, Tensor? per_row, Tensor(a!) out) -> ()",
    **_GIVEN,
)
TOP_K_RENORM_PROBS = Op(
    "top_k_renorm_probs",
    "sampling",
    reference.top_k_renorm_probs,
    _describe_top_k,
    roles=("probs", "out"),
    schema="(Tensor probs, SymInt? scalar, Tensor? per_row, Tensor(a!) out) -> ()",
    **_GIVEN,
)
TOP_K_MASK_LOGITS = Op(
    "top_k_mask_logits",
    "sampling",
    reference.top_k_mask_logits,
    _describe_mask,
    roles=("logits", "out"),
    schema="(Tensor logits, SymInt? scalar, Tensor? per_row, Tensor(a!) out) -> ()",
    **_GIVEN,
)
_OPS = (SOFTMAX, TOP_P_RENORM_PROBS, TOP_K_RENORM_PROBS, TOP_K_MASK_LOGITS)


def _apply(op: Op, x: Tensor, value: Parameter, out_dtype: torch.dtype) -> Tensor:
    """Run one of the four ops; they differ in their parameter's meaning only."""
    grad = wants_grad(x)
    if torch.compiler.is_compiling():
        if grad:
            return op.function(x, value)  # type: ignore[no-any-return]
        out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
        per_row = value if isinstance(value, Tensor) else None
        getattr(torch.ops.kernelmux, op.name)(x, value if per_row is None else None, per_row, out)
        return out
    return _run(op, x, value, None, grad)


def _run(op: Op, x: Tensor, value: Parameter, out: Tensor | None, grad: bool) -> Tensor:
    key = (layout(x), op.bucket(x.shape[0]), kind(value), out is None, grad, PREFER.get())
    run = op.cache.get(key) or op.pick(key, (x, value, out))
    return run(x, value, out)  # type: ignore[no-any-return]


def _eager(op: Op) -> None:
    def call(x: Tensor, scalar: float | None, per_row: Tensor | None, out: Tensor) -> None:
        _run(op, x, scalar if per_row is None else per_row, out, False)

    op.eager = call


for _op in _OPS:
    _eager(_op)


def softmax(logits: Tensor, temperature: float | Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    """Turn logits into probabilities: `torch.softmax(logits.float() / temperature, dim=-1)`.

    Args:
        logits: [rows, vocab], any strides, float16, bfloat16, float32 or float64; -inf elements get probability 0.
        temperature: a number, or a floating tensor [rows]; None or 1 changes nothing. 0 gives the uniform distribution
            over the elements above -inf (not the greedy one: use top_k=1 or top_p=0 for that).
        enable_pdl: accepted for compatibility; it changes no result.

    Returns:
        float32 [rows, vocab]. A row of nothing but -inf gives zeros, one with a NaN or +inf gives NaN.

    Raises:
        ValueError: for a shape or device that does not fit, or a negative number as temperature.
        TypeError: for a bool as temperature, or a wrong dtype.

    Source: FlashInfer's `sampling.softmax`.

    >>> import torch
    >>> softmax(torch.tensor([[0.0, 0.0, -torch.inf]]), temperature=0.5).tolist()
    [[0.5, 0.5, 0.0]]
    """
    check_distributions("logits", logits)
    return _apply(SOFTMAX, logits, temperature_of(temperature, logits), torch.float32)


def top_p_renorm_probs(probs: Tensor, top_p: float | Tensor, is_deterministic: bool = False) -> Tensor:
    """Keep each row's nucleus and renormalise it: {i : (sum of all p_j > p_i) < top_p}, ties kept.

    Args:
        probs: [rows, vocab], any strides; rows should sum to 1.
        top_p: a number, or a floating tensor [rows]. 1 or more keeps everything, 0 or less keeps the maximum.
        is_deterministic: accepted for compatibility; results are always the same from run to run.

    Returns:
        float32 [rows, vocab]: zero outside the kept set, each row with sum 1 (zeros stay zeros, NaN spreads).

    Raises:
        ValueError, TypeError: for a shape, dtype or device that does not fit.

    Source: A. Holtzman et al., "The curious case of neural text degeneration", 2020; FlashInfer's function.

    >>> import torch
    >>> top_p_renorm_probs(torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]]), 0.5).tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    check_distributions("probs", probs)
    value = float_of("top_p", top_p, probs)
    return _apply(TOP_P_RENORM_PROBS, probs, 1.0 if value is None else value, torch.float32)


def top_k_renorm_probs(probs: Tensor, top_k: int | Tensor, is_deterministic: bool = False) -> Tensor:
    """Keep each row's k largest probabilities and renormalise them; ties with the k-th are all kept.

    Args:
        probs: [rows, vocab], any strides.
        top_k: an int, or an integer tensor [rows]. 0 or less, and vocab or more, keep everything.
        is_deterministic: accepted for compatibility; results are always the same from run to run.

    Returns:
        [rows, vocab] of the dtype of probs: zero outside the kept set, each row with sum 1.

    Raises:
        ValueError, TypeError: for a shape, dtype or device that does not fit.

    Source: FlashInfer's function of this name.

    >>> import torch
    >>> top_k_renorm_probs(torch.tensor([[0.25, 0.25, 0.125, 0.375]]), 1).tolist()
    [[0.0, 0.0, 0.0, 1.0]]
    """
    check_distributions("probs", probs)
    k = top_k_of(top_k, probs)
    return _apply(TOP_K_RENORM_PROBS, probs, 0 if k is None else k, probs.dtype)


def top_k_mask_logits(logits: Tensor, top_k: int | Tensor) -> Tensor:
    """Set everything below each row's k-th largest logit to -inf; ties with the k-th are all kept.

    Args:
        logits: [rows, vocab], any strides.
        top_k: an int, or an integer tensor [rows]. 0 or less, and vocab or more, keep everything.

    Returns:
        A new tensor [rows, vocab] of the dtype of logits. NaN counts as the largest and is kept.

    Raises:
        ValueError, TypeError: for a shape, dtype or device that does not fit.

    Source: FlashInfer's function of this name.

    >>> import torch
    >>> top_k_mask_logits(torch.tensor([[1.0, 3.0, 2.0]]), 2).tolist()
    [[-inf, 3.0, 2.0]]
    """
    check_distributions("logits", logits)
    k = top_k_of(top_k, logits)
    return _apply(TOP_K_MASK_LOGITS, logits, 0 if k is None else k, logits.dtype)


top_p_renorm_prob = top_p_renorm_probs
top_k_renorm_prob = top_k_renorm_probs
