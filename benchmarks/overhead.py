"""What dispatch costs: the hot path against a direct call of the chosen kernel, and `import kernelmux` against torch.

    python benchmarks/overhead.py [--check] [--json FILE]

The chosen kernel is replaced by a function that does nothing, so that all that is measured is ours: the public function
against a direct call of that function with the same arguments; medians of many batches, timed alternately.
`--check` exits with 1 when a call costs more than 2 µs over a direct one, or the import more than 0.2 s over torch.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

import kernelmux as km
from kernelmux.capabilities import Request
from kernelmux.dispatch.op import OPS, Op

CALL_LIMIT_US, IMPORT_LIMIT_S = 2.0, 0.2


def per_call(run: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) / count * 1e6


def compare(public: Callable[[], Any], direct: Callable[[], Any], count: int = 2000, rounds: int = 31) -> float:
    """Median over rounds of (public - direct), in µs; the two alternate so that drift hits both."""
    for run in (public, direct):
        per_call(run, count)
    return statistics.median(per_call(public, count) - per_call(direct, count) for _ in range(rounds))


def nothing(*args: Any) -> None:
    """The kernel of this benchmark: all that is left to measure is ours."""


def calls() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    x, w = torch.randn(2, 64), torch.ones(64)
    residual = torch.randn(2, 64)
    a, b = torch.randn(2, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16).t()
    gate = torch.randn(2, 128)
    q, k, positions = torch.randn(2, 4, 64), torch.randn(2, 2, 64), torch.arange(2, dtype=torch.int32)
    indptr, offsets = torch.tensor([0, 1, 2]), torch.tensor([5, 9])
    public = {
        "rmsnorm": lambda: km.rmsnorm(x, w),
        "fused_add_rmsnorm": lambda: km.fused_add_rmsnorm(x, residual, w),
        "silu_and_mul": lambda: km.silu_and_mul(gate),
        "mm_bf16": lambda: km.mm_bf16(a, b),
        "apply_rope_pos_ids": lambda: km.apply_rope_pos_ids(q, k, positions),
        "apply_rope": lambda: km.apply_rope(q, k, indptr, offsets),
    }
    found = {}
    for name, call in public.items():
        op = OPS[name]
        op.reset()
        seen: list[tuple[Any, ...]] = []
        with mock.patch.object(op, "select", partial(select, op)), mock.patch.object(op, "describe", spy(op, seen)):
            call()
        found[name] = (call, direct(seen[0]))
    return found


def direct(args: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: nothing(*args)


def select(op: Op, key: Any, request: Request, backend: str = "auto") -> Callable[..., Any]:
    """What Op.select gives, with nothing in the place of the kernel, and the guard that every kernel has."""
    return op._guard(nothing, key, op.decide(request, backend), backend)


def spy(op: Op, seen: list[tuple[Any, ...]]) -> Callable[..., Request]:
    describe = op.describe
    assert describe is not None

    def call(*args: Any) -> Request:
        seen.append(args)
        return describe(*args)

    return call


def import_seconds(rounds: int = 11) -> tuple[float, float]:
    """Medians of `import torch`, and of `import kernelmux` right after it in the same process."""
    code = (
        "import time; a = time.perf_counter(); import torch; b = time.perf_counter(); import kernelmux; "
        "print(b - a, time.perf_counter() - b)"
    )
    command = [sys.executable, "-c", code]
    outs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(rounds)]
    runs = [tuple(map(float, text.split())) for text in outs]
    return statistics.median(r[0] for r in runs), statistics.median(r[1] for r in runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():  # as a serving engine calls
        overhead = {name: compare(*pair) for name, pair in calls().items()}
    for name, cost in overhead.items():
        print(f"{name:24s} {cost:6.2f} µs over a direct call", flush=True)
    import_seconds(rounds=1)  # warm the file cache
    torch_s, ours_s = import_seconds()
    print(f"import kernelmux         {ours_s:6.3f} s after import torch ({torch_s:.2f} s)")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"overhead_us": overhead, "import_s": ours_s, "torch_import_s": torch_s}, file, indent=1)
    late = [n for n, c in overhead.items() if c > CALL_LIMIT_US] + ["import"] * (ours_s > IMPORT_LIMIT_S)
    if late and options.check:
        print(f"over the limit: {', '.join(late)}")
    return 1 if late and options.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
