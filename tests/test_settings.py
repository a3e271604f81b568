"""Environment variables: good, bad, retired, reserved and misspelt; the log; the record."""

import json
import re
from pathlib import Path

import pytest
import torch

import kernelmux
from kernelmux.capabilities import SettingError
from kernelmux.dispatch import settings as environment
from kernelmux.dispatch.op import Op
from kernelmux.dispatch.settings import Choice, read
from kernelmux.testing import call, installed, stub

BACKENDS = ["cudnn", "flash_attn_2", "flash_attn_3", "reference", "flash_attn_3:attention/decode"]
SCOPES = ["attention", "attention_decode", "gemm_mm_fp8"]


def parse(**env: str) -> environment.Settings:
    return read(BACKENDS, SCOPES, {f"KERNELMUX_{k}": v for k, v in env.items()} | {"PATH": "/bin", "OTHER": "1"})


def test_defaults() -> None:
    assert parse() == environment.Settings()


@pytest.mark.parametrize(
    ("text", "names", "auto", "never"),
    [
        ("cudnn", ("cudnn",), False, ()),
        ("cudnn,flash_attn_3,auto", ("cudnn", "flash_attn_3"), True, ()),
        ("!flash_attn_2", (), True, ("flash_attn_2",)),
        (" cudnn , !flash_attn_2 ", ("cudnn",), False, ("flash_attn_2",)),
        ("flash_attn_3:attention/decode", ("flash_attn_3:attention/decode",), False, ()),
        ("auto", (), True, ()),
    ],
)
def test_backend_grammar(text: str, names: tuple[str, ...], auto: bool, never: tuple[str, ...]) -> None:
    expected = Choice(names, auto, frozenset(never), "KERNELMUX_BACKEND")
    assert parse(BACKEND=text).backends[""] == expected


def test_narrower_scopes_are_read_and_marked() -> None:
    found = parse(BACKEND_ATTENTION="cudnn", BACKEND_ATTENTION_DECODE="flash_attn_3", BACKEND_GEMM_MM_FP8="auto")
    assert {scope: choice.exact for scope, choice in found.backends.items()} == {
        "attention": False,
        "attention_decode": True,
        "gemm_mm_fp8": True,
    }


def test_switches_paths_and_log() -> None:
    found = parse(STRICT="1", DETERMINISTIC="0", CHECK="1", POLICY="p.toml", LOGLEVEL="3", LOGDEST="log.%i", RECORD="r")
    assert (found.strict, found.deterministic, found.check) == (True, False, True)
    assert (found.policy, found.record, found.loglevel, found.logdest) == (Path("p.toml"), Path("r"), 3, "log.%i")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("BACKEND", "", "KERNELMUX_BACKEND is empty; give a backend such as cudnn, or unset it"),
        ("BACKEND", "FA2", "KERNELMUX_BACKEND names 'FA2', no backend of that name; did you mean 'flash_attn_2'?"),
        ("BACKEND", "fa3", "did you mean 'flash_attn_3'? valid: auto, cudnn, flash_attn_2, flash_attn_3, reference"),
        ("BACKEND", "INVALID", "no backend of that name; valid: auto, cudnn"),
        ("BACKEND", "flash_attn_3:attention/decod", "did you mean 'flash_attn_3:attention/decode'?"),
        ("BACKEND", "auto,cudnn", "KERNELMUX_BACKEND is 'auto,cudnn', 'auto' must come last"),
        ("BACKEND", "cudnn,!cudnn", "it both wants and excludes 'cudnn'"),
        ("BACKEND_ATENTION", "cudnn", "not a setting; did you mean 'KERNELMUX_BACKEND_ATTENTION'?"),
        ("STRICT", "yes", "KERNELMUX_STRICT is 'yes', 0 or 1"),
        ("LOGLEVEL", "2", "KERNELMUX_LOGLEVEL is '2', one of 0, 1, 3, 5"),
        ("LOGDEST", "", "KERNELMUX_LOGDEST is empty; give stdout, stderr or a path"),
        ("POLICY", "", "KERNELMUX_POLICY is empty; give a path or unset it"),
        ("BACKENDS", "cudnn", "KERNELMUX_BACKENDS is not a setting; did you mean 'KERNELMUX_BACKEND'?"),
        ("LOG_LEVEL", "1", "did you mean 'KERNELMUX_LOGLEVEL'?"),
        ("TUNED", "t", "KERNELMUX_TUNED has no effect yet: this version has no tuned tables; unset it"),
        ("VERIFY", "1", "KERNELMUX_VERIFY has no effect yet"),
        ("CROSSCHECK", "0.1", "KERNELMUX_CROSSCHECK has no effect yet"),
        ("CACHE_DIR", "d", "KERNELMUX_CACHE_DIR has no effect yet"),
    ],
)
def test_bad_names_and_values_raise_and_say_what_is_valid(name: str, value: str, message: str) -> None:
    with pytest.raises(SettingError, match=re.escape(message)):
        parse(**{name: value})


