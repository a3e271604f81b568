"""Compare a whole model computed through kernelmux with transformers, logits by logits, and ask it a question.

SmolLM2-135M in bf16 over three texts of about 200 tokens, teacher-forced: once as prompts (the prefill path) and once
token by token after a short prompt (the decode path). Each step's logits are compared with those of transformers' eager
attention in fp32; the error may be 1.5 times that of transformers' own bf16 plus a little. Exit status 1 otherwise.

    python benchmarks/compare_model.py
    python benchmarks/compare_model.py --backend reference --backend cudnn --backend flash_attn_3
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a source checkout: kernelmux need not be installed

import kernelmux as km
from kernelmux.engine import Engine, Sequence, install_demo_model, load

FACTOR, SLACK = 1.5, 0.003  # relative L2 error allowed: FACTOR times transformers' own, plus SLACK
STEP_SLACK = 0.02  # the same for the worst single step
AGREEMENT = 0.03  # how much less often our likeliest token may be fp32's, than that of transformers' bf16
PROMPT = 16  # tokens computed at once before the decode path starts
PROGRAM = '''def fibonacci(n):
    """Return the first n Fibonacci numbers."""
    numbers = [0, 1]
    while len(numbers) < n:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:n]


def is_prime(n):
    if n < 2:
        return False
    for divisor in range(2, int(n ** 0.5) + 1):
        if n % divisor == 0:
            return False
    return True


def greatest_common_divisor(a, b):
    while b:
        a, b = b, a % b
    return a


def main():
    for number in fibonacci(20):
        if is_prime(number):
            print(f"{number} is a prime number of Fibonacci")
'''
TEXTS = (
    "The capital of France is Paris, a city on the river Seine. It was founded more than two thousand years ago by a "
    "Celtic people, and it grew around an island on which a cathedral stands today. The city is known for its museums, "
    "its bridges and its bread. Every year, millions of people come to see a tower of iron that was built for a fair "
    "and was meant to stand for twenty years only. When the twenty years were over, engineers had found that it was a "
    "good place for a radio antenna, and so it was kept. Trains run from the city to every part of the country, and "
    "the fastest of them reach the sea in less than two hours. In the north of the city there is a hill with a white "
    "church, from which one can see all the roofs. Painters used to live there because the rent was low and the light "
    "was good. Today the rent is high, but the light has not changed, and there are still painters in the square.",
    PROGRAM,
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10. Water boils at 100 degrees Celsius and freezes at 0 degrees. In 1969, two people "
    "walked on the Moon for the first time, while a third one flew around it. The Moon is about 384,400 km away, and "
    "light takes 1.28 seconds to get there. The Sun is much farther: 149.6 million km, or 8 minutes and 20 seconds. "
    "Light from the nearest star travels for 4.2 years. Our galaxy has more than 100,000,000,000 stars, and there are "
    "at least as many galaxies. A human being has about 86,000,000,000 nerve cells. 12 x 12 = 144, 13 x 13 = 169, "
    "14 x 14 = 196, 15 x 15 = 225, 16 x 16 = 256. Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.",
)
QUESTION = "What is the capital of France?"


@dataclass(frozen=True)
class Error:
    """Against fp32, over the steps of one text."""

    max_abs: float
    rel_l2: float
    worst_step: float
    agreement: float

    def __str__(self) -> str:
        return (
            f"max abs {self.max_abs:.3f}, relative L2 {self.rel_l2:.4f}, worst step {self.worst_step:.4f}, "
            f"same likeliest token {self.agreement:.1%}"
        )


def error_of(logits: Tensor, exact: Tensor) -> Error:
    difference, exact = logits.double() - exact.double(), exact.double()
    steps = difference.norm(dim=-1) / exact.norm(dim=-1)
    same = (logits.argmax(-1) == exact.argmax(-1)).double().mean()
    return Error(
        float(difference.abs().max()), float(difference.norm() / exact.norm()), float(steps.max()), float(same)
    )


def problems(ours: Error, theirs: Error) -> list[str]:
    found = []
    for name, slack in (("rel_l2", SLACK), ("worst_step", STEP_SLACK)):
        limit = FACTOR * getattr(theirs, name) + slack
        if not getattr(ours, name) <= limit:  # NaN fails
            found.append(f"{name} is {getattr(ours, name):.4f}, at most {limit:.4f}")
    if not ours.agreement >= theirs.agreement - AGREEMENT:
        found.append(f"agreement is {ours.agreement:.1%}, at least {theirs.agreement - AGREEMENT:.1%}")
    return found


@torch.inference_mode()
def transformers_logits(path: Path, batch: list[list[int]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Logits [len, vocab] of each text. Loaded in its dtype: a later cast would round the rotary table too."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, attn_implementation="eager"
    )
    model = model.to(device).eval()
    return [model(torch.tensor([tokens], device=device)).logits[0].float().cpu() for tokens in batch]


@contextlib.contextmanager
def chosen(backend: str) -> Iterator[None]:
    """Attention by one backend, by the reference everywhere, or by what the rules say ("auto")."""
    if backend == "auto":
        yield
    elif backend == "reference":
        with km.prefer("reference"):
            yield
    else:
        with km.prefer(backend, scope="attention"):
            yield


def compare(engine: Engine, backend: str, batch: list[list[int]], exact: list[Tensor], theirs: list[Error]) -> int:
    """Both paths through one backend; the number of problems."""
    count = 0
    for path, prompt in (("prefill", None), ("decode", PROMPT)):
        start = time.perf_counter()
        with chosen(backend), km.track():
            ours = [logits.float().cpu() for logits in engine.forward(batch, prefill=prompt)]
        seconds = time.perf_counter() - start
        served = [f"{use.op}{'/' + use.phase if use.phase else ''} by {use.kernel} x{use.calls}" for use in km.usage()]
        print(f"\n{backend}, {path} path, {seconds:.1f} s; served: {', '.join(served)}")
        for number, (logits, right, other) in enumerate(zip(ours, exact, theirs, strict=True)):
            error = error_of(logits, right)
            wrong = problems(error, other)
            count += len(wrong)
            print(f"  text {number}: {error}: {'; '.join(wrong) or 'good'}", flush=True)
    return count


def ask(engine: Engine, checkpoint: Any) -> str:
    """The model's answer, greedy, through the scheduler and the sampler."""
    message = [{"role": "user", "content": QUESTION}]
    prompt = checkpoint.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    tokens = checkpoint.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    sequence = Sequence(tokens, max_new_tokens=40, stop=checkpoint.stop)
    for _ in engine.generate([sequence]):
        pass
    text: str = checkpoint.tokenizer.decode(sequence.new_tokens, skip_special_tokens=True)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", default=[], help='"auto", "reference" or a backend, repeatable')
    parser.add_argument("--tokens", type=int, default=210, help="longest text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    device = torch.device(given.device)
    path = install_demo_model(print)
    checkpoint = load(path, torch.bfloat16, device)
    batch = [checkpoint.tokenizer(text)["input_ids"][: given.tokens] for text in TEXTS]
    print(f"{path.name} on {device}, texts of {', '.join(str(len(tokens)) for tokens in batch)} tokens, bf16")
    exact = transformers_logits(path, batch, torch.float32, device)
    half = transformers_logits(path, batch, torch.bfloat16, device)
    theirs = [error_of(logits, right) for logits, right in zip(half, exact, strict=True)]
    print("\ntransformers' own bf16 against its fp32")
    for number, error in enumerate(theirs):
        print(f"  text {number}: {error}", flush=True)
    engine = Engine(checkpoint.config, checkpoint.weights)
    count = 0
    for backend in given.backend or ["auto"]:
        try:
            count += compare(engine, backend, batch, exact, theirs)
            with chosen(backend):
                answer = ask(engine, checkpoint)
            print(f"  {QUESTION} {answer!r}", flush=True)
            count += "Paris" not in answer
        except Exception as error:  # one backend that cannot serve must not hide the others
            print(f"\n{backend}: {type(error).__name__}: {error}", flush=True)
            count += 1
    print(f"\n{count} problems" if count else "\nall within tolerance")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
