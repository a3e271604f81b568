"""The two ops that draw token ids, and the way from a public function to them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelmux.capabilities import Request
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.sampling import reference
from kernelmux.dispatch.sampling.arguments import (
    check_distributions,
    check_index_values,
    check_indices,
    kind,
    layout,
    layout_features,
    refuse_nan,
)
from kernelmux.dispatch.sampling.seeds import choose

Seed = int | Tensor | None


class Filters(NamedTuple):
    """Normalised filters: each None for off. `joint`: top_p looks at the probabilities from before top_k."""

    top_k: int | Tensor | None = None
    top_p: float | Tensor | None = None
    min_p: float | Tensor | None = None
    joint: bool = False


class Source(NamedTuple):
    """Where the random numbers come from. A missing seed or offset means the generator."""

    generator: torch.Generator | None
    seed: Seed
    offset: Seed


def _describe_probs(
    probs: Tensor,
    indices: Tensor | None,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    joint: bool,
    seed: int | Tensor,
    offset: int | Tensor,
    out: Tensor,
    valid: Tensor | None,
) -> Request:
    used = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "indices": indices, "valid": valid}
    features = {name for name, value in used.items() if value is not None}
    if top_k is not None and top_p is not None:
        features.add("joint" if joint else "top_k_first")
    if any(isinstance(value, Tensor) for value in (top_k, top_p, min_p)):
        features.add("per_row")
    return _request("sampling_from_probs", "probs", probs, seed, out, features)


def _describe_logits(
    logits: Tensor, indices: Tensor | None, seed: int | Tensor, offset: int | Tensor, out: Tensor
) -> Request:
    return _request("sampling_from_logits", "logits", logits, seed, out, set() if indices is None else {"indices"})


def _request(op: str, role: str, x: Tensor, seed: int | Tensor, out: Tensor, features: set[str]) -> Request:
    seeded = {"tensor_seed"} if isinstance(seed, Tensor) else set()
    return Request(
        op=op,
        family="sampling",
        device=x.device,
        dtypes={role: x.dtype, "out": out.dtype},
        dims={"rows": x.shape[0], "batch": out.shape[0], "vocab": x.shape[1]},
        features=frozenset(features | seeded | layout_features(x)),
        empty=out.shape[0] == 0,
    )


def _check_probs(probs: Tensor, indices: Tensor | None, *rest: Any) -> None:
    check_index_values(indices, probs.shape[0])


SAMPLING_FROM_PROBS = Op(
    "sampling_from_probs",
    "sampling",
    reference.sampling_from_probs,
    _describe_probs,
    growing=("rows", "batch"),
    dims=("vocab",),
    roles=("probs", "out"),
    features=("top_k", "top_p", "min_p", "joint", "top_k_first", "per_row", "indices", "valid", "tensor_seed",
              "strided", "unaligned"),
    schema="(Tensor probs, Tensor? indices, SymInt? top_k, Tensor? top_ks, float? top_p, Tensor? top_ps, float? min_p, "
    "Tensor? min_ps, bool joint, SymInt? seed, SymInt? offset, Tensor? seeds, Tensor? offsets, int per_output, "
    "Tensor(a!) out, Tensor(b!)? valid) -> ()",
    tags=(torch.Tag.nondeterministic_seeded,),
    check=_check_probs,
)  # fmt: skip
SAMPLING_FROM_LOGITS = Op(
    "sampling_from_logits",
    "sampling",
    reference.sampling_from_logits,
    _describe_logits,
    growing=("rows", "batch"),
    dims=("vocab",),
    roles=("logits", "out"),
    features=("indices", "tensor_seed", "strided", "unaligned"),
    schema="(Tensor logits, Tensor? indices, SymInt? seed, SymInt? offset, Tensor? seeds, Tensor? offsets, "
    "Tensor(a!) out) -> ()",
    tags=(torch.Tag.nondeterministic_seeded,),
    check=_check_probs,
)


def from_probs(
    probs: Tensor,
    filters: Filters,
    indices: Tensor | None,
    source: Source,
    nan: bool,
    return_valid: bool,
    per_output: int,
) -> Any:
    """Draw from filtered probabilities. `per_output`: numbers that one output takes from a generator."""
    batch = check_indices(indices, probs)
    if nan:
        refuse_nan("probs", probs)
    out = torch.empty(batch, dtype=torch.int32 if indices is None else indices.dtype, device=probs.device)
    valid = torch.empty(batch, dtype=torch.bool, device=probs.device) if return_valid else None
    if torch.compiler.is_compiling():
        k, q, m, joint = filters
        torch.ops.kernelmux.sampling_from_probs(
            probs, indices, *_split(k), *_split(q), *_split(m), joint, *_split_source(source), per_output, out, valid
        )
    else:
        _eager_probs(probs, indices, filters, source, per_output, out, valid)
    return out if valid is None else (out, valid)


def from_logits(logits: Tensor, indices: Tensor | None, source: Source, nan: bool) -> Tensor:
    """Draw from softmax(logits)."""
    check_distributions("logits", logits)
    batch = check_indices(indices, logits)
    if nan:
        refuse_nan("logits", logits)
    out = torch.empty(batch, dtype=torch.int32 if indices is None else indices.dtype, device=logits.device)
    if torch.compiler.is_compiling():
        torch.ops.kernelmux.sampling_from_logits(logits, indices, *_split_source(source), out)
    else:
        _eager_logits(logits, indices, source, out)
    return out


def _eager_probs(
    probs: Tensor,
    indices: Tensor | None,
    filters: Filters,
    source: Source,
    per_output: int,
    out: Tensor,
    valid: Tensor | None,
) -> None:
    op, batch = SAMPLING_FROM_PROBS, out.shape[0]
    k, q, m, joint = filters
    seed, offset = choose(source.seed, source.offset, source.generator, batch, batch * per_output, probs.device)
    key = (layout(probs), op.bucket(probs.shape[0], batch), kind(k), kind(q), kind(m), joint, kind(indices),
           isinstance(seed, int), valid is None, PREFER.get())  # fmt: skip
    args = (probs, indices, k, q, m, joint, seed, offset, out, valid)
    run = op.cache.get(key) or op.pick(key, args)
    run(*args)


def _eager_logits(logits: Tensor, indices: Tensor | None, source: Source, out: Tensor) -> None:
    op, batch = SAMPLING_FROM_LOGITS, out.shape[0]
    increment = batch * logits.shape[1]
    seed, offset = choose(source.seed, source.offset, source.generator, batch, increment, logits.device)
    key = (layout(logits), op.bucket(logits.shape[0], batch), kind(indices), isinstance(seed, int), PREFER.get())
    run = op.cache.get(key) or op.pick(key, (logits, indices, seed, offset, out))
    run(logits, indices, seed, offset, out)


def _split(value: Any) -> tuple[Any, Any]:
    """A parameter as the schema takes it: (number, tensor), one of them None."""
    return (None, value) if isinstance(value, Tensor) else (value, None)


def _split_source(source: Source) -> tuple[Any, Any, Any, Any]:
    if source.generator is not None:
        raise ValueError("a generator cannot enter a compiled graph; give seed and offset as tensors")
    seed, seeds = _split(source.seed)
    offset, offsets = _split(source.offset)
    return seed, offset, seeds, offsets


def _join(number: Any, tensor: Any) -> Any:
    return number if tensor is None else tensor


def _compiled_probs(
    probs: Tensor,
    indices: Tensor | None,
    k: Any,
    ks: Any,
    q: Any,
    qs: Any,
    m: Any,
    ms: Any,
    joint: bool,
    seed: Any,
    offset: Any,
    seeds: Any,
    offsets: Any,
    per_output: int,
    out: Tensor,
    valid: Tensor | None,
) -> None:
    filters = Filters(_join(k, ks), _join(q, qs), _join(m, ms), joint)
    source = Source(None, _join(seed, seeds), _join(offset, offsets))
    _eager_probs(probs, indices, filters, source, per_output, out, valid)


def _compiled_logits(
    logits: Tensor, indices: Tensor | None, seed: Any, offset: Any, seeds: Any, offsets: Any, out: Tensor
) -> None:
    _eager_logits(logits, indices, Source(None, _join(seed, seeds), _join(offset, offsets)), out)


SAMPLING_FROM_PROBS.eager = _compiled_probs
SAMPLING_FROM_LOGITS.eager = _compiled_logits