def test_a_retired_name_says_what_replaced_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environment.RETIRED, "KERNELMUX_OLD", "KERNELMUX_BACKEND")
    with pytest.raises(SettingError, match="KERNELMUX_OLD was retired; use KERNELMUX_BACKEND"):
        parse(OLD="1")


def test_a_bad_variable_raises_at_first_use_not_at_import(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELMUX_BACKNED", "cudnn")
    kernelmux.reload()
    with pytest.raises(SettingError, match="KERNELMUX_BACKNED is not a setting; did you mean 'KERNELMUX_BACKEND'"):
        call(op, torch.ones(2, 3))


def test_log_levels(op: Op, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERNELMUX_LOGDEST", str(tmp_path / "log.%i"))
    x = torch.tensor([[1.0, float("nan"), 3.0]])
    lines = {}
    for level in ("0", "1", "3", "5"):
        monkeypatch.setenv("KERNELMUX_LOGLEVEL", level)
        kernelmux.reload()
        with installed(stub("a")):
            call(op, x)
        lines[level] = "".join(p.read_text() for p in tmp_path.iterdir())
    assert lines["0"] == ""
    first = lines["1"].splitlines()
    assert first[0].startswith("kernelmux decision scratch") and "-> a:scratch because default: able" in first[0]
    assert first[1] == "kernelmux call scratch -> a:scratch"
    third = lines["3"][len(lines["1"]) :]
    assert "arg 0: [1, 3] float32 cpu stride [3, 1]\n" in third and "arg 1: None" in third
    fifth = lines["5"][len(lines["3"]) :]
    assert "min 1 max 3 mean 2 nan 1" in fifth


def test_an_unwritable_log_is_an_error(op: Op, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERNELMUX_LOGLEVEL", "1")
    monkeypatch.setenv("KERNELMUX_LOGDEST", str(tmp_path / "no" / "log"))
    kernelmux.reload()
    with pytest.raises(SettingError, match="No such file or directory; give a writable path"):
        call(op, torch.ones(2, 3))


def test_record_appends_each_decided_request(op: Op, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERNELMUX_RECORD", str(tmp_path / "requests.jsonl"))
    kernelmux.reload()
    for rows in (2, 2, 0):
        call(op, torch.ones(rows, 3))
    records = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [r["dims"] for r in records] == [{"rows": 2, "width": 3}]
    assert kernelmux.Request.from_json(records[0]).dims == {"rows": 2, "width": 3}


def test_check_runs_the_deep_check_before_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(x: torch.Tensor, out: object) -> None:
        if bool(x.isnan().any()):
            raise ValueError("x holds NaN")

    from kernelmux.testing import scratch_op

    bad = torch.tensor([[float("nan")]])
    with scratch_op(check=check) as op:
        call(op, bad)
        monkeypatch.setenv("KERNELMUX_CHECK", "1")
        kernelmux.reload()
        with pytest.raises(ValueError, match="x holds NaN"):
            call(op, bad)


def test_tracking_counts_calls_per_kernel(op: Op) -> None:
    with installed(stub("a")):
        with kernelmux.track():
            call(op, torch.ones(2, 3))
            call(op, torch.ones(2, 3))
        use = next(u for u in kernelmux.usage() if u.op == "scratch")
        assert (use.kernel, use.calls, use.why) == ("a:scratch", 2, "default: able")
        call(op, torch.ones(2, 3))
        assert use.calls == 2


def test_an_unwritable_record_is_an_error(op: Op, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERNELMUX_RECORD", str(tmp_path / "no" / "requests"))
    kernelmux.reload()
    with pytest.raises(SettingError, match=r"KERNELMUX_RECORD is .*: No such file or directory; give a writable path"):
        call(op, torch.ones(2, 3))
