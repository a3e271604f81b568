"""Mock backends for tests: yours and ours.

>>> import torch
>>> from kernelmux.testing import call, installed, scratch_op, stub
>>> with scratch_op() as op, installed(stub("fast", "triple")):
...     call(op, torch.ones(2, 3))[0, 0].item()
3.0
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kernelmux.capabilities import Backend, CompileError, Kernel, Package, Request, Support, Unsupported
from kernelmux.dispatch import registry, state
from kernelmux.dispatch.op import PREFER, Op

SCRATCH = "scratch"


def double(x: Tensor, out: Tensor | None = None) -> Tensor:
    """The reference of the scratch op."""
    return torch.mul(x, 2, out=out)


def triple(x: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.mul(x, 3, out=out)


def quadruple(x: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.mul(x, 4, out=out)


def refuses_many_rows(x: Tensor, out: Tensor | None = None) -> Tensor:
    if x.shape[0] > 512:
        raise Unsupported("NOT_SUPPORTED beyond 512 rows")
    return torch.mul(x, 3, out=out)


def fails_to_compile(x: Tensor, out: Tensor | None = None) -> Tensor:
    raise CompileError("error: x.h: No such file; log: build.log")


def crashes(x: Tensor, out: Tensor | None = None) -> Tensor:
    raise ZeroDivisionError("a bug in the kernel")


def other_parameters(y: Tensor) -> Tensor:
    return y


def never_warm(request: Request) -> bool:
    return False


def describe(x: Tensor, out: Tensor | None = None) -> Request:
    """The Request of a call of the scratch op."""
    if x.ndim != 2:
        raise ValueError(f"x has {x.ndim} dimensions, 2 are needed; reshape it to [rows, width]")
    dims = {"rows": x.shape[0], "width": x.shape[1]}
    grad = x.requires_grad and torch.is_grad_enabled()
    return Request(SCRATCH, "stub", device=x.device, dtypes={"x": x.dtype}, dims=dims, empty=x.shape[0] == 0, grad=grad)


@contextlib.contextmanager
def scratch_op(**kwargs: Any) -> Iterator[Op]:
    """A throw-away op `f(x [rows, width], out=None) -> 2 * x` of the family "stub"."""
    op = Op(SCRATCH, "stub", double, describe, growing=("rows",), dims=("width",), roles=("x",), **kwargs)
    state.reload()
    try:
        yield op
    finally:
        del state.OPS[SCRATCH]
        state.reload()


def call(op: Op, x: Tensor, backend: str = "auto") -> Tensor:
    """What the public function of the scratch op would do."""
    key = (x.dtype, x.device, x.shape[1:], op.bucket(x.shape[0]), x.requires_grad, backend, PREFER.get())
    run = op.cache.get(key) or op.pick(key, (x, None), backend)
    result: Tensor = run(x, None)
    return result


def stub(
    name: str, function: str = "triple", *, op: str = SCRATCH, package: Package | None = None, **fields: Any
) -> Backend:
    """A backend of one kernel. `function` is a name of this module; other fields go to Kernel or Support."""
    of_support = {k: fields.pop(k) for k in list(fields) if k in Support.__dataclass_fields__}
    support = Support(**{"device": "any", **of_support})
    kernel = Kernel(op, f"kernelmux.testing:{function}", support, **fields)
    return Backend(name, f"stub {name}", (kernel,), package=package)


@contextlib.contextmanager
def installed(*backends: Backend) -> Iterator[None]:
    """Replace the registered backends inside a `with` block."""
    found = registry.collect(backends)
    with mock.patch.object(registry, "backends", lambda: found), mock.patch.object(state, "packaged_rules", lambda: ()):
        state.reload()
        yield
    state.reload()
