"""The process that runs cases: reads case ids from stdin, one list per line, and answers with events on stdout.

Events are JSON lines: {"start": id, "side": "ours" | "theirs"}, {"row": {...}} and {"done": true}.
"""

import contextlib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import IO, Any

import torch
from compare.case import Case, Missing, Results, Side
from compare.families import load
from compare.judge import judge

SICK = 3  # exit status: the CUDA context is lost, go on in a new process


def serve(peer: str, device: str) -> None:
    """Answer until stdin ends. Whatever libraries print goes to stderr."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    cases = {case.id: case for case in load([])}
    sides = Side("kernelmux", torch.device(device), True), Side(peer, torch.device(device), False)
    for line in sys.stdin:
        job = json.loads(line)
        for name in job["ids"]:
            row = (_build if job["prebuild"] else _compare)(cases[name], sides, events)
            events.write(json.dumps({"row": row}) + "\n")
            if _sick(device):
                os._exit(SICK)
        events.write(json.dumps({"done": True}) + "\n")


def _compare(case: Case, sides: tuple[Side, Side], events: IO[str]) -> dict[str, Any]:
    row = blank(case)
    ours, row["ours_s"] = _attempt(case, sides[0], events)
    theirs, row["theirs_s"] = _attempt(case, sides[1], events)
    if isinstance(ours, Missing):
        row["verdict"] = f"MISSING: {ours}"
    elif isinstance(ours, BaseException):
        row["verdict"] = f"DIFFERENT: ours raises {_text(ours)}"
        if isinstance(theirs, BaseException):
            row["verdict"] += f"; flashinfer refuses: {_text(theirs)}"
    elif isinstance(theirs, BaseException):
        row["verdict"] = f"flashinfer refuses: {_text(theirs)}"
    else:
        row["verdict"], found = judge(case, ours, theirs)
        row.update(max_abs=found.max_abs, rel_l2=found.rel_l2, differing=found.differing)
    return row


def _build(case: Case, sides: tuple[Side, Side], events: IO[str]) -> dict[str, Any]:
    row = blank(case)
    theirs, row["theirs_s"] = _attempt(case, sides[1], events)
    row["verdict"] = f"flashinfer refuses: {_text(theirs)}" if isinstance(theirs, BaseException) else "built"
    return row


def blank(case: Case) -> dict[str, Any]:
    return {
        "family": case.family, "function": case.function, "features": case.features, "module": case.module,
        "max_abs": None, "rel_l2": None, "differing": None, "verdict": "", "ours_s": 0.0, "theirs_s": 0.0,
    }  # fmt: skip


def _attempt(case: Case, side: Side, events: IO[str]) -> tuple[Results | BaseException, float]:
    """Results, or what was raised (also asynchronously), and the seconds it took."""
    events.write(json.dumps({"start": case.id, "side": "ours" if side.ours else "theirs"}) + "\n")
    start = time.perf_counter()
    result: Results | BaseException
    try:
        with _reference() if side.package == "kernelmux" else contextlib.nullcontext():
            result = case.run(side)
        if side.device.type == "cuda":
            torch.cuda.synchronize(side.device)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        result = error
    return result, round(time.perf_counter() - start, 2)


@contextlib.contextmanager
def _reference() -> Iterator[None]:
    import kernelmux

    with kernelmux.prefer("reference"):
        yield


def _text(error: BaseException) -> str:
    """Type and message on one line, the end of a long one kept as well: compilers put the cause there."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 400 else f"{text[:250]} … {text[-150:]}"


def _sick(device: str) -> bool:
    if not device.startswith("cuda"):
        return False
    try:
        torch.zeros(1, device=device).item()
    except Exception:
        return True
    return False
