"""Cases of the functional ops: matrix products and norms, on strided and odd-sized inputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernelmux.capabilities import Device, Kernel
from kernelmux.dispatch.state import OPS

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 3e-6}


@dataclass(frozen=True)
class Case:
    """Arguments of one call; `make(device)` gives them in the reference's order, the output last."""

    name: str
    make: Callable[[torch.device], tuple[Any, ...]]

    def __str__(self) -> str:
        return self.name


def cases(kernel: Kernel, device: Device) -> list[Case]:
    """The cases that the kernel declares to serve."""
    op = OPS[kernel.op]
    found = []
    for case in DRAFTS[kernel.op](kernel):
        assert op.describe is not None
        if not kernel.support.reasons(op.describe(*case.make(torch.device("cpu"))), device):
            found.append(case)
    return found


def check(kernel: Kernel, case: Case, device: torch.device) -> None:
    """Raise AssertionError unless the result is right, returned and written where it was asked for."""
    *inputs, out = case.make(device)
    wide = [t.double() if isinstance(t, Tensor) else t for t in inputs]
    wide = [torch.float64 if isinstance(t, torch.dtype) else t for t in wide]
    want = OPS[kernel.op].function(*wide)
    before = [t.clone() if isinstance(t, Tensor) else t for t in inputs]
    if out is not None:
        out.fill_(math.nan)
    got = kernel.load()(*inputs, out)
    assert out is None or (got is out or got.data_ptr() == out.data_ptr()), "the result must be out"
    for old, new in zip(before, inputs, strict=True):
        assert not isinstance(old, Tensor) or torch.equal(old, new), "an input was changed"
    error = ((got.double() - want).norm() / want.norm()).item()
    assert error < TOLERANCE[got.dtype], f"relative error is {error:.2e}, at most {TOLERANCE[got.dtype]:.0e}"


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


def _norms(kernel: Kernel) -> list[Case]:
    found = []
    for dtype, *_ in sorted(kernel.support.dtypes or (), key=str):
        for rows, hidden in ((1, 4096), (7, 576), (33, 2468), (3, 8192), (2, 8)):
            for given in (False, True):

                def make(
                    device: torch.device, dtype: torch.dtype = dtype, rows: int = rows, hidden: int = hidden,
                    given: bool = given,
                ) -> tuple[Any, ...]:  # fmt: skip
                    x = _random(device, dtype, rows, hidden + 16)[:, :hidden]  # rows of a wider buffer
                    out = torch.empty(rows, hidden, dtype=dtype, device=device) if given else None
                    return x * 3, _random(device, dtype, hidden), 1e-5, out

                name = f"{str(dtype)[6:]}-{rows}x{hidden}{'-out' if given else ''}"
                found.append(Case(name, make))
        found.append(Case(f"{str(dtype)[6:]}-per-head", lambda device, dtype=dtype: (
            _random(device, dtype, 5, 9, 128), _random(device, dtype, 128), 1e-6, None)))  # fmt: skip
    return found


def _products(kernel: Kernel) -> list[Case]:
    found, batched = [], kernel.op == "bmm_bf16"
    for dtype, out_dtype in sorted({(combo[0], combo[2]) for combo in kernel.support.dtypes or ()}, key=str):
        for m, n, k in ((1, 64, 256), (17, 96, 576), (130, 512, 128), (5, 24, 40), (2, 7, 9)):
            for form in ("column", "row", "strided-a", "out", "bias"):
                if batched and form == "bias":
                    continue

                def make(
                    device: torch.device, dtype: torch.dtype = dtype, m: int = m, n: int = n, k: int = k,
                    form: str = form, out_dtype: torch.dtype = out_dtype,
                ) -> tuple[Any, ...]:  # fmt: skip
                    lead = (3,) if batched else ()
                    a = _random(device, dtype, *lead, m, k)
                    if form == "strided-a":
                        a = _random(device, dtype, *lead, m, 2 * k)[..., :k]
                    b = _random(device, dtype, *lead, n, k).transpose(-1, -2)
                    b = b.contiguous() if form == "row" else b
                    out = torch.empty(*lead, m, n, dtype=out_dtype, device=device) if form == "out" else None
                    bias = () if batched else (_random(device, dtype, n) if form == "bias" else None,)
                    return a, b, *bias, out_dtype, out

                found.append(Case(f"{str(dtype)[6:]}-{m}x{n}x{k}-{form}", make))
    return found


DRAFTS: dict[str, Callable[[Kernel], list[Case]]] = {
    "rmsnorm": _norms, "gemma_rmsnorm": _norms, "mm_bf16": _products, "bmm_bf16": _products,
}  # fmt: skip
