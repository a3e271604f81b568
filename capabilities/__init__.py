"""Facts: the device, the installed libraries, what a call needs, what a kernel can do. Imports nothing of ours."""

from kernelmux.capabilities.attention import AttentionSpec, Batch, RunExtras, Runner
from kernelmux.capabilities.device import PRESETS, Device, detect, preset
from kernelmux.capabilities.errors import (
    BackendUnavailableError,
    CompileError,
    FallbackWarning,
    KernelMuxError,
    KernelMuxWarning,
    NoKernelError,
    PlanError,
    RegistryError,
    RuleError,
    SettingError,
    Unsupported,
)
from kernelmux.capabilities.kernel import Backend, Kernel
from kernelmux.capabilities.package import Package
from kernelmux.capabilities.reason import KINDS, Reason
from kernelmux.capabilities.request import Request, dtype_name, dtype_of
from kernelmux.capabilities.support import Limit, Support, dtype_combos

__all__ = [
    "KINDS",
    "PRESETS",
    "AttentionSpec",
    "Backend",
    "BackendUnavailableError",
    "Batch",
    "CompileError",
    "Device",
    "FallbackWarning",
    "Kernel",
    "KernelMuxError",
    "KernelMuxWarning",
    "Limit",
    "NoKernelError",
    "Package",
    "PlanError",
    "Reason",
    "RegistryError",
    "Request",
    "RuleError",
    "RunExtras",
    "Runner",
    "SettingError",
    "Support",
    "Unsupported",
    "detect",
    "dtype_combos",
    "dtype_name",
    "dtype_of",
    "preset",
]
