"""Declarations of the packaged backends: nothing is loaded, every way of being unusable has its reason."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kernelmux.capabilities import PRESETS, Backend, NoKernelError, Request, package
from kernelmux.dispatch import registry
from kernelmux.dispatch.explain import explain

ROOT = Path(__file__).parent.parent
H200, CPU = PRESETS["H200"], PRESETS["CPU"]


def backend(name: str) -> Backend:
    return registry.backends()[name]


def request(phase: str = "decode", features: str = "", dtype: torch.dtype = torch.bfloat16, **dims: int) -> Request:
    plain = {
        "batch": 4, "q_len": 1 if phase == "decode" else 64, "kv_len": 512, "num_qo_heads": 32, "num_kv_heads": 8,
        "group_size": 4, "head_dim_qk": 128, "head_dim_vo": 128, "page_size": 16,
    }  # fmt: skip
    if phase == "ragged":
        del plain["page_size"]
    out = torch.bfloat16 if dtype.itemsize == 1 else dtype
    dtypes = {"q": dtype, "kv": dtype, "out": out}
    return Request("attention", "attention", phase, None, dtypes, {**plain, **dims}, frozenset(features.split()))


def choice(of: Request, device: str = "H200") -> str:
    return explain(of, PRESETS[device], installed=False).kernel.id


def reasons(kernel: str, of: Request) -> list[str]:
    found = {k.id: k for b in registry.backends().values() for k in b.kernels}[kernel]
    return [str(r) for r in found.support.reasons(of, H200)]


def test_no_declaration_loads_an_adapter() -> None:
    code = """
