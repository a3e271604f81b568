"""Everything kernelmux raises or warns of its own; wrong shapes and dtypes are ValueError and TypeError."""


class KernelMuxError(RuntimeError):
    """Base of all errors of this library."""


class NoKernelError(KernelMuxError):
    """No kernel may serve the call: the message lists every candidate with its reasons."""


class BackendUnavailableError(KernelMuxError):
    """A backend was asked for by name, and it cannot be used on this machine."""


class SettingError(KernelMuxError):
    """An environment variable or a `prefer()` argument has a name or value that means nothing."""


class RuleError(KernelMuxError):
    """A policy file is unreadable or says something meaningless; names file, rule and key."""


class RegistryError(KernelMuxError):
    """Two backends or kernels claim one name, or a kernel's signature differs from its op's reference."""


class CompileError(KernelMuxError):
    """A kernel failed to compile; ends with the first compiler error and the path of the log."""


class PlanError(KernelMuxError):
    """A wrapper was run before plan(), or captured in a CUDA graph from a plan without use_cuda_graph."""


class Unsupported(Exception):
    """Raised by an adapter, before any launch, for a call it cannot run after all; the op picks the next kernel."""


class KernelMuxWarning(UserWarning):
    """Something slower or other than asked for happens."""


class FallbackWarning(KernelMuxWarning):
    """The reference serves CUDA tensors, or a kernel refused at run time."""
