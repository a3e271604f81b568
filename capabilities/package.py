"""Is an installed library usable? Metadata, version and build flags, a guarded import, the toolchain: in this order."""

import importlib
import importlib.metadata as metadata
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from kernelmux.capabilities.reason import Reason

Flags = Callable[[], Reason | None]


@dataclass(frozen=True, slots=True)
class Package:
    """One library that a backend needs.

    `distributions`: names any of which will do, as pip knows them; `module`: what must import, the compiled module
    when there is one; `versions`: a PEP 440 range, judged by release number so that a post or local part does not
    take a version out of its range; `flags`: a function that judges the imported build; `tools`: programs on PATH.
    """

    distributions: tuple[str, ...]
    module: str
    versions: str = ""
    flags: Flags | None = None
    tools: tuple[str, ...] = ()
    install: str = ""
    requires: tuple["Package", ...] = field(default=())

    def problem(self) -> Reason | None:
        """None when usable, else the first reason why not. Never raises; cached for the life of the process."""
        return _problem(self)

    def version(self) -> str | None:
        """The installed version, or None. Reads metadata only."""
        return next((found for name in self.distributions if (found := _version(name))), None)


@cache
def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
    except Exception as error:  # unreadable metadata is "not usable", whatever it raises
        return f"unreadable: {type(error).__name__}"


def forget() -> None:
    """Drop cached probes (after an installation in this process, and in tests)."""
    _version.cache_clear()
    _problem.cache_clear()


@cache
def _problem(package: Package) -> Reason | None:
    for needed in package.requires:
        if reason := needed.problem():
            return reason
    found = package.version()
    if found is None:
        names = " or ".join(package.distributions)
        return Reason("missing", f"{names} is not installed", fix=package.install)
    if package.versions and (reason := _outside(package, found)):
        return reason
    if reason := _import(package.module, found):
        return reason
    try:
        if package.flags and (reason := package.flags()):
            return reason
    except Exception as error:
        return Reason("broken", f"{package.module} {found}", None, f"unavailable: {type(error).__name__}: {error}")
    for tool in package.tools:
        if shutil.which(tool) is None:
            return Reason("toolchain", f"{tool} is not on PATH", fix=f"{package.module} compiles with it at first use")
    return None


def _outside(package: Package, found: str) -> Reason | None:
    from packaging.specifiers import SpecifierSet  # not at the top: `import kernelmux` compares no versions
    from packaging.version import InvalidVersion, Version

    try:
        release = Version(Version(found).base_version)
    except InvalidVersion:
        return Reason("version", package.distributions[0], found, "not a version that can be compared")
    if SpecifierSet(package.versions).contains(release, prereleases=True):
        return None
    return Reason("version", package.distributions[0], found, f"needs {package.versions}", package.install)


def _import(module: str, found: str) -> Reason | None:
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(module, None)
        text = str(error).strip().split("\n")[0]
        hint = ""
        if "undefined symbol" in text or "cannot open shared object" in text:
            torch_version = _version("torch")
            hint = f"built for another torch or CUDA than torch {torch_version}: reinstall a wheel that matches"
        return Reason("broken", f"{module} {found}", None, f"unavailable: {type(error).__name__}: {text}", hint)
    return None
