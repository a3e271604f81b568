"""On which architectures a kernel's conformance ran, as recorded beside this file: never typed by hand.

One JSON file per architecture holds, for each kernel id, the hash of the backend's sources at that time, the versions
it ran with, the number of cases and the date. A record of other sources than today's does not count.
"""

import hashlib
import importlib.util
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from kernelmux.capabilities.kernel import Kernel

HERE = Path(__file__).parent


@cache
def source_hash(target: str) -> str:
    """Hash of the Python and CUDA sources of the folder that holds a kernel's target."""
    spec = importlib.util.find_spec(target.partition(":")[0])
    if spec is None or spec.origin is None:
        return "unknown"
    folder = Path(spec.origin).parent
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".cu", ".cuh")):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:16]


@cache
def records() -> dict[str, dict[str, Any]]:
    """Recorded conformance by architecture ("sm90", "cpu"), as the JSON files hold it."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(HERE.glob("*.json"))}


def verified(kernel: Kernel) -> dict[str, dict[str, Any]]:
    """Architectures on which this very source passed its conformance, with the record of each."""
    found = {}
    for arch, record in records().items():
        entry = record["kernels"].get(kernel.id)
        if entry and entry["source"] == source_hash(kernel.target):
            found[arch] = {**entry, "gpu": record["gpu"], "versions": record["versions"], "date": record["date"]}
    return found


def record(
    arch: str, gpu: str, versions: dict[str, str], date: str, cases: Iterable[tuple[Kernel, int]], into: Path
) -> Path:
    """Write the outcome of a passed conformance run to `into`/arch.json, keeping other kernels' entries."""
    path = into / f"{arch}.json"
    kept = json.loads(path.read_text())["kernels"] if path.exists() else {}
    fresh = {k.id: {"source": source_hash(k.target), "cases": n} for k, n in cases}
    value = {"gpu": gpu, "date": date, "versions": versions, "kernels": dict(sorted({**kept, **fresh}.items()))}
    path.write_text(json.dumps(value, indent=1) + "\n")
    return path
