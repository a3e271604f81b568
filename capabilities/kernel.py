"""What a backend folder declares."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kernelmux.capabilities.package import Package
from kernelmux.capabilities.reason import Reason
from kernelmux.capabilities.support import Support


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way of running one op. `target` is "module:function", imported on first use.

    `graph_safe`: may be captured in a CUDA graph; `deterministic`: same inputs give the same bits;
    `batch_invariant`: a row's bits do not depend on the rest of the batch; `compiles`: builds code at its first call;
    `slow_build`: "module:function" telling whether the tens of milliseconds that a first use of this request takes
    have been spent already, in which case alone an eager call may choose it by itself.
    """

    op: str
    target: str
    support: Support
    variant: str = ""
    graph_safe: bool = True
    deterministic: bool = True
    batch_invariant: bool = False
    compiles: bool = False
    slow_build: str = ""
    backend: str = ""  # filled in by Backend

    @property
    def id(self) -> str:
        return f"{self.backend}:{self.op}" + (f"/{self.variant}" if self.variant else "")

    def load(self) -> Callable[..., Any]:
        return load(self.target)


def load(target: str) -> Callable[..., Any]:
    """Import "module:function"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Backend:
    """One library: how to tell that it is usable, and the kernels that it brings."""

    name: str
    title: str
    kernels: tuple[Kernel, ...]
    package: Package | None = None
    broken: Reason | None = None  # set when the declaration itself could not be loaded
    extra: str = ""  # the pip extra that installs it

    def __post_init__(self) -> None:
        owned = tuple(replace(k, backend=self.name) for k in self.kernels)
        object.__setattr__(self, "kernels", owned)

    def problem(self) -> Reason | None:
        if self.broken or self.package is None:
            return self.broken
        return self.package.problem()
