"""Call logging: 1 calls and decisions, 3 arguments, 5 statistics. Costs nothing when off."""

import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, TextIO

import torch

from kernelmux.capabilities import SettingError, dtype_name
from kernelmux.dispatch.decision import Decision


def _stream(destination: str) -> TextIO:
    if destination in ("stdout", "stderr"):
        return sys.stdout if destination == "stdout" else sys.stderr
    return _file(destination.replace("%i", str(os.getpid())), destination)


@cache
def _file(path: str, destination: str) -> TextIO:
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise SettingError(f"KERNELMUX_LOGDEST is {destination!r}: {error.strerror}; give a writable path") from error


def write(destination: str, text: str) -> None:
    """Write one record and flush it, so that it survives a crash of the call that follows."""
    stream = _stream(destination)
    stream.write(f"kernelmux {text}\n")
    stream.flush()


def logged(run: Callable[..., Any], decision: Decision, level: int, destination: str) -> Callable[..., Any]:
    """Wrap a kernel so that each of its calls is logged before it runs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        write(destination, f"call {decision.request.label} -> {decision.kernel.id}")
        if level >= 3:
            for i, value in enumerate([*args, *kwargs.values()]):
                write(destination, f"  arg {i}: {describe(value, statistics=level >= 5)}")
        return run(*args, **kwargs)

    return call


def describe(value: Any, statistics: bool = False) -> str:
    """One argument in a line: for tensors shape, dtype, device, stride and, outside graph capture, statistics."""
    if not isinstance(value, torch.Tensor):
        return repr(value)[:200]
    text = f"{list(value.shape)} {dtype_name(value.dtype)} {value.device} stride {list(value.stride())}"
    if not statistics or value.numel() == 0 or value.is_meta:
        return text
    if value.is_cuda and torch.cuda.is_current_stream_capturing():
        return text + " (statistics skipped: capturing a CUDA graph)"
    values = value.detach().to(torch.float64) if not value.is_complex() else value.detach().abs().double()
    nans = int(values.isnan().sum())
    finite = values[~values.isnan()]
    if finite.numel() == 0:
        return f"{text} nan {nans}"
    return f"{text} min {finite.min():.4g} max {finite.max():.4g} mean {finite.mean():.4g} nan {nans}"
