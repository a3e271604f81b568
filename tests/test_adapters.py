"""Adapters of attention libraries, on emulated libraries: cases of the GPU's, and buffers that are rewritten."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from conformance import attention_cases, attention_run, edges, emulated

from kernelmux.backends.torch import attention_flash
from kernelmux.capabilities import Kernel
from kernelmux.dispatch import registry

BACKENDS = ("cudnn", "flash_attn_3", "torch")
CASES = {
    "bfloat16-bfloat16-bfloat16-plain", "causal", "causal-no-lse", "causal-window-31", "window-0", "single-rows",
    "four-rows", "heads-28-4", "dims-192-128", "page-1", "page-5", "page-64", "page-128", "fused-q", "hnd-fused-q",
    "k-nhd-v-hnd", "graph", "graph-causal", "graph-causal-window", "graph-no-lse", "graph-no-split",
}  # fmt: skip
NOT_EMULATED = ("torch:attention/cpu", "torch:attention/sdpa", "flash_attn_3:attention/fp8")


def kernels() -> list[Kernel]:
    found = [k for name in BACKENDS for k in registry.backends()[name].kernels if k.op == "attention"]
    return [k for k in found if not k.id.startswith(NOT_EMULATED)]


def shorter(case: attention_cases.Case) -> attention_cases.Case:
    return replace(case, **{n: tuple(min(x, 24 + x // 40) for x in getattr(case, n)) for n in ("q_lens", "kv_lens")})


def all_cases() -> Iterator[Any]:
    for kernel in kernels():
        for case in attention_cases.cases(kernel, edges.device_for(kernel)):
            if case.name in CASES:
                yield pytest.param(kernel, shorter(case), id=f"{kernel.id}-{case}")


@pytest.fixture(autouse=True)
def _libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.install_flash_attn_3(monkeypatch)
    emulated.install_cudnn(monkeypatch)
    monkeypatch.setattr(attention_flash, "_flash", emulated.torch_flash)


@pytest.mark.parametrize(("kernel", "case"), list(all_cases()))
def test_an_adapter_on_its_emulated_library(
    kernel: Kernel, case: attention_cases.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.graph:
        monkeypatch.setattr(attention_run, "replayed", lambda run: run)
    attention_run.check(kernel, case, torch.device("cpu"))


@pytest.mark.parametrize("kernel", kernels(), ids=lambda k: k.id)
def test_one_plan_serves_tensors_of_other_strides(kernel: Kernel) -> None:
    """As the layers of a model with different caches would: what a plan keeps is keyed by strides."""
    cases = attention_cases.cases(kernel, edges.device_for(kernel))
    case = shorter(next(c for c in cases if c.name == "causal"))
    first = attention_run._inputs(case, torch.device("cpu"))
    runner = kernel.load()(case.spec, first.batch)
    for other in (case, replace(case, fused_q=True), replace(case, hnd=case.page_size > 0, lse=False), case):
        inputs = attention_run._inputs(other, torch.device("cpu"))
        inputs.batch = first.batch
        attention_run._poison(inputs)
        runner(inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse, attention_run._scale(other), inputs.extras)
        attention_run._judge(other, inputs)
