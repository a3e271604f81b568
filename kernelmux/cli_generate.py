"""`kernelmux generate`: prompts in, text out, then how fast it was and which kernel served each op."""

import dataclasses
import json
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress, TaskID
from rich.table import Column, Table

import kernelmux as km
from kernelmux.engine import Checkpoint, Engine, Sampling, Sequence, install_demo_model, load
from kernelmux.terminal import err, out

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FIELDS: dict[str, Any] = {
    "prompt": str, "temperature": (int, float), "top_k": int, "top_p": (int, float), "min_p": (int, float), "seed": int,
    "max_new_tokens": int,
}  # fmt: skip


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="One or more prompts, served together.")] = None,
    prompt_file: Annotated[
        typer.FileText | None,
        typer.Option(help='More prompts, one a line: text, or JSON such as {"prompt": "Hi", "seed": 1}. "-": stdin.'),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A Llama-architecture folder or .gguf file. Default: SmolLM2-135M-Instruct.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt, at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Draw from the likeliest tokens that make up this share; 1 is off.")
    ] = 1.0,
    min_p: Annotated[float, typer.Option(help="Draw from tokens at least so likely as the likeliest; 0 is off.")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Prompt i draws with seed + i. Default: another one each time.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16. auto: bfloat16 on a GPU.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N. auto: a GPU if there is one.")] = "auto",
    page_size: Annotated[int, typer.Option(min=1, help="Tokens in a page of the KV cache.")] = 16,
    max_batch: Annotated[int, typer.Option(min=1, help="Prompts served at once; the others wait.")] = 16,
    cache_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens in the KV cache. 0: enough for all served at once.")
    ] = 0,
    no_chat: Annotated[
        bool, typer.Option("--no-chat", help="Continue the prompt itself, without a chat template.")
    ] = False,
    table: Annotated[bool, typer.Option("--table/--no-table", help="Show which kernel served each op.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, at the end.")] = False,
) -> None:
    """Generate text from a real model, with every op going through kernelmux."""
    defaults = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    defaults |= {"max_new_tokens": max_new_tokens}
    first = secrets.randbelow(2**31) if seed is None else seed
    lines = [{"prompt": p} for p in prompts or []] + (read_prompts(prompt_file) if prompt_file else [])
    if not lines:
        raise ValueError("there is no prompt; give one, or --prompt-file")
    requests = [{**defaults, "seed": first + i, **line} for i, line in enumerate(lines)]
    samplings = [_sampling(request) for request in requests]
    where = _device(device)
    kind = _dtype(dtype, where)
    start = time.perf_counter()
    checkpoint = _load(model or install_demo_model(lambda text: err.print(text, highlight=False)), kind, where)
    loaded = time.perf_counter() - start
    sequences = [
        Sequence(checkpoint.encode(r["prompt"], chat=not no_chat), s, r["max_new_tokens"], checkpoint.stop, i)
        for i, (r, s) in enumerate(zip(requests, samplings, strict=True))
    ]
    room = cache_tokens or _room(sequences, page_size, max_batch)
    engine = Engine(checkpoint.config, checkpoint.weights, page_size=page_size, cache_tokens=room, max_batch=max_batch)
    texts = Texts(checkpoint.tokenizer)
    with km.track():
        _run(engine, sequences, texts, None if as_json else [r["prompt"] for r in requests])
    speed = _speed(engine, sequences, loaded)
    if as_json:
        facts = {"device": str(where), "dtype": str(kind).removeprefix("torch."), "speed": speed}
        print(json.dumps({"requests": _results(requests, sequences, texts), **facts, "ops": _ops()}, indent=1))
        return
    out.print(f"\n{_speed_line(speed)}", highlight=False, soft_wrap=True)
    if table:
        out.print(_table())


