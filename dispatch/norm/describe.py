"""Validation of the norms' arguments, and what a Request says of them."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from kernelmux.capabilities import Request, dtype_name
from kernelmux.dispatch.arguments import (
    check_device,
    check_floats,
    check_fp8,
    check_writable,
    layout_features,
    needs_grad,
    shape_error,
)

DIMS = ("heads", "hidden")
FEATURES = ("per_head", "host_scale", "inner_strided", "unaligned")


def norm_request(
    op: str,
    input: Tensor,
    vectors: Mapping[str, Tensor],
    written: Mapping[str, Tensor | None],
    scale: Tensor | float | None = None,
    in_place: bool = False,
    features: Collection[str] = (),
) -> Request:
    """`vectors` are [hidden], `written` has input's shape; a Tensor `scale` is one float32 number.

    `in_place`: input is written too.
    """
    if input.ndim not in (2, 3):
        raise shape_error(op, "input", input, "[rows, hidden] or [rows, heads, hidden]", "reshape it")
    check_floats(op, {"input": input, **vectors})
    hidden = input.shape[-1]
    for name, vector in vectors.items():
        if vector.shape != (hidden,):
            raise shape_error(op, name, vector, [hidden], "give one value per element of input's last dim")
    for name, tensor in written.items():
        if tensor is not None and tensor.shape[1:] != input.shape[1:]:
            raise shape_error(op, name, tensor, list(input.shape), "give it input's shape")
    held = {"scale": scale} if isinstance(scale, Tensor) else {}
    if isinstance(scale, Tensor) and scale.numel() != 1:
        raise shape_error(op, "scale", scale, "one number", "pass a float or a tensor of one element")
    check_device(op, input.device, {**vectors, **written, **held})
    check_writable(op, {**written, "input": input} if in_place else written)
    found = set(features) | layout_features(input, *vectors.values(), *written.values())
    found |= ({"per_head"} if input.ndim == 3 else set()) | ({"host_scale"} if isinstance(scale, float) else set())
    given = {"input": input, **vectors, **written}
    return Request(
        op=op,
        family="norm",
        device=input.device,
        dtypes={name: t.dtype for name, t in given.items() if t is not None},
        dims={"rows": input.shape[0], "heads": input.shape[1] if input.ndim == 3 else 1, "hidden": hidden},
        features=frozenset(found),
        empty=input.numel() == 0,
        grad=needs_grad(*given.values()),
    )


def quant_request(
    op: str,
    input: Tensor,
    vectors: Mapping[str, Tensor],
    out: Tensor,
    scale: Tensor | float,
    residual: Tensor | None = None,
) -> Request:
    """As norm_request for a form that writes 8-bit floats."""
    check_fp8(op, "out", out.dtype)
    if residual is not None:
        check_floats(op, {"residual": residual})
    return norm_request(op, input, vectors, {"out": out} | ({} if residual is None else {"residual": residual}), scale)


def one_scale(op: str, scale: Tensor | float) -> Tensor | float:
    """A scale as kernels take it: a float, or a float32 tensor."""
    if not isinstance(scale, Tensor):
        return float(scale)
    if not scale.dtype.is_floating_point:
        raise TypeError(f"{op}: scale is {dtype_name(scale.dtype)}, it must be float32; convert it")
    return scale.float()


def tensor_scale(op: str, scale: Tensor | float, input: Tensor) -> Tensor:
    """A scale as torch.compile's ops take it: always a float32 tensor."""
    held = one_scale(op, scale)
    return held if isinstance(held, Tensor) else torch.full((1,), held, dtype=torch.float32, device=input.device)


def same_shape(op: str, name: str, tensor: Tensor, input: Tensor) -> None:
    """What a key cannot hold: both have the same number of rows."""
    if tensor.shape != input.shape:
        raise shape_error(op, name, tensor, list(input.shape), "give it input's shape")
