"""The comparison with FlashInfer: its verdicts, and that it survives a side that crashes, hangs or lacks a name."""

import importlib
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def judged(kind, ours, theirs, explained=""):
    case = importlib.import_module("compare.case").Case("f", "x", "m", kind, None, explained)
    return importlib.import_module("compare.judge").judge(case, ours, theirs)[0]


def test_cases_are_distinct_and_every_module_has_its_place():
    families = importlib.import_module("compare.families")
    cases = families.load([])
    assert len({case.id for case in cases}) == len(cases) > 300
    assert {case.module for case in cases} == set(families.ORDER)


def test_verdicts_on_values():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert judged("elementwise", {"out": x}, {"out": x.clone()}) == "equal"
    assert judged("exact", {"out": x}, {"out": x.clone()}) == "equal"
    assert judged("exact", {"out": x * 1.02}, {"out": x}).startswith("DIFFERENT: out: rel L2")
    assert judged("elementwise", {"out": x.float()}, {"out": x}).startswith("DIFFERENT: out: float32, theirs bfloat16")
    assert judged("elementwise", {"out": x[1:]}, {"out": x}).startswith("DIFFERENT: out: shape [63, 32]")
    assert judged("elementwise", {"out": x * 1.02}, {"out": x}, "a quirk").startswith("explained: a quirk")
    assert judged("elementwise", {"out": x}, {"other": x}).startswith("DIFFERENT: results")


def test_infinities_must_stand_at_the_same_places():
    lse = torch.tensor([1.0, -math.inf, 2.0])
    assert judged("attention", {"lse": lse}, {"lse": lse.clone()}) == "equal"
    assert "not finite on one side" in judged("attention", {"lse": lse}, {"lse": lse.nan_to_num(neginf=0)})
    assert "not finite on one side" in judged("attention", {"lse": lse.abs()}, {"lse": lse})


def test_verdicts_on_distributions():
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])

    def draw(p, seed):
        return {"samples": torch.multinomial(p, 100000, True, generator=torch.Generator().manual_seed(seed)).int()}

    assert judged("exact", draw(p, 1), draw(p, 2)) == "equal"
    assert "distributions differ" in judged("exact", draw(p, 1), draw(torch.tensor([0.38, 0.32, 0.2, 0.1]), 2))
    assert "only ours draws [3]" in judged("exact", draw(p, 1), draw(torch.tensor([0.45, 0.33, 0.22, 0.0]), 2))


@pytest.mark.parametrize(
    ("peer", "verdict", "status"),
    [
        ("from kernelmux import *", "3 equal", 0),
        ("import os\ndef packbits(*_): os.abort()", "its process ended with status -6", 0),
        (
            "def packbits(*_): raise RuntimeError('no such kernel')",
            "flashinfer refuses: RuntimeError: no such kernel",
            0,
        ),
        ("", "flashinfer refuses: Missing: peer has no packbits", 0),
        ("import kernelmux\ndef packbits(x, order): return kernelmux.packbits(~x, order)", "3 DIFFERENT", 1),
    ],
)
def test_runs_to_the_end_whatever_the_peer_does(tmp_path, peer, verdict, status):
    (tmp_path / "peer.py").write_text(peer)
    command = [sys.executable, str(BENCHMARKS / "compare_flashinfer.py"), "--peer", "peer", "--device", "cpu"]
    command += ["--match", "|packbits|little, ", "--match", "|packbits|big, 64", "--jobs", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PYTHONPATH": f"{tmp_path}:{BENCHMARKS.parent}", "PATH": ""}
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert verdict in done.stdout
    assert "3 cases against peer on cpu" in done.stdout
