"""kernelmux: one API for LLM-inference operations, resolved to the best kernel this machine can run.

The public names, argument orders, defaults and meanings are FlashInfer's. Importing this package loads no vendor
library, touches no GPU and starts no compiler.
"""

from pathlib import Path

from kernelmux.version import __version__

_root = Path(__file__).parent.parent
if (_root / "dispatch").is_dir() and not (Path(__file__).parent / "dispatch").is_dir():
    __path__.append(str(_root))  # a source checkout on PYTHONPATH: kernelmux.dispatch is ../dispatch

from kernelmux.capabilities import (
    BackendUnavailableError,
    CompileError,
    Device,
    FallbackWarning,
    KernelMuxError,
    KernelMuxWarning,
    NoKernelError,
    PlanError,
    RegistryError,
    Request,
    RuleError,
    SettingError,
    detect,
)
from kernelmux.dispatch import *  # noqa: F403 - the public API, named once, in dispatch.__all__
from kernelmux.dispatch import __all__ as _api
from kernelmux.dispatch.explain import explain
from kernelmux.dispatch.state import prefer, reload, track, usage

__all__ = [
    *_api,
    "BackendUnavailableError",
    "CompileError",
    "Device",
    "FallbackWarning",
    "KernelMuxError",
    "KernelMuxWarning",
    "NoKernelError",
    "PlanError",
    "RegistryError",
    "Request",
    "RuleError",
    "SettingError",
    "__version__",
    "detect",
    "explain",
    "prefer",
    "reload",
    "track",
    "usage",
]
