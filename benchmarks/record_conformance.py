"""Run the conformance cases of the kernels that this machine can run, and record those that pass.

    python benchmarks/record_conformance.py FOLDER [--backend cudnn] [--gpu | --cpu] [--fail-fast]

Writes FOLDER/<arch>.json (sm90.json, cpu.json), to be copied to capabilities/verified/. A kernel is recorded when all
of its cases pass; the others are listed with their first failures, and the exit code is 1.
"""

import argparse
import datetime
import shutil
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from conformance import suite  # noqa: E402

from kernelmux.capabilities import Kernel, detect  # noqa: E402
from kernelmux.capabilities import verified as records  # noqa: E402
from kernelmux.dispatch import registry  # noqa: E402

FAILURES_SHOWN = 5


def run(kernel: Kernel, fail_fast: bool) -> tuple[int, list[str]]:
    """Number of cases of a kernel, and what failed."""
    cases = suite.cases(kernel, detect(suite.target(kernel)))
    failures = []
    for case in cases:
        try:
            suite.check(kernel, case)
        except Exception as error:
            failures.append(f"{case}: {type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}")
            if fail_fast or "CUDA error" in str(error):  # the device is lost for this process
                break
    return len(cases), failures


def versions(kernels: list[Kernel]) -> dict[str, str]:
    """Of torch, CUDA, cuDNN and each backend's library."""
    found = {"torch": torch.__version__}
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    for name in sorted({k.backend for k in kernels}):
        package = registry.backends()[name].package
        for distribution in package.distributions if package else ():
            try:
                found[distribution] = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
    return found


def record(passed: list[tuple[Kernel, int]], folder: Path) -> None:
    """One file per architecture, keeping what the repository has of kernels that did not run here."""
    by_arch: dict[str, list[tuple[Kernel, int]]] = {}
    for kernel, count in passed:
        by_arch.setdefault(detect(suite.target(kernel)).arch, []).append((kernel, count))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    for arch, cases in by_arch.items():
        kept = records.HERE / f"{arch}.json"
        if kept.exists() and kept.parent.resolve() != folder.resolve():
            shutil.copy(kept, folder)
        device = detect(suite.target(cases[0][0]))
        path = records.record(arch, device.name, versions([kernel for kernel, _ in cases]), today, cases, folder)
        print(f"wrote {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", action="append", help="only this backend; may be repeated")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpu", action="store_true", help="only kernels that run on the GPU")
    where.add_argument("--cpu", action="store_true", help="only kernels that run on the CPU")
    parser.add_argument("--fail-fast", action="store_true", help="leave a kernel at its first failure")
    asked: Any = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    passed: list[tuple[Kernel, int]] = []
    failed = False
    for kernel in suite.kernels():
        left_out = (asked.gpu and not suite.on_gpu(kernel)) or (asked.cpu and suite.on_gpu(kernel))
        if left_out or (asked.backend and kernel.backend not in asked.backend):
            continue
        if problem := suite.problem(kernel):
            print(f"{kernel.id}: not run: {problem}")
            continue
        start = time.perf_counter()
        count, failures = run(kernel, asked.fail_fast)
        took = f"{time.perf_counter() - start:.1f} s"
        if not failures:
            passed.append((kernel, count))
            print(f"{kernel.id}: {count} cases passed in {took}", flush=True)
            continue
        failed = True
        print(f"{kernel.id}: {len(failures)} of {count} cases failed in {took}", flush=True)
        for text in failures[:FAILURES_SHOWN]:
            print(f"    {text}")
    record(passed, asked.folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
