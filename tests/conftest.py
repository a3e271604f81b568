"""A clean environment for each test, and GPU skips that say why."""

import os
from collections.abc import Iterator

import pytest
import torch

import kernelmux
from kernelmux.dispatch.op import Op
from kernelmux.testing import scratch_op

torch.set_num_threads(1)  # two workers on few cores: more threads only wait for one another


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="device: no CUDA GPU on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _clean_environment() -> Iterator[None]:
    """Each test starts without our variables and leaves no decision behind."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("KERNELMUX_")]:
            patch.delenv(name)
        yield
    kernelmux.reload()


@pytest.fixture
def op() -> Iterator[Op]:
    with scratch_op() as made:
        yield made
