"""LogitsPipe: processors one after another, compiled (fused) and not."""

from functools import partial
from typing import Any

import torch
from compare.case import Case, Results, Side
from compare.sampling import DRAWS, VOCAB

Processor = tuple[str, dict[str, Any]]
Steps = tuple[Processor, ...]


def pipe(
    side: Side, steps: Steps, given: dict[str, Any], rows: int = 8, probs: bool = False, compile: bool = True
) -> Results:
    x = side.rand(rows if rows < DRAWS else 1, VOCAB, seed=4).expand(rows, -1).contiguous()
    if probs:
        x = x.softmax(-1)
    made = [getattr(side, name)(**params) for name, params in steps]
    options: dict[str, Any] = {}
    if steps[0][0] in ("TopK", "Sample"):  # they take both
        options["input_type"] = side.TensorType.PROBS if probs else side.TensorType.LOGITS
    run = side.LogitsPipe(made, compile=compile, **options)
    if steps[-1][0] == "Sample":
        return {"samples": run(x, generator=torch.Generator(device=side.device).manual_seed(side.seed), **given)}
    return {"out": run(x, **given)}


NAMES = ("Temperature", "Softmax", "TopK", "TopP", "MinP", "Sample")
T, S, K, P, M, D = ((name, dict[str, Any]()) for name in NAMES)
JOINT: Processor = ("TopK", {"joint_topk_topp": True})
WAYS: tuple[tuple[str, Steps, dict[str, Any], bool], ...] = (
    ("Temperature, Softmax", (T, S), {"temperature": 0.6}, False),
    ("TopK of logits, Softmax", (K, S), {"top_k": 9}, False),
    ("Temperature, Softmax, TopK, TopP", (T, S, K, P), {"temperature": 0.6, "top_k": 20, "top_p": 0.7}, False),
    ("Softmax, MinP", (S, M), {"min_p": 0.2}, False),
    ("Temperature, Sample", (T, D), {"temperature": 0.6}, False),
    (
        "Temperature, Softmax, TopK, TopP, Sample",
        (T, S, K, P, D),
        {"temperature": 0.6, "top_k": 12, "top_p": 0.3},
        False,
    ),
    ("Softmax, joint TopK, TopP, Sample", (S, JOINT, P, D), {"top_k": 12, "top_p": 0.3}, False),
    ("TopK of probs, Sample", (K, D), {"top_k": 12}, True),
    ("TopP, Sample", (P, D), {"top_p": 0.3}, True),
    ("Softmax, MinP, Sample", (S, M, D), {"min_p": 0.4}, False),
)


def cases() -> list[Case]:
    found = []
    for features, steps, given, probs in WAYS:
        rows = DRAWS if steps[-1][0] == "Sample" else 8
        for compile in (True, False):
            run = partial(pipe, steps=steps, given=given, rows=rows, probs=probs, compile=compile)
            text = features if compile else f"{features}, compile=False"
            joint = "joint" in features and not compile
            why = "uncompiled, FlashInfer applies top_k first in spite of joint_topk_topp" if joint else ""
            found.append(Case("LogitsPipe", text, "sampling", "elementwise", run, explained=why))
    return found
