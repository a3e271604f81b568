"""All cases, by family, and the order in which FlashInfer's modules are built."""

import importlib
from dataclasses import replace

from compare.case import Case

FAMILIES = {
    "attention": ("attention_decode", "attention_prefill", "attention_variants"),
    "merge": ("merge",),
    "page": ("page",),
    "norm": ("norm",),
    "activation": ("activation",),
    "rope": ("rope",),
    "sampling": ("sampling", "speculative", "logits_pipe"),
    "topk": ("topk",),
    "gemm": ("gemm",),
    "quantization": ("quantization",),
    "mask": ("mask",),
}

# Long builds first, so that they overlap with the rest; what few callers use last, in case the time runs out.
ORDER = (
    "topk", "sampling", "prefill", "fa3", "prefill-window", "rope", "norm", "decode", "prefill-cap", "prefill-alibi",
    "prefill-rope", "cascade", "page", "quantization", "single-prefill", "single-decode", "decode-fp8", "prefill-fp8",
    "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "decode-window-cap", "decode-alibi", "decode-rope", "sinks",
    "bidirectional", "ragged-192", "gemm", "nvfp4", "prefill-64", "prefill-256", "fa3-fp8", "decode-64", "decode-256",
    "prefill-fp16", "prefill-nvfp4", "fa3-window", "fa3-192", "prefill-alibi-cap", "sinks-window",
)  # fmt: skip


def load(families: list[str]) -> list[Case]:
    """Cases of these families (all when empty), each with its family's name."""
    found = []
    for family in families or FAMILIES:
        for name in FAMILIES[family]:
            found += [replace(c, family=family) for c in importlib.import_module(f"compare.{name}").cases()]
    return found


def groups(cases: list[Case]) -> list[list[Case]]:
    """Cases by module, in the order to run."""
    by_module: dict[str, list[Case]] = {}
    for case in cases:
        by_module.setdefault(case.module, []).append(case)
    return [by_module[name] for name in sorted(by_module, key=ORDER.index)]
