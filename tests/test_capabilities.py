"""Limits and Support as the only judge; package probes; devices; reasons."""

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernelmux.capabilities import (
    KINDS,
    PRESETS,
    Limit,
    Package,
    Reason,
    Request,
    Support,
    detect,
    dtype_combos,
    preset,
)
from kernelmux.capabilities.package import forget

H100, B200, T4, CPU = (PRESETS[n] for n in ("H100", "B200", "T4", "CPU"))
ROLES, COMBOS = dtype_combos("q kv", "bf16 bf16", "bf16 e4m3")
SUPPORT = Support(
    arch=Limit(min=80, max=90),
    phases=("decode",),
    roles=ROLES,
    dtypes=COMBOS,
    dims={"head_dim": Limit(max=256, multiple_of=8), "page_size": Limit(one_of=(16, 64))},
    features=frozenset({"causal"}),
)


def asks(**kwargs: object) -> Request:
    plain = {
        "phase": "decode",
        "dtypes": {"q": torch.bfloat16, "kv": torch.bfloat16},
        "dims": {"head_dim": 128, "page_size": 16},
    }
    return Request("attention", "attention", **{**plain, **kwargs})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "device", "text"),
    [
        ({}, CPU, "the device is cpu, needs a cuda device"),
        ({}, T4, "the GPU is sm75, needs sm at least 80"),
        ({}, B200, "the GPU is sm100, needs sm at most 90"),
        ({"phase": "prefill"}, H100, "phase is prefill, one of decode"),
        ({"features": {"causal", "sinks"}}, H100, "sinks: not supported by this kernel"),
        ({"grad": True}, H100, "grad: this kernel is not differentiable (call it under torch.no_grad())"),
        (
            {"dtypes": {"q": torch.float16, "kv": torch.bfloat16}},
            H100,
            "q/kv is float16/bfloat16, one of bfloat16/bfloat16, bfloat16/float8_e4m3fn",
        ),
        ({"dtypes": {"q": torch.bfloat16, "sf": torch.uint8}}, H100, "sf is uint8, this kernel names no dtypes for it"),
        ({"dims": {"head_dim": 264, "page_size": 16}}, H100, "head_dim is 264, at most 256 on sm90"),
        ({"dims": {"head_dim": 100, "page_size": 16}}, H100, "head_dim is 100, a multiple of 8 on sm90"),
        ({"dims": {"head_dim": 128, "page_size": 32}}, H100, "page_size is 32, one of 16, 64 on sm90"),
    ],
)
def test_one_value_past_a_limit_gives_exactly_one_reason(changed: dict, device: object, text: str) -> None:  # type: ignore[type-arg]
    assert SUPPORT.reasons(asks(), H100) == []
    assert [str(r) for r in SUPPORT.reasons(asks(**changed), device)] == [text]  # type: ignore[arg-type]


def test_reasons_come_gravest_first_and_also_adds_to_them() -> None:
    support = Support(
        arch=Limit(min=80),
        dims={"d": Limit(max=1)},
        also=lambda request, device: [Reason("dtype", "odd", None, "pairing")],
    )
    found = support.reasons(Request("o", "f", dims={"d": 2}, features=frozenset({"x"})), H100)
    assert [r.kind for r in found] == ["feature", "dtype", "shape"]
    assert list(KINDS) == sorted(KINDS, key=lambda k: Reason(k, "x").rank)


def test_an_unknown_reason_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="reason kind is 'odd', one of broken"):
        Reason("odd", "x")


@pytest.mark.parametrize(
    ("limit", "good", "bad", "edges"),
    [
        (Limit(min=3), [3, 9], [2], {3}),
        (Limit(max=3), [0, 3], [4], {4}),
        (Limit(multiple_of=4), [0, 8], [2], set()),
        (Limit(one_of=(5, 7)), [5, 7], [4, 6, 8], {5, 6, 7, 8}),
    ],
)
def test_limits(limit: Limit, good: list[int], bad: list[int], edges: set[int]) -> None:
    assert all(limit.problem(v) is None for v in good)
    assert all(limit.problem(v) for v in bad)
    assert limit.thresholds == edges


def test_requests_survive_json() -> None:
    request = asks(features={"causal"}, grad=True)
    assert Request.from_json(request.as_json()).as_json() == request.as_json()
    with pytest.raises(ValueError, match="request has the unknown key 'odd'"):
        Request.from_json({"odd": 1})
    with pytest.raises(ValueError, match="dtype is 'nothing', not a name of a torch dtype"):
        Request.from_json({"op": "o", "family": "f", "dtypes": {"q": "nothing"}})


