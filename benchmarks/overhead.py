"""What dispatch costs: the hot path against a direct call of the chosen kernel, and `import kernelmux` against torch.

    python benchmarks/overhead.py [--check] [--json FILE]

CPU tensors so small that the work is nothing; the median of many batches, both sides timed alternately with one clock.
`--check` exits with 1 when a call costs more than 2 µs over a direct one, or the import more than 0.2 s over torch.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import kernelmux as km
from kernelmux.dispatch.state import OPS

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


def direct(op: str, *args: Any) -> Callable[[], Any]:
    """The kernel that a public call has just chosen, without our guard around it."""
    request = OPS[op].describe(*args)  # type: ignore[misc]
    kernel = OPS[op].decide(request).kernel
    run = kernel.load()
    return lambda: run(*args)


def calls() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    x, w = torch.randn(2, 64), torch.ones(64)
    residual = torch.randn(2, 64)
    a, b = torch.randn(2, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16).t()
    gate = torch.randn(2, 128)
    q, k, positions = torch.randn(2, 4, 64), torch.randn(2, 2, 64), torch.arange(2, dtype=torch.int32)
    rope = (q, k, positions, 64, False, 1.0, 1e4)
    pairs: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
        "rmsnorm": (lambda: km.rmsnorm(x, w), (x, w, 1e-6, None)),
        "fused_add_rmsnorm": (lambda: km.fused_add_rmsnorm(x, residual, w), (x, residual, w, 1e-6)),
        "silu_and_mul": (lambda: km.silu_and_mul(gate), (gate, None)),
        "mm_bf16": (lambda: km.mm_bf16(a, b), None),  # type: ignore[dict-item]
        "apply_rope_pos_ids": (lambda: km.apply_rope_pos_ids(q, k, positions), rope),
    }
    found = {}
    for name, (public, args) in pairs.items():
        seen: list[tuple[Any, ...]] = []
        op = OPS[name]
        kept, op.cache = op.cache, {}
        pick = op.pick

        def spy(key: Any, given: Any, *rest: Any, pick: Any = pick, seen: list[Any] = seen) -> Any:
            seen.append(tuple(given))
            return pick(key, given, *rest)

        op.pick = spy  # type: ignore[method-assign]
        public()
        op.pick = pick  # type: ignore[method-assign]
        op.cache = kept
        found[name] = (public, direct(name, *seen[0]))
        del args
    return found


def import_seconds(statement: str, rounds: int = 9) -> float:
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    times = [float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
             for _ in range(rounds)]  # fmt: skip
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    overhead = {name: compare(*pair) for name, pair in calls().items()}
    for name, cost in overhead.items():
        print(f"{name:24s} {cost:6.2f} µs over a direct call", flush=True)
    import_seconds("import torch")  # warm the file cache
    alone, both = import_seconds("import torch"), import_seconds("import torch, kernelmux")
    print(f"import kernelmux         {both - alone:6.3f} s over import torch ({alone:.2f} s)")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"overhead_us": overhead, "import_s": both - alone, "torch_import_s": alone}, file, indent=1)
    late = [n for n, c in overhead.items() if c > CALL_LIMIT_US] + ["import"] * (both - alone > IMPORT_LIMIT_S)
    if late and options.check:
        print(f"over the limit: {', '.join(late)}")
    return 1 if late and options.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
