"""The command line: readable and JSON output, errors in one line."""

import json
import re
import subprocess
import sys

import pytest

import kernelmux
from kernelmux import cli


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["kernelmux", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


def test_show_config_needs_no_gpu_and_no_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    code, out, _ = run(monkeypatch, capsys, "show-config", "--json")
    config = json.loads(out)
    assert code == 0
    assert {"kernelmux", "torch", "cuda", "driver", "device", "settings", "backends"} <= set(config)
    for entry in config["backends"].values():
        assert entry["usable"] or entry["reason"]
    assert config["backends"]["torch"]["usable"]
    assert run(monkeypatch, capsys, "show-config")[0] == 0


def test_show_config_shows_settings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KERNELMUX_BACKEND", "torch,auto")
    monkeypatch.setenv("KERNELMUX_BACKEND_NORM", "torch")
    monkeypatch.setenv("KERNELMUX_BACKEND_ATTENTION", "!cudnn")
    monkeypatch.setenv("KERNELMUX_CHECK", "1")
    monkeypatch.setenv("KERNELMUX_LOGDEST", "stdout")
    kernelmux.reload()
    _, out, _ = run(monkeypatch, capsys, "show-config", "--json")
    assert json.loads(out)["settings"] == {
        "backend all": "torch,auto", "backend norm": "torch", "backend attention": "!cudnn,auto", "check": "True",
        "logdest": "stdout",
    }  # fmt: skip


def test_list_shows_every_op_with_its_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(monkeypatch, capsys, "list", "--json")
    rows = json.loads(out)
    assert {"attention", "rmsnorm", "sampling_from_probs"} <= {r["op"] for r in rows}
    fa3 = next(r for r in rows if r["kernel"].startswith("flash_attn_3:attention"))
    assert fa3["declared"] == "sm {90}"
    code, out, _ = run(monkeypatch, capsys, "list", "rmsnorm")
    assert code == 0 and "reference:rmsnorm" in out


def test_narrow_terminals_cut_no_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli.out, "_width", 80)
    _, out, _ = run(monkeypatch, capsys, "list", "append_paged_kv_cache")
    names = "".join(line.split("│")[2].strip() for line in out.splitlines() if line.startswith("│"))
    assert names == "reference:append_paged_kv_cache"


def test_brackets_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli.out, "_width", 300)
    _, out, _ = run(monkeypatch, capsys, "show-config")
    assert "defaults" in out
    monkeypatch.setenv("KERNELMUX_LOGDEST", "calls[red].log")
    kernelmux.reload()
    assert "calls[red].log" in run(monkeypatch, capsys, "show-config")[1]


def test_version_and_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, capsys, "--version")[1].strip() == kernelmux.__version__
    assert "show-config" in run(monkeypatch, capsys)[1]


WORDS = ("attention/decode", "q=bfloat16", "kv=bfloat16", "out=bfloat16", "batch=16", "q_len=1", "kv_len=4096",
         "num_qo_heads=32", "num_kv_heads=8", "head_dim_qk=128", "head_dim_vo=128", "page_size=16")  # fmt: skip


def test_explain_for_a_gpu_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(monkeypatch, capsys, "explain", *WORDS, "features=cuda_graph", "--device", "H100", "--json")
    found = json.loads(out)
    assert found["kernel"].startswith("cudnn:attention")
    assert found["rule"] and found["why"]
    refused = {c["kernel"]: c["reasons"] for c in found["candidates"] if not c["able"]}
    assert all(refused.values())
    _, out, _ = run(monkeypatch, capsys, "explain", *WORDS, "--device", "B200", "--json")
    fa3 = [c for c in json.loads(out)["candidates"] if c["kernel"].startswith("flash_attn_3")]
    assert fa3 and all("needs sm must be 90" in " ".join(c["reasons"]) for c in fa3)
    _, out, _ = run(monkeypatch, capsys, "explain", "attention/decode", "--device", "H100")
    assert "head_dim_qk: the request does not say" in out and "not given, so not judged: q, kv, out, batch" in out
    _, out, _ = run(monkeypatch, capsys, "explain", *WORDS, "--device", "cpu")
    assert "chosen" in out and "candidates" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("explain", "nothing"), "op is 'nothing', one of"),
        (("explain", "attention"), "attention wants a phase: attention/decode"),
        (("explain", "attention/odd"), "phase is 'odd', attention has decode, prefill, ragged"),
        (("explain", "attention/decode", "batch=many"), "batch is 'many', it must be an integer"),
        (("explain", *WORDS, "odd"), "'odd' is not key=value"),
        (("explain", "attention/decode", "q=bf17"), "dtype is 'bf17'"),
        (("explain", *WORDS, "head_size=4"), "attention has no dimension 'head_size'; known: batch"),
        (("explain", *WORDS, "features=magic"), "attention has no feature 'magic'; known:"),
        (("explain", *WORDS, "--device", "V100"), "device is 'V100', one of T4"),
        (("explain", *WORDS, "--backend", "fa3"), "did you mean 'flash_attn_3'?"),
    ],
)
def test_errors_are_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 2
    assert re.search(re.escape(message), err), err
    assert "Traceback" not in err


def test_list_of_an_unknown_op_says_which_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(monkeypatch, capsys, "list", "nothing")
    assert code == 2 and "op is 'nothing', one of" in " ".join(err.split())


@pytest.mark.parametrize("words", [("rows=4", "rows=5"), ("x=bfloat16", "x=float16"), ("features=a", "features=b")])
def test_explain_refuses_what_is_given_twice(
    words: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(monkeypatch, capsys, "explain", "rmsnorm", *words)
    assert code == 2
    assert f"{words[0].partition('=')[0]} is given twice" in err


def test_the_package_is_the_command_line_too() -> None:
    done = subprocess.run([sys.executable, "-m", "kernelmux", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "show-config" in done.stdout
