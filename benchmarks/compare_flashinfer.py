"""Compare kernelmux's references with FlashInfer, function by function and feature by feature.

The reference of an op is its meaning, its oracle and its fallback at once: a meaning that was misread would be right
everywhere. So each one that FlashInfer can run here is compared with FlashInfer's own values.

    python benchmarks/compare_flashinfer.py --json compare.jsonl
    python benchmarks/compare_flashinfer.py --family rope --family norm
    python benchmarks/compare_flashinfer.py --prebuild        # only compile FlashInfer's modules
    python benchmarks/compare_flashinfer.py --show compare.jsonl

Several processes work side by side, as FlashInfer compiles each module at its first use; the cases of one module run
in the process that compiled it. Exit status 1 when a case is DIFFERENT.
"""

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # a source checkout: kernelmux is importable without being installed

from compare import families, pool, report, worker  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", default=[], choices=list(families.FAMILIES))
    parser.add_argument("--match", action="append", default=[], help="only cases whose family|function|features has it")
    parser.add_argument("--jobs", type=int, default=6, help="processes side by side")
    parser.add_argument("--json", help="append each row to this JSON Lines file as it comes")
    parser.add_argument("--seconds", type=float, default=570, help="stop here and report the rest as not run")
    parser.add_argument("--prebuild", action="store_true", help="only run the first case of each FlashInfer module")
    parser.add_argument("--peer", default="flashinfer", help="package to compare with")
    parser.add_argument("--device", default="")
    parser.add_argument("--show", metavar="FILE", help="print the table stored in a JSON Lines file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    start = time.monotonic()
    given = arguments()
    if given.show:
        report.show(given.show)
        return 0
    if given.worker:
        worker.serve(given.peer, given.device)
        return 0
    if importlib.util.find_spec(given.peer) is None:
        raise SystemExit(f"{given.peer} is not importable; install flashinfer-python, or give --peer")
    device = given.device or _device()
    jobs = max(1, given.jobs)
    os.environ.setdefault("MAX_JOBS", str(max(2, -(-3 * (os.cpu_count() or 2) // (2 * jobs)))))  # compilers per process
    cases = [c for c in families.load(given.family) if not given.match or any(text in c.id for text in given.match)]
    rows = report.Report(given.json)
    workers = pool.Pool(pool.command(__file__, given.peer, device), jobs, given.prebuild, rows.add)
    workers.run(families.groups(cases), start + given.seconds)
    if not given.prebuild:
        done = {(r["family"], r["function"], r["features"]) for r in rows.rows}
        for case in cases:
            if (case.family, case.function, case.features) not in done:
                rows.add({**worker.blank(case), "verdict": "not run: out of time"})
    different = rows.summary()
    print(f"{len(rows.rows)} cases against {given.peer} on {device} in {time.monotonic() - start:.0f} s")
    return 1 if different else 0


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
