"""Named workloads: real models at real serving shapes, shared by benchmarks and by the golden table of choices.

python benchmarks/workloads.py [--part-of-a-name]     lists them
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from kernelmux.capabilities import AttentionSpec, Request
from kernelmux.dispatch.state import OPS

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Model:
    """Shapes of one model, per GPU: `tp` of them share its heads."""

    name: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    hidden: int
    intermediate: int
    head_dim_vo: int = 0
    window_left: int = -1
    soft_cap: float = 0.0
    sinks: bool = False
    tp: int = 1

    @property
    def heads(self) -> tuple[int, int]:
        return self.num_qo_heads // self.tp, max(1, self.num_kv_heads // self.tp)

    @property
    def dims(self) -> tuple[int, int]:
        return self.head_dim_qk, self.head_dim_vo or self.head_dim_qk


SMOLLM2_135M = Model("smollm2-135m", 9, 3, 64, 576, 1536)
LLAMA_8B = Model("llama-3.1-8b", 32, 8, 128, 4096, 14336)
LLAMA_70B_TP8 = Model("llama-3.1-70b-tp8", 64, 8, 128, 8192, 28672, tp=8)
QWEN3_235B_TP4 = Model("qwen3-235b-tp4", 64, 4, 128, 4096, 1536, tp=4)
DEEPSEEK_V3_TP8 = Model("deepseek-v3-tp8", 128, 128, 192, 7168, 2048, head_dim_vo=128, tp=8)  # as MHA, for prefill
GPT_OSS_120B = Model("gpt-oss-120b", 64, 8, 64, 2880, 2880, window_left=127, sinks=True)
GEMMA_2_27B = Model("gemma-2-27b", 32, 16, 128, 4608, 36864, window_left=4095, soft_cap=50.0)
MODELS = (SMOLLM2_135M, LLAMA_8B, LLAMA_70B_TP8, QWEN3_235B_TP4, DEEPSEEK_V3_TP8, GPT_OSS_120B, GEMMA_2_27B)


@dataclass(frozen=True)
class Attention:
    """One batch of attention of one layer: every sequence has q_len queries over kv_len keys."""

    name: str
    model: Model
    phase: str
    batch: int
    q_len: int
    kv_len: int
    page_size: int = 16
    causal: bool = True
    lse: bool = False
    graph: bool = False
    dtype: torch.dtype = BF16

    @property
    def spec(self) -> AttentionSpec:
        m = self.model
        return AttentionSpec(
            self.phase, *m.heads, *m.dims, 0 if self.phase == "ragged" else self.page_size,
            self.dtype, self.dtype, BF16 if self.dtype.itemsize == 1 else self.dtype, causal=self.causal,
            window_left=m.window_left, soft_cap=m.soft_cap, use_cuda_graph=self.graph,
        )  # fmt: skip

    @property
    def request(self) -> Request:
        from kernelmux.capabilities import Batch
        from kernelmux.dispatch.attention.op import LSE, SINKS, request_of

        nothing = torch.empty(0, dtype=torch.int32)
        spec, rows = self.spec, self.batch * self.q_len
        lengths = ((self.q_len,) * self.batch, (self.kv_len,) * self.batch)
        bounds = (self.batch, rows, self.q_len, self.kv_len, spec.page_size)
        batch = Batch(nothing.device, *bounds, nothing, nothing, nothing, nothing, *lengths)
        return request_of(spec, batch, (LSE if self.lse else 0) | (SINKS if self.model.sinks else 0))


@dataclass(frozen=True)
class Elementwise:
    """A norm or an activation over the hidden states of `rows` tokens."""

    name: str
    op: str
    rows: int
    hidden: int
    dtype: torch.dtype = BF16

    @property
    def request(self) -> Request:
        roles = [role for role in OPS[self.op].roles if role != "out"]
        dims = {"rows": self.rows, "heads": 1, "hidden": self.hidden}
        known = {d: n for d, n in dims.items() if d in OPS[self.op].dims}
        return Request(self.op, OPS[self.op].family, dtypes=dict.fromkeys(roles, self.dtype), dims=known)


@dataclass(frozen=True)
class Product:
    """A projection: [m, k] @ [k, n], the weight column-major."""

    name: str
    op: str
    m: int
    n: int
    k: int
    dtype: torch.dtype = BF16

    @property
    def request(self) -> Request:
        dtypes = dict.fromkeys(("a", "b", "out"), self.dtype)
        return Request(self.op, "gemm", dtypes=dtypes, dims={"m": self.m, "n": self.n, "k": self.k})


Workload = Attention | Elementwise | Product


def _attention() -> Iterator[Attention]:
    for model in MODELS:
        if model is not DEEPSEEK_V3_TP8:  # decodes by MLA, another op
            for batch, kv_len in ((1, 4096), (1, 32768), (16, 4096), (64, 4096), (256, 2048)):
                name = f"{model.name}-decode-b{batch}-kv{kv_len}"
                yield Attention(name, model, "decode", batch, 1, kv_len, causal=False, graph=True)
            yield Attention(f"{model.name}-decode-eager-b64-kv4096", model, "decode", 64, 1, 4096, causal=False)
            yield Attention(f"{model.name}-verify-b16-q4-kv4096", model, "decode", 16, 4, 4096, graph=True)
            yield Attention(f"{model.name}-prefill-b1-q4096", model, "prefill", 1, 4096, 4096)
            yield Attention(f"{model.name}-prefill-b4-q2048-kv16384", model, "prefill", 4, 2048, 16384)
        yield Attention(f"{model.name}-ragged-b1-q16384", model, "ragged", 1, 16384, 16384, lse=True)
    llama = Attention("", LLAMA_8B, "decode", 64, 1, 4096, causal=False, graph=True)
    for page_size in (1, 64, 128):
        yield replace(llama, name=f"llama-3.1-8b-decode-page{page_size}-b64-kv4096", page_size=page_size)
    yield replace(llama, name="llama-3.1-8b-decode-lse-b64-kv4096", lse=True)
    yield replace(llama, name="llama-3.1-8b-decode-fp16-b64-kv4096", dtype=torch.float16)
    yield replace(llama, name="llama-3.1-8b-decode-fp8-b64-kv4096", dtype=torch.float8_e4m3fn)
    prefill = Attention("", LLAMA_8B, "prefill", 4, 2048, 16384)
    yield replace(prefill, name="llama-3.1-8b-prefill-page128-b4-q2048-kv16384", page_size=128)
    yield replace(prefill, name="llama-3.1-8b-prefill-not-causal-b4-q2048-kv16384", causal=False)


def _dense() -> Iterator[Workload]:
    for model in (SMOLLM2_135M, LLAMA_8B):
        for rows in (1, 64, 4096):
            for op in ("rmsnorm", "fused_add_rmsnorm"):
                yield Elementwise(f"{model.name}-{op}-{rows}", op, rows, model.hidden)
            yield Elementwise(f"{model.name}-silu_and_mul-{rows}", "silu_and_mul", rows, model.intermediate)
            yield Product(f"{model.name}-up-{rows}", "mm_bf16", rows, 2 * model.intermediate, model.hidden)


WORKLOADS: dict[str, Workload] = {w.name: w for w in (*_attention(), *_dense())}


def named(part: str) -> list[Workload]:
    """The workloads with `part` in their names; ValueError when there is none."""
    found = [w for name, w in WORKLOADS.items() if part in name]
    if not found:
        raise ValueError(f"no workload has {part!r} in its name; python benchmarks/workloads.py lists them")
    return found


if __name__ == "__main__":
    import kernelmux  # noqa: F401  (declares the ops)

    for workload in named(sys.argv[1].lstrip("-") if len(sys.argv) > 1 else ""):
        print(f"{workload.name:48} {workload.request}")
