"""Attention under torch.compile: whole graphs, the eager values, one compilation for many plans."""

import gc
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import kernelmux
from kernelmux import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithCausalBidirectionalRangesWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    PlanError,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
)
from kernelmux.dispatch.attention import compiled as attention_compiled

naive = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("naive_attention.py"))))
Paged, close, offsets = naive.Paged, naive.close, naive.offsets
F32 = torch.float32
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


def compiled(function: Any, backend: str, **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def workspace() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def plan_decode(wrapper: Any, case: Any, **options: Any) -> None:
    wrapper.plan(*case.tables, *case.heads, 16, 16, q_data_type=F32, **options)


@BACKENDS
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_decode_in_a_layer(backend: str, layout: str) -> None:
    case = Paged(q_lens=(1, 1, 1), layout=layout)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), layout)
    plan_decode(wrapper, case, sm_scale=0.3)

    def layer(x: Tensor, cache: Tensor) -> Tensor:
        return wrapper.run(x * 2, cache, k_scale=0.5, v_scale=2.0) + 1

    close(compiled(layer, backend)(case.q, case.single), case.expect(scale=0.3)[0] * 2 + 1)


@BACKENDS
def test_every_argument_of_run(backend: str) -> None:
    case = Paged()
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace())
    wrapper.plan(case.qo_indptr, *case.tables, 4, 2, 16, 16, causal=True, q_data_type=F32)
    sinks, scale = torch.randn(4), torch.tensor(0.5)
    per_head = (torch.rand(4), torch.rand(2), torch.rand(2))

    def call(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Any:
        results = wrapper.run(
            *(q, (k, v), *per_head), q_scale=scale, out=out, lse=lse, return_lse=True, lse_base="ln", sinks=sinks
        )
        return (*results, wrapper.run(q, (k, v), return_lse=True, lse_layout="HN")[1])

    results = [torch.zeros(6, 4, 16), torch.zeros(6, 4)]
    eager = call(case.q, *case.pair, *[r.clone() for r in results])
    found = compiled(call, backend)(case.q, *case.pair, *results)
    for a, b in zip(found, eager, strict=True):
        close(a, b, 1e-6)
    close(results[0], eager[0])
    close(results[1], eager[1])


@BACKENDS
def test_plans_change_without_compiling_again(backend: str) -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    run = compiled(lambda q, k, v: wrapper.run(q, (k, v)), counter)
    for seed, scale in enumerate([0.3, 0.4, 0.5]):
        case = Paged(q_lens=(1, 1, 1), kv_lens=(5, 33, 2 + seed), seed=seed)
        plan_decode(wrapper, case, sm_scale=scale, window_left=seed)
        close(run(case.q, *case.pair), case.expect(scale=scale, window=seed)[0])
    assert counter.frame_count == 1


@BACKENDS
def test_rows_may_be_dynamic(backend: str) -> None:
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace())
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    run = compiled(lambda q, k, v: wrapper.run(q, k, v), counter, dynamic=True)
    for rows in (6, 7, 10):  # none equals another dim, which would be taken for the same symbol
        case = Paged(q_lens=(rows,), kv_lens=(rows + 1,))
        wrapper.plan(case.qo_indptr, offsets((rows + 1,)), 4, 2, 16, q_data_type=F32, causal=True)
        close(run(case.q, case.ks[0], case.vs[0]), case.expect(causal=True)[0])
    assert counter.frame_count == 1


@BACKENDS
def test_forward_overrides(backend: str) -> None:
    case = Paged()
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace())
    wrapper.plan(case.qo_indptr, *case.tables, 4, 2, 16, 16, q_data_type=F32)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return wrapper.forward_return_lse(q, (k, v), causal=True, window_left=3, logits_soft_cap=2.0, sm_scale=0.5)

    out, lse = compiled(call, backend)(case.q, *case.pair)
    expected = case.expect(causal=True, window=3, cap=2.0, scale=0.5)
    close(out, expected[0])
    close(lse, expected[1])


@BACKENDS
def test_ranges(backend: str) -> None:
    case = Paged(q_lens=(4, 3), kv_lens=(6, 3))
    wrapper = BatchPrefillWithCausalBidirectionalRangesWrapper(workspace(), q_data_type=F32, kv_data_type=F32)
    wrapper.plan(case.qo_indptr, *case.tables, 4, 2, 16, 16)
    ranges = torch.tensor([[-1, -1], [3, 5], [3, 5], [3, 5], [0, 2], [0, 2], [-1, -1]], dtype=torch.int32)
    run = compiled(lambda q, k, v: wrapper.run(q, (k, v), ranges, 2, 1), backend)
    close(run(case.q, *case.pair), wrapper.run(case.q, case.pair, ranges, 2, 1))


@BACKENDS
def test_one_sequence(backend: str) -> None:
    q, k, v = torch.randn(5, 4, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    mask = torch.rand(5, 7) < 0.5

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        a, lse = single_prefill_with_kv_cache(q, k, v, causal=True, window_left=3, return_lse=True)
        b = single_prefill_with_kv_cache(q, k, v, custom_mask=mask, k_scale=0.5)
        return a, lse, b, single_decode_with_kv_cache(q[0], k, v, v_scale=2.0)

    for a, b in zip(compiled(call, backend)(q, k, v), call(q, k, v), strict=True):
        close(a, b, 1e-6)


def test_gradients_break_the_graph_and_flow_in_eager_mode() -> None:
    case = Paged(q_lens=(1, 1, 1))
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    plan_decode(wrapper, case)
    q = case.q.requires_grad_()
    out = torch.compile(lambda q, k, v: wrapper.run(q, (k, v)), backend="eager")(q, *case.pair)
    assert out.requires_grad
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(lambda q, k, v: wrapper.run(q, (k, v)), "eager")(q, *case.pair)
    with pytest.raises(ValueError, match=r"requires grad under torch.compile"):
        attention_compiled.refuse_grad(q, *case.pair)


def test_a_handle_does_not_keep_its_wrapper_alive() -> None:
    case = Paged(q_lens=(1, 1, 1))
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    plan_decode(wrapper, case)
    handle = wrapper._handle
    out = torch.empty(3, 4, 16)
    arguments = (handle, case.q, *case.pair, out, None, 1.0, *[None] * 8, -1, -1, False, None, -1, *[None] * 4)
    torch.ops.kernelmux.attention_run(*arguments)
    close(out, case.expect()[0])
    del wrapper
    gc.collect()
    with pytest.raises(PlanError, match=r"the wrapper of a compiled run\(\) is gone; keep it alive"):
        torch.ops.kernelmux.attention_run(*arguments)


@pytest.mark.parametrize("name", ["attention_run", "attention_single"])
def test_schemas_say_what_is_written(name: str) -> None:
    schema = getattr(torch.ops.kernelmux, name).default._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["out", "lse"]
    assert not schema.returns


def test_the_choice_is_the_eager_one() -> None:
    case = Paged(q_lens=(1, 1, 1))
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    with kernelmux.prefer("reference"):
        plan_decode(wrapper, case)
    compiled(lambda q, k, v: wrapper.run(q, (k, v)), "eager")(case.q, *case.pair)
    assert wrapper.resolved_backend == "reference"