def read_prompts(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Requests of a prompt file: a line is a prompt, or a JSON object with its own settings. Blank lines are skipped.

    >>> read_prompts(["Hello", '{"prompt": "Hi", "temperature": 0.5}'])
    [{'prompt': 'Hello'}, {'prompt': 'Hi', 'temperature': 0.5}]
    """
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip().startswith("{"):
            found.append(_read_object(number, line))
        elif line.strip():
            found.append({"prompt": line.strip()})
    return found


def _read_object(number: int, line: str) -> dict[str, Any]:
    try:
        request: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"prompt file line {number} is not JSON: {error}; write a JSON object or text") from None
    for key, value in request.items():
        if key not in FIELDS:
            raise ValueError(f"prompt file line {number} has {key!r}, which means nothing; use {', '.join(FIELDS)}")
        if not isinstance(value, FIELDS[key]) or isinstance(value, bool):
            raise ValueError(
                f"prompt file line {number}: {key} is {value!r}; give a {'text' if key == 'prompt' else 'number'}"
            )
    if "prompt" not in request:
        raise ValueError(f"prompt file line {number} has no 'prompt'; add one")
    if request.get("max_new_tokens", 1) < 1:
        raise ValueError(
            f"prompt file line {number}: max_new_tokens is {request['max_new_tokens']}, at least 1; raise it"
        )
    return request


def _sampling(request: dict[str, Any]) -> Sampling:
    return Sampling(**{f.name: request[f.name] for f in dataclasses.fields(Sampling)})


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ValueError(f"device is {name!r}, one of auto, cpu, cuda, cuda:N; choose one")
    count = torch.cuda.device_count()
    if kind == "cuda" and int(index or 0) >= count:
        raise ValueError(
            f"device is {name!r}, this machine has {count} CUDA devices; use --device cpu or another index"
        )
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}, one of auto, {', '.join(DTYPES)}; choose one")
    return DTYPES[name]


def _load(path: Path, dtype: torch.dtype, device: torch.device) -> Checkpoint:
    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(f"loading {what}", total=total)
            bar.update(tasks[what], completed=done)

        return load(path, dtype, device, report)


def _room(sequences: list[Sequence], page_size: int, max_batch: int) -> int:
    """Tokens of cache with which any `max_batch` of the sequences fit at once."""
    pages = sorted((-(-(len(s.tokens) + s.max_new_tokens) // page_size) for s in sequences), reverse=True)
    return sum(pages[:max_batch]) * page_size


class Texts:
    """The text of each sequence so far, as it grows."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.sent: dict[Sequence, str] = {}

    def grow(self, sequence: Sequence) -> str:
        """What a sequence's last token added; a character that is not complete yet waits for its other tokens."""
        text = self.tokenizer.decode(sequence.new_tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        before = self.sent.setdefault(sequence, "")
        if text.endswith("\ufffd") and not sequence.finished:
            return ""
        self.sent[sequence] = text
        added: str = text[len(before) :]
        return added


def _run(engine: Engine, sequences: list[Sequence], texts: Texts, prompts: list[str] | None) -> None:
    """Generate; print one prompt's text as it comes, several ones' when each is finished; `prompts` None: nothing."""
    for sequence in engine.generate(sequences):
        added = texts.grow(sequence)
        if prompts is None:
            continue
        if len(sequences) == 1:
            print(added, end="\n" if sequence.finished else "", flush=True)
        elif sequence.finished:
            print(f"[{sequence.name}] {prompts[sequence.name]}\n{texts.sent[sequence]}\n", flush=True)


def _results(requests: list[dict[str, Any]], sequences: list[Sequence], texts: Texts) -> list[dict[str, Any]]:
    return [
        {
            **request,
            "text": texts.sent[s],
            "tokens": s.new_tokens,
            "prompt_tokens": s.prompt_len,
            "finished": s.finished,
        }
        for request, s in zip(requests, sequences, strict=True)
    ]


def _speed(engine: Engine, sequences: list[Sequence], loaded: float) -> dict[str, Any]:
    totals = engine.totals
    return {
        **dataclasses.asdict(totals),
        "prefill_tokens_per_second": totals.prefill_tokens / max(totals.prefill_seconds, 1e-9),
        "decode_tokens_per_second": totals.decode_tokens / max(totals.decode_seconds, 1e-9),
        "new_tokens": sum(len(s.new_tokens) for s in sequences),
        "load_seconds": loaded,
    }


def _speed_line(speed: dict[str, Any]) -> str:
    parts = [f"{speed['new_tokens']} new tokens in {speed['steps']} steps"]
    for phase in ("prefill", "decode"):
        tokens, seconds = speed[f"{phase}_tokens"], speed[f"{phase}_seconds"]
        if tokens:
            rate = speed[f"{phase}_tokens_per_second"]
            parts.append(f"{phase} {rate:.1f} tokens/s ({tokens} in {seconds:.2f} s)")
    return "; ".join([*parts, f"loaded in {speed['load_seconds']:.1f} s"])


def _ops() -> list[dict[str, Any]]:
    return [dataclasses.asdict(use) for use in km.usage()]


def _table() -> Table:
    table = Table(*(Column(name, overflow="fold") for name in ("op", "kernel", "calls", "why")))
    for use in km.usage():
        op = f"{use.op}/{use.phase}" if use.phase else use.op
        table.add_row(op, use.kernel, str(use.calls), use.why)
    return table
