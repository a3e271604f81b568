"""Attention through FlashAttention-3's operator, without its Python wrapper, which costs twice the kernel's launch."""

import math

import torch
from torch import Tensor

from kernelmux.capabilities import AttentionSpec, Batch, RunExtras, Runner, Unsupported, detect
from kernelmux.capabilities.attention import NO_KEYS_LSE

LOG2E = math.log2(math.e)
MAX_SPLITS = 32
MAX_PARTIAL_BYTES = 1 << 28  # of the fp32 partial results that splitting allocates
TILE_ROWS = 128


def plan(spec: AttentionSpec, batch: Batch) -> Runner:
    """Plan one batch; the result is one operator call, and one multiplication when the LSE is wanted."""
    fwd = torch.ops.flash_attn_3.fwd.default
    dense = spec.phase == "decode"
    q_len = batch.total_q // batch.size if dense else batch.max_q_len
    q_starts, max_q = (None, None) if dense else (batch.qo_indptr, batch.max_q_len)
    paged = spec.page_size > 0
    kv_starts, max_kv = (None, None) if paged else (batch.kv_indptr, batch.max_kv_len)
    kv_len, table = (batch.kv_len(), batch.block_table()) if paged else (None, None)
    left, right = spec.window_left, 0 if spec.causal else -1
    splits = _splits(spec, batch, q_len)
    padded = spec.use_cuda_graph and not dense  # q may have rows of no sequence
    rows = torch.arange(batch.total_q, dtype=torch.int32, device=batch.device) if padded else batch.qo_indptr
    takes_sinks = len(fwd._schema.arguments) > 34
    keys = None if paged or batch.kv_lens is None else sum(batch.kv_lens)  # a tile may reach past the last key

    def run(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float, extras: RunExtras | None
    ) -> None:
        if keys is not None:
            k, v = k[:keys], v[:keys]
        if k.shape[0] == 0:  # the library's own answer would be an LSE of +inf
            return _no_keys(out, lse, extras)
        if padded:
            out.zero_()
        if dense:
            q, out = q.unflatten(0, (-1, q_len)), out.unflatten(0, (-1, q_len))
        sinks = () if extras is None or extras.sinks is None else (extras.sinks.to(torch.bfloat16),)
        if sinks and not takes_sinks:
            raise Unsupported("this build of flash_attn_3 takes no sinks")
        result = fwd(
            q, k, v, None, None, None, out, q_starts, kv_starts, None, None, kv_len, max_q, max_kv, table,
            None, None, None, None, None, None, None, None, scale, spec.causal, left, right, 0, 0.0, False,
            None, splits, None, 0, *sinks,
        )  # fmt: skip
        if lse is not None:
            natural = result[1].transpose(-1, -2)
            torch.mul(natural, LOG2E, out=lse.unflatten(0, (-1, q_len)) if dense else lse)
            if sinks:  # the library's LSE holds the sink, but for rows without keys
                torch.maximum(lse, sinks[0].float() * LOG2E, out=lse)
            if padded:
                lse.masked_fill_((rows[: lse.shape[0]] >= batch.qo_indptr[-1])[:, None], NO_KEYS_LSE)
        return None

    return run


def _no_keys(out: Tensor, lse: Tensor | None, extras: RunExtras | None) -> None:
    out.zero_()
    if lse is not None:
        lse.fill_(NO_KEYS_LSE)
        if extras is not None and extras.sinks is not None:
            lse.copy_(extras.sinks * LOG2E)


def _splits(spec: AttentionSpec, batch: Batch, q_len: int) -> int:
    """How many parts the keys of a sequence may be split into; 0 = the library's choice, made from the table's width.

    In graph mode that width is a capacity and says nothing about lengths: as many parts as fill the GPU when one long
    sequence stands among short ones. The kernel itself splits a sequence only as far as its length asks for.
    """
    if spec.disable_split:
        return 1
    if not spec.use_cuda_graph:
        return 0
    tiles = spec.num_kv_heads * math.ceil(q_len * spec.group_size / TILE_ROWS)
    partial = batch.total_q * spec.num_qo_heads * spec.head_dim_vo * 4
    fitting = MAX_PARTIAL_BYTES // max(1, partial)
    return max(1, min(detect(batch.device).sm_count // tiles, MAX_SPLITS, fitting))
