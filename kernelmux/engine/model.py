"""The forward pass of a Llama-architecture model, each op a kernelmux call (but for the embedding, a plain gather)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kernelmux as km
from kernelmux.engine.config import ModelConfig
from kernelmux.engine.scheduler import Step

WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True, eq=False)
class Layer:
    """Weights of one layer, [out, in] each; q, k, v and gate, up are fused along `out`."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, eq=False)
class Weights:
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor  # the embedding itself when the two are tied


class Llama:
    """Weights and the two attention wrappers: one for rows that compute one token, one for prompt chunks."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config, self.weights = config, weights
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        self.rope_table = None if config.rope.table is None else config.rope.table.to(self.device)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self.decode = km.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        self.prefill = km.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    def forward(self, step: Step, pages: Tensor) -> Tensor:
        """Compute a step's tokens, adding their keys and values to `pages`; return normed states [tokens, hidden]."""
        config, page_size = self.config, pages.shape[3]
        self._plan(step, page_size)
        on_device = [x.to(self.device, non_blocking=True) for x in (step.qo_indptr, step.kv_indptr, step.last_page_len)]
        qo_indptr, kv_indptr, last_page_len = on_device
        kv_indices = step.kv_indices.to(self.device, non_blocking=True)
        lengths = km.get_seq_lens(kv_indptr, last_page_len, page_size)
        batch_indices, positions = km.get_batch_indices_positions(qo_indptr, lengths, len(step.tokens))

        residual = self.weights.embedding[step.tokens.to(self.device)]
        x = km.rmsnorm(residual, self.weights.layers[0].attention_norm, config.eps)
        next_norms = [layer.attention_norm for layer in self.weights.layers[1:]] + [self.weights.norm]
        for layer, kv, next_norm in zip(self.weights.layers, pages, next_norms, strict=True):
            q, k, v = self._project(x, layer.qkv)
            self._rotate(q, k, positions)
            km.append_paged_kv_cache(k, v, batch_indices, positions, kv, kv_indices, kv_indptr, last_page_len)
            x = _linear(self._attend(q, kv, step.decode).flatten(1), layer.out)
            km.fused_add_rmsnorm(x, residual, layer.mlp_norm, config.eps)
            x = _linear(km.silu_and_mul(_linear(x, layer.gate_up)), layer.down)
            km.fused_add_rmsnorm(x, residual, next_norm, config.eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [rows, vocab] of hidden states [rows, hidden]; rounded to bf16, the likeliest tokens would often tie."""
        return km.mm_bf16(hidden, self.weights.head.t(), out_dtype=torch.float32)

    def _plan(self, step: Step, page_size: int) -> None:
        """Decide and prepare attention once per step, for all layers."""
        c, n = self.config, step.decode
        shape = (c.heads, c.kv_heads, c.head_dim, page_size)
        dtypes: dict[str, Any] = {"q_data_type": self.dtype, "kv_data_type": self.dtype, "window_left": c.window_left}
        pages = step.kv_indptr[n].item()
        if n:
            table = (step.kv_indptr[: n + 1], step.kv_indices[:pages], step.last_page_len[:n])
            self.decode.plan(*table, *shape, **dtypes)
        if n < len(step.last_page_len):
            table = (step.kv_indptr[n:] - pages, step.kv_indices[pages:], step.last_page_len[n:])
            self.prefill.plan(step.qo_indptr[n:] - n, *table, *shape, causal=True, **dtypes)

    def _project(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        heads = _linear(x, weight).unflatten(-1, (c.heads + 2 * c.kv_heads, c.head_dim))
        q, k, v = heads.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
        return q, k, v

    def _rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> None:
        rope = self.config.rope
        if self.rope_table is not None:
            flat = (q.view(len(q), -1), k.view(len(k), -1))
            km.apply_rope_with_cos_sin_cache_inplace(positions, *flat, self.config.head_dim, self.rope_table)
        elif rope.kind == "llama31":
            km.apply_llama31_rope_pos_ids_inplace(
                q, k, positions, rope.dim, False, rope.scale, rope.theta, rope.low, rope.high, rope.old_context
            )
        else:
            km.apply_rope_pos_ids_inplace(q, k, positions, rope.dim, False, rope.scale, rope.theta)

    def _attend(self, q: Tensor, kv: Tensor, decode: int) -> Tensor:
        """Attention of the decode rows (the first `decode` tokens) and of the prompt chunks (the others)."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if decode:
            self.decode.run(q[:decode], kv, out=out[:decode])
        if decode < len(q):
            self.prefill.run(q[decode:], kv, out=out[decode:])
        return out


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return km.mm_bf16(x, weight.t(), out_dtype=x.dtype)
