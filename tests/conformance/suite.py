"""All kernels and their cases."""

from types import ModuleType
from typing import Any

import torch

from conformance import attention_cases, attention_run, functional
from kernelmux.capabilities import Device, Kernel, Reason, detect
from kernelmux.dispatch import registry
from kernelmux.dispatch.state import OPS


def kernels() -> list[Kernel]:
    """Every declared kernel that has cases here."""
    return [
        k for b in registry.backends().values() for k in b.kernels if k.op == "attention" or k.op in functional.DRAFTS
    ]


def target(kernel: Kernel) -> torch.device:
    """Where the kernel's cases run on this machine."""
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu(kernel) else torch.device("cpu")


def on_gpu(kernel: Kernel) -> bool:
    return kernel.support.device == "cuda" or (kernel.support.device == "any" and torch.cuda.is_available())


def problem(kernel: Kernel) -> Reason | None:
    """Why the kernel cannot run on this machine, in the registry's words."""
    found = registry.backends()[kernel.backend].problem()
    if found is not None:
        return found
    device = detect(target(kernel)) if not on_gpu(kernel) or torch.cuda.is_available() else detect("cpu")
    return next(iter(kernel.support._device(device)), None)


def cases(kernel: Kernel, device: Device) -> list[Any]:
    return _module(kernel, attention_cases).cases(kernel, device)  # type: ignore[no-any-return]


def check(kernel: Kernel, case: Any) -> None:
    _module(kernel, attention_run).check(kernel, case, target(kernel))


def _module(kernel: Kernel, attention: ModuleType) -> ModuleType:
    return attention if OPS[kernel.op].planned else functional
