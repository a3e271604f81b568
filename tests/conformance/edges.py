"""Values at and beside the edges of a declaration. Pure: nothing runs."""

from collections.abc import Iterator, Mapping
from typing import Any

from kernelmux.capabilities import PRESETS, Device, Kernel, Limit, Request
from kernelmux.dispatch.state import OPS

DIMS = {
    "batch": 2, "q_len": 1, "kv_len": 64, "num_qo_heads": 8, "num_kv_heads": 2, "group_size": 4, "head_dim_qk": 64,
    "head_dim_vo": 64, "page_size": 16, "rows": 4, "heads": 1, "hidden": 256, "m": 16, "n": 64, "k": 64,
}  # fmt: skip


def inside(limit: Limit) -> list[int]:
    """Values that a limit allows: its edges, else one of its multiples."""
    step = limit.multiple_of or 1
    found = set(limit.one_of)
    if limit.min is not None:
        found.add(-(-limit.min // step) * step)
    if limit.max is not None:
        found.add(limit.max // step * step)
    found = {v for v in found or {64 // step * step or step} if limit.problem(v) is None}
    return sorted(found)


def outside(limit: Limit) -> list[int]:
    """One value past each edge."""
    found = {v + d for v in limit.one_of for d in (-1, 1)}
    if limit.min is not None:
        found.add(limit.min - 1)
    if limit.max is not None:
        found.add(limit.max + 1)
    if limit.multiple_of:
        found |= {v + 1 for v in inside(limit)}
    return sorted(v for v in found if limit.problem(v) is not None)


def device_for(kernel: Kernel) -> Device:
    """The first preset that the kernel can run on."""
    for device in PRESETS.values():
        if not list(kernel.support._device(device)):
            return device
    raise AssertionError(f"{kernel.id} can run on no preset")


def baseline(kernel: Kernel, **changes: Any) -> Request:
    """A plain request that the kernel can serve, with some fields replaced."""
    support = kernel.support
    dims = {name: DIMS[name] for name in OPS[kernel.op].dims if name in DIMS}
    for name, limit in support.dims.items():
        if limit.problem(dims.get(name, 1)):
            dims[name] = inside(limit)[0]
    dims |= changes.pop("dims", {})
    if "head_dim_qk" in dims and "head_dim_vo" not in support.dims:
        dims["head_dim_vo"] = dims["head_dim_qk"]
    combos = sorted(support.dtypes or (), key=str)
    dtypes = dict(zip(support.roles, combos[0], strict=True)) if combos else {}
    dtypes = {role: dtype for role, dtype in dtypes.items() if role != "bias"}
    fields: dict[str, Any] = {"phase": support.phases[0] if support.phases else "", "dtypes": dtypes, "dims": dims}
    return Request(kernel.op, OPS[kernel.op].family, **(fields | changes))


def past_edges(kernel: Kernel) -> Iterator[tuple[str, Request, Device]]:
    """Requests that miss what the kernel declares by one thing each, and the name of that thing."""
    device, support, op = device_for(kernel), kernel.support, OPS[kernel.op]
    for name, limit in support.dims.items():
        for value in outside(limit):
            yield f"{name}={value}", baseline(kernel, dims={name: value}), device
    for feature in sorted(set(op.features) - support.features):
        yield feature, baseline(kernel, features=frozenset({feature})), device
    for phase in sorted(set(op.phases) - set(support.phases)) if support.phases else ():
        yield f"phase {phase}", baseline(kernel, phase=phase), device
    if support.dtypes:
        for role in baseline(kernel).dtypes:
            yield f"{role} dtype", baseline(kernel, dtypes=other_dtype(kernel, role)), device
    yield "grad", baseline(kernel, grad=True), device
    for preset in PRESETS.values():
        if list(support._device(preset)):
            yield f"on {preset}", baseline(kernel), preset


def other_dtype(kernel: Kernel, role: str) -> Mapping[str, Any]:
    """The baseline's dtypes with one of them replaced by one that no combination has there."""
    import torch

    dtypes = dict(baseline(kernel).dtypes)
    return {**dtypes, role: torch.int16}


def within_edges(kernel: Kernel) -> Iterator[tuple[str, Request]]:
    """Requests at each edge and with each feature, all of which the kernel declares to serve."""
    for name, limit in kernel.support.dims.items():
        for value in inside(limit):
            yield f"{name}={value}", baseline(kernel, dims={name: value})
    for feature in sorted(kernel.support.features):
        more = {"causal"} if feature == "window" and "causal" in kernel.support.features else set()
        yield feature, baseline(kernel, features=frozenset({feature} | more), grad=feature == "grad")
