"""One comparison: a function, the features in use, and how to run it on either side."""

import contextlib
import importlib
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

Results = dict[str, Tensor]  # keys that start with "samples" are compared as distributions
SUBMODULES = ("decode", "prefill", "cascade", "page", "sampling", "topk", "rope", "norm", "activation", "gemm",
              "quantization", "logits_processor", "attention")  # fmt: skip


class Missing(Exception):
    """A side has no such name."""


@dataclass(frozen=True, slots=True)
class Case:
    """`run(side)` builds its inputs from fixed seeds, so that both sides see the same, and returns named tensors."""

    function: str
    features: str
    module: str  # cases of one module share what FlashInfer compiles for them, and one process runs them
    kind: str  # how close the results must be: a key of judge.TOLERANCES
    run: Callable[["Side"], Results]
    explained: str = ""  # why a difference is expected here
    family: str = ""

    @property
    def id(self) -> str:
        return f"{self.family}|{self.function}|{self.features}"


@dataclass(slots=True)
class Side:
    """One of the two libraries. Attribute access finds a public name at its top level or in its submodules."""

    package: str
    device: torch.device
    ours: bool
    _modules: list[types.ModuleType] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for module in self._load():
            found = getattr(module, name, None)
            if found is not None and not isinstance(found, types.ModuleType):
                return found
        raise Missing(f"{self.package} has no {name}")

    def _load(self) -> list[types.ModuleType]:
        if not self._modules:
            self._modules.append(importlib.import_module(self.package))
            prefixes = [self.package, *(["kernelmux.dispatch"] if self.package == "kernelmux" else [])]
            for prefix, name in product(prefixes, SUBMODULES):
                with contextlib.suppress(ImportError):
                    self._modules.append(importlib.import_module(f"{prefix}.{name}"))
        return self._modules

    def backend(self, name: str) -> dict[str, str]:
        """The `backend=` argument, for FlashInfer only: ours runs its reference."""
        return {} if self.package == "kernelmux" else {"backend": name}

    @property
    def seed(self) -> int:
        """Random draws differ between the sides, so that equal results mean equal distributions."""
        return 11 if self.ours else 12

    def workspace(self) -> Tensor:
        mib = 256 if self.device.type == "cuda" else 16
        return torch.zeros(mib << 20, dtype=torch.uint8, device=self.device)

    def rand(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal values, the same on every device."""
        made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return made.to(dtype).to(self.device)

    def ints(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)
