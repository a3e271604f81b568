"""A changed choice shows as a diff: (workload x device preset) -> kernel, every library taken as installed.

python tests/test_golden.py        rewrites tests/golden/choices.toml
"""

import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from workloads import WORKLOADS  # noqa: E402

import kernelmux  # noqa: E402, F401  (declares the ops)
from kernelmux.capabilities import PRESETS, NoKernelError  # noqa: E402
from kernelmux.dispatch.explain import explain  # noqa: E402

CHOICES = Path(__file__).parent / "golden" / "choices.toml"


def choices(workload: str) -> dict[str, str]:
    """The kernel of a workload on each preset, presets of one choice together."""
    found: dict[str, list[str]] = {}
    for name, device in PRESETS.items():
        try:
            kernel = explain(WORKLOADS[workload].request, device, installed=False).kernel.id
        except NoKernelError:  # in a CUDA graph, where the reference cannot stand in
            kernel = "none"
        found.setdefault(kernel, []).append(name)
    return {", ".join(presets): kernel for kernel, presets in found.items()}


def test_the_table_holds_the_workloads() -> None:
    assert list(tomllib.loads(CHOICES.read_text())) == list(WORKLOADS), "run: python tests/test_golden.py"


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_workload_goes_to_the_kernel_of_the_table(workload: str) -> None:
    expected = tomllib.loads(CHOICES.read_text()).get(workload)
    assert choices(workload) == expected, "if this change is meant, run: python tests/test_golden.py"


def rewrite() -> None:
    lines = ["# Written by `python tests/test_golden.py`: presets = the kernel that serves the workload there.", ""]
    for workload in WORKLOADS:
        lines.append(f'["{workload}"]')
        lines += [f'"{presets}" = "{kernel}"' for presets, kernel in choices(workload).items()]
        lines.append("")
    CHOICES.parent.mkdir(exist_ok=True)
    CHOICES.write_text("\n".join(lines))


if __name__ == "__main__":
    rewrite()
