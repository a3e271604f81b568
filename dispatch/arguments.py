"""Checks and layout facts of tensor arguments, for the cold paths of several families."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kernelmux.capabilities import NoKernelError, dtype_name

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def refuse_grad(op: str, *tensors: Tensor | None) -> None:
    """What a compiled call of an in-place op does with inputs that require grad; eager calls learn it from resolve."""
    if needs_grad(*tensors):
        raise NoKernelError(f"{op} is in place and has no gradient, an input requires grad; call it under no_grad()")


def layout_features(*tensors: Tensor | None) -> set[str]:
    """`inner_strided`: a last dim that is not contiguous; `unaligned`: rows that do not start at 16-byte addresses.

    The first dim's stride counts whatever its size: rows grow from call to call under one cached decision.

    >>> sorted(layout_features(torch.zeros(4, 6)[:, ::2]))
    ['inner_strided', 'unaligned']
    """
    features = set()
    for t in tensors:
        if t is None:
            continue
        if t.ndim and t.shape[-1] > 1 and t.stride(-1) != 1:
            features.add("inner_strided")
        steps = [t.stride(d) * t.element_size() for d in range(t.ndim - 1) if d == 0 or t.shape[d] > 1]
        if t.data_ptr() % 16 or any(step % 16 for step in steps):
            features.add("unaligned")
    return features


def check_device(op: str, device: torch.device, tensors: Mapping[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, the first tensor on {device}; move it there")


def check_floats(op: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Every tensor that is given holds floats of 16 bits or more."""
    for name, tensor in tensors.items():
        if tensor is not None and (not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2):
            got = dtype_name(tensor.dtype)
            raise TypeError(f"{op}: {name} is {got}, it must be float16, bfloat16, float32 or float64; convert it")


def check_fp8(op: str, name: str, dtype: torch.dtype) -> None:
    if dtype not in FP8:
        allowed = " or ".join(map(dtype_name, FP8))
        raise TypeError(f"{op}: {name} is {dtype_name(dtype)}, it must be {allowed}; allocate it so")


def check_integers(op: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{op}: {name} is {dtype_name(tensor.dtype)}, it must be int32 or int64; convert it")


def check_writable(op: str, tensors: Mapping[str, Tensor | None]) -> None:
    """A tensor that is written has one address for each element."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if any(step == 0 and (d == 0 or tensor.shape[d] > 1) for d, step in enumerate(tensor.stride())):
            raise ValueError(f"{op}: {name} has the strides {tensor.stride()}, it is written to; pass a clone of it")


def shape_error(op: str, name: str, got: Tensor, wanted: object, advice: str) -> ValueError:
    want = list(wanted) if isinstance(wanted, tuple) else wanted
    return ValueError(f"{op}: {name} has shape {list(got.shape)}, it must be {want}; {advice}")