def test_presets_cover_every_gpu_and_names_are_forgiving() -> None:
    assert {"T4", "A100", "A10", "L40S", "H100", "H200", "B200", "B300", "Thor", "RTX5090", "GB10", "CPU"} <= set(
        PRESETS
    )
    assert preset("rtx 5090") is PRESETS["RTX5090"]
    with pytest.raises(ValueError, match="device is 'V100', one of T4"):
        preset("V100")


def test_detect_without_a_gpu_is_the_cpu() -> None:
    assert detect("cpu") is PRESETS["CPU"]
    if not torch.cuda.is_available():
        assert detect() is PRESETS["CPU"]


@pytest.mark.gpu
def test_detect_reads_the_gpu() -> None:
    found = detect()
    assert found.type == "cuda" and found.sm >= 70 and found.sm_count > 0 and found.shared_memory > 48 << 10
    assert found is detect(torch.cuda.current_device())


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Install a fake distribution: metadata in a folder, and a module whose import runs `body`."""

    def make(version: str = "1.2.3", body: str = "", name: str = "fakelib") -> Package:
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (tmp_path / f"{name}_module.py").write_text(body)
        return Package((name,), f"{name}_module", install=f"pip install {name}")

    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield make
    sys.modules.pop("fakelib_module", None)
    forget()


def test_a_missing_package_says_how_to_install_it() -> None:
    reason = Package(("no-such-dist", "nor-this"), "nothing", install="pip install x").problem()
    assert reason is not None
    assert (reason.kind, str(reason)) == ("missing", "no-such-dist or nor-this is not installed (pip install x)")


@pytest.mark.parametrize(
    "error", ["RuntimeError", "OSError", "AttributeError", "AssertionError", "ImportError", "KeyError", "SystemExit"]
)
def test_any_exception_of_an_import_means_unavailable(fake, error: str) -> None:  # type: ignore[no-untyped-def]
    reason = fake(body=f"raise {error}('boom')").problem()
    assert reason.kind == "broken"
    assert f"fakelib_module 1.2.3: unavailable: {error}: " in str(reason)
    assert "boom" in str(reason)


def test_an_abi_mismatch_is_named(fake) -> None:  # type: ignore[no-untyped-def]
    reason = fake(body="raise ImportError('x.so: undefined symbol: _ZN3c104impl')").problem()
    assert f"built for another torch or CUDA than torch {torch.__version__}" in str(reason)


@pytest.mark.parametrize(
    ("version", "wanted", "usable"),
    [
        ("2.8.0.post2", ">=2.7,<=2.8.0", True),
        ("2.7.4.post1+cu124", ">=2.7,<3", True),
        ("3.0.0b1", ">=2.7,<3", False),
        ("0.6.10", "==0.6.1", False),
        ("0.6.1.post1", "==0.6.1", True),
        ("0.6.1+cu130", "==0.6.1", True),
        ("not-a-version", ">=1", False),
    ],
)
def test_versions_are_compared_by_release(fake, version: str, wanted: str, usable: bool) -> None:  # type: ignore[no-untyped-def]
    made = fake(version=version)
    reason = Package(made.distributions, made.module, versions=wanted, install=made.install).problem()
    assert (reason is None) == usable
    if reason is not None:
        assert reason.kind == "version" and version in str(reason)


def test_flags_and_tools_are_judged_after_the_import(fake, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    made = fake()
    off = Package(made.distributions, made.module, flags=lambda: Reason("feature", "paging was disabled at build"))
    assert str(off.problem()) == "paging was disabled at build"

    def flags() -> None:
        raise KeyError("build_flags")

    assert "unavailable: KeyError" in str(Package(made.distributions, made.module, flags=flags).problem())
    monkeypatch.setenv("PATH", "")
    tool = Package(made.distributions, made.module, tools=("nvcc",)).problem()
    assert tool is not None
    assert (tool.kind, str(tool)) == ("toolchain", "nvcc is not on PATH (fakelib_module compiles with it at first use)")


def test_a_folder_of_the_same_name_is_not_the_package(fake, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """A namespace left by another distribution must not count as installed."""
    monkeypatch.setitem(sys.modules, "shared_name", types.ModuleType("shared_name"))
    reason = Package(("the-real-dist",), "shared_name").problem()
    assert reason is not None and reason.kind == "missing"


def test_what_a_package_requires_is_judged_first(fake) -> None:  # type: ignore[no-untyped-def]
    made = fake()
    needy = Package(made.distributions, made.module, requires=(Package(("no-such-dist",), "x"),))
    assert str(needy.problem()) == "no-such-dist is not installed"
