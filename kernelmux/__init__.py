"""kernelmux: one API for LLM-inference operations, resolved to the best kernel this machine can run."""

from pathlib import Path

from kernelmux.version import __version__

_root = Path(__file__).parent.parent
if (_root / "dispatch").is_dir() and not (Path(__file__).parent / "dispatch").is_dir():
    __path__.append(str(_root))  # a source checkout on PYTHONPATH: kernelmux.dispatch is ../dispatch

__all__ = ["__version__"]
