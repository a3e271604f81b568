"""Every declared kernel does what its Support says, at its edges and inside them; past an edge there is one reason."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conformance import edges, suite

from kernelmux.capabilities import Kernel
from kernelmux.dispatch import registry
from kernelmux.dispatch.state import OPS

ALL = [kernel for backend in registry.backends().values() for kernel in backend.kernels]


def all_cases() -> Iterator[Any]:
    for kernel in suite.kernels():
        marks = [pytest.mark.gpu] if suite.on_gpu(kernel) else []
        for case in suite.cases(kernel, edges.device_for(kernel)):
            yield pytest.param(kernel, case, id=f"{kernel.id}-{case}", marks=marks)


@pytest.mark.parametrize(("kernel", "case"), list(all_cases()))
def test_a_kernel_agrees_with_the_reference(kernel: Kernel, case: Any) -> None:
    problem = suite.problem(kernel)
    if problem is not None:
        pytest.skip(f"{problem.kind}: {problem}")
    suite.check(kernel, case)


@pytest.mark.parametrize("kernel", suite.kernels(), ids=lambda k: k.id)
def test_every_kernel_has_cases(kernel: Kernel) -> None:
    assert len(suite.cases(kernel, edges.device_for(kernel))) >= 5


@pytest.mark.parametrize("kernel", ALL, ids=lambda k: k.id)
def test_one_value_past_an_edge_gives_one_reason(kernel: Kernel) -> None:
    for name, request, device in edges.past_edges(kernel):
        reasons = kernel.support.reasons(request, device)
        assert len(reasons) == 1, f"{name}: {[str(r) for r in reasons]}"


@pytest.mark.parametrize("kernel", ALL, ids=lambda k: k.id)
def test_what_is_declared_is_served(kernel: Kernel) -> None:
    device = edges.device_for(kernel)
    for name, request in edges.within_edges(kernel):
        assert kernel.support.reasons(request, device) == [], name


@pytest.mark.parametrize("kernel", ALL, ids=lambda k: k.id)
def test_names_that_a_declaration_uses_exist(kernel: Kernel) -> None:
    op = OPS[kernel.op]
    assert set(kernel.support.dims) <= set(op.dims)
    assert set(kernel.support.roles) <= set(op.roles)
    assert kernel.support.features <= {*op.features, "grad"}
    assert set(kernel.support.phases) <= set(op.phases)
