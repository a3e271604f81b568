"""Odd arguments get a message of ours: tensors without dimensions, caches that share memory, other types."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernelmux as km

S, W, I = torch.tensor(1.0), torch.ones(1), torch.tensor([0])


def decode() -> None:
    wrapper = km.BatchDecodeWithPagedKVCacheWrapper(torch.empty(8, dtype=torch.uint8))
    wrapper.plan(torch.tensor([0, 1]), I, torch.tensor([1]), 1, 1, 4, 1, q_data_type="float32")
    wrapper.run(S, torch.ones(1, 2, 1, 1, 4))


CALLS: dict[str, Callable[[], Any]] = {
    "rmsnorm": lambda: km.rmsnorm(S, W),
    "fused_add_rmsnorm": lambda: km.fused_add_rmsnorm(S, S, W),
    "rmsnorm_quant": lambda: km.rmsnorm_quant(S.to(torch.float8_e4m3fn), S, W, 1.0),
    "layernorm": lambda: km.layernorm(S.bfloat16(), W, W),
    "silu_and_mul": lambda: km.silu_and_mul(S),
    "mm_bf16": lambda: km.mm_bf16(S, W[None]),
    "apply_rope": lambda: km.apply_rope(S, S, torch.tensor([0, 1]), I),
    "apply_rope_pos_ids": lambda: km.apply_rope_pos_ids(S, S, I),
    "apply_rope_with_cos_sin_cache": lambda: km.apply_rope_with_cos_sin_cache(I, S, S, 2, torch.ones(1, 2)),
    "get_seq_lens": lambda: km.get_seq_lens(I[0], I, 1),
    "get_batch_indices_positions": lambda: km.get_batch_indices_positions(I[0], I, 1),
    "nvfp4_kv_quantize": lambda: km.nvfp4_kv_quantize(S, W),
    "append_paged_kv_cache": lambda: km.append_paged_kv_cache(S, S, I, I, torch.ones(1, 2, 1, 1, 4), I, I, I),
    "softmax": lambda: km.softmax(S),
    "top_k": lambda: km.top_k(S, 1),
    "decode": decode,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_without_dimensions_is_refused_clearly(name: str) -> None:
    with pytest.raises(ValueError, match=r"shape|dimension|dims|\[rows"):
        CALLS[name]()


def test_a_negative_number_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="nnz is -4, at least 0"):
        km.get_batch_indices_positions(torch.tensor([0, 1]), torch.tensor([1]), -4)


K = torch.ones(1, 1, 4)
QKV = {"q": torch.ones(3, 1, 4), "k": torch.ones(5, 1, 4), "v": torch.ones(5, 1, 4)}
PROBS, MATRIX = torch.ones(1, 4), torch.ones(4, 4).bfloat16()


def append(cache: Any, **change: torch.Tensor) -> None:
    args = {"append_key": K, "append_value": K, "batch_indices": I, "positions": I, "paged_kv_cache": cache,
            "kv_indices": I, "kv_indptr": torch.tensor([0, 1]), "kv_last_page_len": torch.tensor([1])}  # fmt: skip
    km.append_paged_kv_cache(**{**args, **change})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: append((torch.ones(1, 2, 1, 4).expand(3, 2, 1, 4), torch.ones(3, 2, 1, 4))), ValueError, "written to"),
        (lambda: append(torch.ones(1, 2, 1, 1, 4), kv_indices=I[None]), ValueError, "kv_indices has shape [1, 1]"),
        (lambda: km.sampling_from_probs(PROBS, generator=3), TypeError, "generator is 3, it must be a torch.Generator"),
        (lambda: km.mm_bf16(MATRIX, MATRIX, out_dtype="float32"), TypeError, "out_dtype is 'float32', it must be"),
        (lambda: km.mm_bf16(MATRIX, MATRIX, backend=3), km.SettingError, "argument backend is 3, it must be"),
        (lambda: km.single_prefill_with_kv_cache(**QKV, backend=None), km.SettingError, "argument backend is None"),
        (lambda: km.single_prefill_with_kv_cache(**QKV, k_scale="a"), TypeError, "k_scale is a str, it must be"),
        (lambda: km.single_prefill_with_kv_cache(**QKV, v_scale=[1]), TypeError, "v_scale is a list, it must be"),
        (
            lambda: km.single_prefill_with_kv_cache(**QKV, custom_mask=torch.ones(5, 3, dtype=torch.bool)),
            ValueError,
            "custom_mask has shape [5, 3], it must be [3, 5]",
        ),
    ],
)
def test_odd_arguments_are_refused_by_name(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)