import json, sys
from kernelmux.dispatch import registry
backends = registry.backends()
print(json.dumps([m for m in sys.modules if m.startswith("kernelmux.backends.") and m.count(".") > 2]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert json.loads(done.stdout) == []


# -- ways of being unusable -------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Pretend that distributions of some versions are installed, with these modules."""
    versions: dict[str, str] = {}

    def install(distribution: str, version: str, **modules: Any) -> None:
        versions[distribution] = version
        for name, contents in modules.items():
            if isinstance(contents, Exception):
                monkeypatch.setattr(package.importlib, "import_module", _raising(name, contents))
                continue
            module = ModuleType(name)
            vars(module).update(contents)
            monkeypatch.setitem(sys.modules, name, module)

    package.forget()
    monkeypatch.setattr(package, "_version", versions.get)
    yield install
    monkeypatch.undo()
    package.forget()


def _raising(module: str, error: Exception) -> Any:
    def import_module(name: str) -> Any:
        assert name.replace(".", "_") == module
        raise error

    return import_module


def flash_attn_3(**disabled: bool) -> dict[str, Any]:
    flags = {f"FLASHATTENTION_DISABLE_{name}": value for name, value in disabled.items()}
    modules = {"flash_attn_3": {}, "flash_attn_config": {"CONFIG": {"build_flags": flags}}}
    return {**modules, "flash_attn_3._C": {}}


def cudnn(version: int, text: str) -> dict[str, Any]:
    return {"cudnn": {"backend_version": lambda: version, "backend_version_string": lambda: text}}


def test_absent_libraries_say_how_to_get_them(installed: Any) -> None:
    assert str(backend("cudnn").problem()) == (
        "nvidia-cudnn-frontend is not installed (pip install nvidia-cudnn-frontend)"
    )
    assert str(backend("flash_attn_3").problem()) == (
        "tokenspeed-fa3 or flash-attn-3 is not installed (pip install tokenspeed-fa3)"
    )
    assert backend("torch").problem() is None


def test_a_wheel_for_another_torch_says_so(installed: Any) -> None:
    error = ImportError("/site/flash_attn_3/_C.abi3.so: undefined symbol: aoti_torch_new_thing\nmore")
    installed("torch", "2.6.0")
    installed("tokenspeed-fa3", "3.0.0.post20260810", flash_attn_3__C=error)
    problem = backend("flash_attn_3").problem()
    assert problem is not None
    assert problem.kind == "broken"
    assert "undefined symbol: aoti_torch_new_thing" in str(problem)
    assert "built for another torch or CUDA than torch 2.6.0" in str(problem)


@pytest.mark.parametrize(
    ("version", "fits"), [("3.0.0.post20260810", True), ("3.0.0b1", True), ("2.8.3", False), ("4.0.0b36", False)]
)
def test_versions_of_flash_attn_3(installed: Any, version: str, fits: bool) -> None:
    installed("tokenspeed-fa3", version, **flash_attn_3())
    problem = backend("flash_attn_3").problem()
    assert (problem is None) == fits
    assert problem is None or (problem.kind == "version" and "needs >=3.0.0,<4" in str(problem))


def test_a_build_without_a_needed_part_is_refused(installed: Any) -> None:
    """As of wheels that disable paging: the calls would raise one by one, or be served by another head dim."""
    installed("tokenspeed-fa3", "3.0.0", **flash_attn_3(PAGEDKV=True, SOFTCAP=True, HDIM64=True))
    problem = backend("flash_attn_3").problem()
    assert str(problem).startswith("this build of flash_attn_3 is without PAGEDKV, HDIM64, needs them")


def test_the_build_that_was_measured_is_taken(installed: Any) -> None:
    flags = dict.fromkeys(("BACKWARD", "SOFTCAP", "HDIM96", "SM8x"), True)
    installed("tokenspeed-fa3", "3.0.0.post20260810", **flash_attn_3(**flags))
    assert backend("flash_attn_3").problem() is None


def test_a_build_that_tells_no_flags_is_refused(installed: Any) -> None:
    modules = flash_attn_3()
    modules["flash_attn_config"] = {}
    installed("flash-attn-3", "3.0.0", **modules)
    problem = backend("flash_attn_3").problem()
    assert problem is not None
    assert (problem.kind, "unavailable: ImportError" in str(problem)) == ("broken", True)


@pytest.mark.parametrize(("version", "text", "fits"), [(91901, "9.19.1", True), (91801, "9.18.1", True)] + [
    (v, t, False) for v, t in ((91800, "9.18.0"), (91400, "9.14.0"), (91001, "9.10.1"), (90500, "9.5.0"))])  # fmt: skip
def test_versions_of_the_cudnn_library(installed: Any, version: int, text: str, fits: bool) -> None:
    installed("nvidia-cudnn-frontend", "1.32.0", **cudnn(version, text))
    problem = backend("cudnn").problem()
    assert (problem is None) == fits
    assert problem is None or str(problem).startswith(f"the cuDNN library is {text}, needs 9.18.1 or later")


def test_the_template_declares_what_exists() -> None:
    from kernelmux.backends._template import BACKEND
    from kernelmux.dispatch.state import OPS

    (kernel,) = BACKEND.kernels
    assert kernel.id == "template:rmsnorm"
    assert set(kernel.support.dims) <= set(OPS["rmsnorm"].dims)
    assert kernel.support.features <= set(OPS["rmsnorm"].features)
    assert str(BACKEND.problem()) == "some-library is not installed (pip install some-library)"
    assert "template" not in registry.backends()


# -- what is declared -------------------------------------------------------------------------------------------------


def test_flash_attn_3_refuses_two_head_dims() -> None:
    """The wheels accept them and return garbage."""
    for dims in ((576, 512), (192, 128), (64, 512)):
        of = request("prefill", head_dim_qk=dims[0], head_dim_vo=dims[1])
        assert any(r.startswith(f"head_dim_vo is {dims[1]}, must equal") for r in reasons("flash_attn_3:attention", of))


@pytest.mark.parametrize("feature", ["soft_cap", "alibi", "rope", "custom_mask", "nvfp4_kv", "per_head_scales", "grad"])
def test_what_libraries_would_drop_rules_them_out(feature: str) -> None:
    """An argument that a library has no place for is never dropped."""
    for phase in ("decode", "prefill", "ragged"):
        for name in ("cudnn", "flash_attn_3", "torch"):
            for kernel in backend(name).kernels:
                if kernel.op == "attention":
                    of = request(phase, "" if feature == "grad" else feature)
                    of = Request(
                        of.op, of.family, phase, None, of.dtypes, of.dims, of.features, False, feature == "grad"
                    )
                    assert kernel.support.reasons(of, H200 if kernel.support.device == "cuda" else CPU)


def test_sinks_go_where_they_are_applied() -> None:
    assert choice(request("decode", "sinks cuda_graph")) == "flash_attn_3:attention/sinks"
    assert choice(request("prefill", "sinks causal")) == "flash_attn_3:attention/sinks"
    with pytest.raises(NoKernelError, match="sinks: not supported by this kernel"):
        explain(request("decode", "sinks cuda_graph"), PRESETS["A100"], installed=False)


def test_a_window_beside_no_causal_mask_needs_a_single_row_in_cudnn() -> None:
    text = "window: only beside a causal mask when a sequence has several query rows"
    assert reasons("cudnn:attention/ragged", request("ragged", "window")) == [text]
    assert reasons("cudnn:attention/ragged", request("ragged", "window causal")) == []
    assert reasons("cudnn:attention/decode", request("decode", "window")) == []


def test_other_gpus_have_a_kernel_too() -> None:
    for device in PRESETS:
        of = request("decode", "lse")
        assert choice(of, device).startswith(("cudnn", "flash_attn_3", "torch", "reference")), device
    assert choice(request("prefill", "causal"), "T4") == "torch:attention/sdpa"
    assert choice(request("prefill", "causal"), "CPU") == "torch:attention/cpu"


# -- cuDNN's graphs ---------------------------------------------------------------------------------------------------


def test_a_built_graph_is_warm_for_the_lengths_that_it_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernelmux.backends.cudnn import attention

    static = (torch.bfloat16, 32, 8, 128, 128, 16)
    facts = attention._facts("decode", 4, 1, 512, static, (False, False, True, False))
    monkeypatch.setattr(attention, "_warm", {facts})
    assert attention.warm(request("decode", "lse", kv_len=300))
    for other in (
        request("decode", "lse", kv_len=513),
        request("decode", "lse", batch=5),
        request("decode", ""),
        request("decode", "lse causal"),
        request("decode", "lse", page_size=1),
        request("decode", "lse", dtype=torch.float16),
        request("prefill", "lse"),
    ):
        assert not attention.warm(other)


def test_a_cold_graph_is_not_chosen_for_an_eager_call_but_on_request() -> None:
    from kernelmux.dispatch.resolve import AllInstalled, resolve
    from kernelmux.dispatch.settings import Choice
    from kernelmux.dispatch.state import OPS, rules, settings

    class Cold(AllInstalled):
        def warm(self, kernel: Any, request: Request) -> bool:
            return False

    op = OPS["attention"]

    def chosen(of: Request, *choices: Choice) -> str:
        return resolve(of, H200, op.candidates(), rules(), settings(), Cold(), choices).kernel.id

    asked = Choice(("cudnn",), auto=False, source="argument backend")
    assert chosen(request("decode")) == "flash_attn_3:attention"
    assert chosen(request("decode"), asked) == "cudnn:attention/decode"
    assert chosen(request("decode", "cuda_graph")) == "cudnn:attention/decode"
