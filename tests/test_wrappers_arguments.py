"""Every argument of plan() and run(), on every backend: it changes the answer as it should, or it is refused."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelmux
from kernelmux import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)
from kernelmux.dispatch import registry

naive = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("naive_attention.py"))))
Paged, close, offsets = naive.Paged, naive.close, naive.offsets
pytestmark = pytest.mark.filterwarnings("ignore::kernelmux.FallbackWarning")
KINDS = ("decode", "prefill", "ragged")
Q_LENS, KV_LENS, HEADS, DIM = (2, 1, 3), (5, 0, 33), (8, 2), 64


class Argument:
    """Arguments of plan() and of run(), and what they mean to the formula; `factor` multiplies its output."""

    def __init__(self, plan: dict[str, Any], run: dict[str, Any], factor: float = 1.0, **formula: Any) -> None:
        self.plan, self.run, self.factor, self.formula = plan, run, factor, formula


def masks(q_lens: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    return [torch.rand(n, m, generator=g) < 0.6 for n, m in zip(q_lens, KV_LENS, strict=True)]


SINKS, SCALE = torch.linspace(-1, 3, HEADS[0]), DIM**-0.5
ARGUMENTS: dict[str, Argument] = {
    "sm_scale": Argument({"sm_scale": 0.5}, {}, scale=0.5),
    "causal": Argument({"causal": True}, {}, causal=True),
    "window_left": Argument({"window_left": 3}, {}, window=3),
    "window_left, causal": Argument({"window_left": 3, "causal": True}, {}, window=3, causal=True),
    "logits_soft_cap": Argument({"logits_soft_cap": 0.7}, {}, cap=0.7),
    "pos_encoding_mode": Argument({"pos_encoding_mode": "ALIBI"}, {}, alibi=True),
    "custom_mask": Argument({"custom_mask": torch.cat([m.flatten() for m in masks(Q_LENS)])}, {}, masks=masks(Q_LENS)),
    "sinks": Argument({}, {"sinks": SINKS}, sinks=SINKS),
    "q_scale": Argument({}, {"q_scale": 3.0}, scale=3 * SCALE),
    "k_scale": Argument({}, {"k_scale": 3.0}, scale=3 * SCALE),
    "v_scale": Argument({}, {"v_scale": 3.0}, 3.0),
    "q_scale and k_scale, tensors": Argument(
        {}, {"q_scale": torch.tensor([2.0]), "k_scale": torch.tensor([1.5])}, scale=3 * SCALE
    ),
    "v_scale, a tensor": Argument({}, {"v_scale": torch.tensor([3.0])}, 3.0),
    "o_scale": Argument({}, {"o_scale": 2.0}, 0.5),
}
NEVER = {
    "decode": {"causal", "window_left, causal", "custom_mask", "o_scale"},
    "prefill": {"o_scale"},
    "ragged": {"sinks"},
}
SERVED = {"sm_scale", "causal", "window_left, causal", "q_scale", "k_scale", "v_scale"}  # by every backend


def where() -> list[Any]:
    """Each backend that has attention, on this machine's CPU and on a GPU."""
    names = ["reference", *(n for n, b in registry.backends().items() if any(k.op == "attention" for k in b.kernels))]
    found = [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in names]
    return [pytest.param("reference", "cpu"), pytest.param("torch", "cpu"), *found]


def call(kind: str, case: Any, backend: str, device: str, argument: Argument, **more: Any) -> Any:
    def on(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    workspace, (qo, kv) = torch.empty(0, dtype=torch.uint8, device=device), HEADS
    plan = {"q_data_type": case.dtype, **{k: on(v) for k, v in argument.plan.items()}}
    run = {**{k: on(v) for k, v in argument.run.items()}, **more}
    q, cache = case.q.to(device), tuple(t.to(device) for t in case.pair)
    if kind == "decode":
        decode = BatchDecodeWithPagedKVCacheWrapper(workspace, backend=backend)
        decode.plan(*case.tables, qo, kv, DIM, case.page, **plan)
        return decode.run(q, cache, **run)
    if kind == "prefill":
        prefill = BatchPrefillWithPagedKVCacheWrapper(workspace, backend=backend)
        prefill.plan(case.qo_indptr, *case.tables, qo, kv, DIM, case.page, **plan)
        return prefill.run(q, cache, **run)
    ragged = BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=backend)
    ragged.plan(case.qo_indptr, offsets(KV_LENS), qo, kv, DIM, **plan)
    return ragged.run(q, torch.cat(case.ks).to(device), torch.cat(case.vs).to(device), **run)


@pytest.mark.parametrize(("backend", "device"), where())
@pytest.mark.parametrize("kind", KINDS)
def test_each_argument_is_applied_or_refused(kind: str, backend: str, device: str) -> None:
    if backend != "reference" and (reason := registry.backends()[backend].problem()):
        pytest.skip(f"missing: {reason}")
    dtype, tolerance = (torch.bfloat16, 3e-2) if device == "cuda" else (torch.float32, 1e-4)
    q_lens = (1, 1, 1) if kind == "decode" else Q_LENS
    case = Paged(q_lens=q_lens, kv_lens=KV_LENS, heads=HEADS, dims=(DIM, DIM), dtype=dtype)
    plain, refused = case.expect()[0], set()
    close(call(kind, case, backend, device, Argument({}, {})).cpu(), plain, tolerance)
    for name, argument in ARGUMENTS.items():
        if name in NEVER[kind]:
            continue
        out, sums = case.expect(**argument.formula)
        out = out * argument.factor
        assert (out - plain).abs().max() > 0.1, f"{name} changes nothing here"
        try:
            got, lse = call(kind, case, backend, device, argument, return_lse=True)
        except kernelmux.NoKernelError:
            try:  # some kernels have an output, but no LSE, with this argument
                got, lse = call(kind, case, backend, device, argument), None
            except kernelmux.NoKernelError:
                refused.add(name)
                continue
        close(got.cpu(), out, tolerance * max(1.0, argument.factor))
        if lse is not None:
            close(lse.cpu(), sums, tolerance)
    assert not refused & (SERVED if backend != "reference" else ARGUMENTS.keys()), refused


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_wrapper_has_no_argument_for_is_a_type_error(kind: str) -> None:
    q_lens = (1, 1, 1) if kind == "decode" else Q_LENS
    case = Paged(q_lens=q_lens, kv_lens=KV_LENS, heads=HEADS, dims=(DIM, DIM))
    for name in NEVER[kind]:
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            call(kind, case, "reference", "cpu", ARGUMENTS[name])
