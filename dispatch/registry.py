"""Backends: every folder under backends/, and the entry points `kernelmux.backends` of other packages."""

import importlib
import importlib.metadata as metadata
import pkgutil
import re
from collections.abc import Iterable
from functools import cache

import kernelmux.backends
from kernelmux.capabilities import Backend, Kernel, Reason, RegistryError

GROUP = "kernelmux.backends"
REFERENCE = "reference"
_RESERVED = (REFERENCE, "auto")


@cache
def backends() -> dict[str, Backend]:
    """All declared backends by name. Loads declarations only, no vendor code; a broken outside package is reported."""
    return collect([*_own(), *_outside()])


def forget() -> None:
    """Scan again at next use (after an installation in this process, and in tests)."""
    backends.cache_clear()


def collect(found: Iterable[Backend]) -> dict[str, Backend]:
    """Index backends by name; RegistryError for a name or kernel id that two of them claim."""
    result: dict[str, Backend] = {}
    for backend in found:
        if backend.name in _RESERVED or not backend.name.isidentifier():
            raise RegistryError(f"backend name is {backend.name!r}, it must be an identifier other than {_RESERVED}")
        if backend.name in result:
            raise RegistryError(f"two backends are named {backend.name!r}; rename or uninstall one of them")
        ids = [kernel.id for kernel in backend.kernels]
        if twice := sorted({i for i in ids if ids.count(i) > 1}):
            raise RegistryError(f"backend {backend.name} declares {twice[0]} twice; give one of them another variant")
        result[backend.name] = backend
    return result


def kernels_of(op: str) -> list[Kernel]:
    """Every declared kernel of an op, in the order of their ids."""
    return sorted((k for b in backends().values() for k in b.kernels if k.op == op), key=lambda k: k.id)


def _own() -> Iterable[Backend]:
    for module in pkgutil.iter_modules(kernelmux.backends.__path__):
        if module.ispkg and not module.name.startswith("_"):
            yield importlib.import_module(f"kernelmux.backends.{module.name}").BACKEND


def _outside() -> Iterable[Backend]:
    """Other packages' backends. One that cannot be loaded is a backend with the reason why, and harms no other."""
    for point in metadata.entry_points(group=GROUP):
        try:
            backend = point.load()
            if not isinstance(backend, Backend):
                raise TypeError(f"it gives a {type(backend).__name__}, it must be a Backend")
        except (Exception, SystemExit) as error:
            broken = Reason("broken", f"entry point {point.value}", None, f"{type(error).__name__}: {error}")
            name = "outside_" + re.sub(r"\W", "_", point.name)
            yield Backend(name, point.value, (), broken=broken)
        else:
            yield backend
