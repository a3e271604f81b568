"""`import kernelmux` loads no vendor library, creates no CUDA context and starts no process."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
VENDORS = (
    "cudnn", "flash_attn", "flash_attn_interface", "flash_attn_2_cuda", "flash_mla", "deep_gemm", "triton",
    "tensorrt_llm", "trtllm_kernel", "cutlass", "cuda.core", "transformers", "flashinfer", "matplotlib",
)  # fmt: skip


def run(code: str) -> object:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    return json.loads(done.stdout.splitlines()[-1])


def test_import_is_light() -> None:
    code = f"""
import json, subprocess, sys, torch
before = set(sys.modules)
def refuse(*args, **kwargs): raise AssertionError("import started a process")
subprocess.Popen.__init__ = refuse
import kernelmux
new = set(sys.modules) - before
print(json.dumps([[m for m in {VENDORS!r} if m in new], torch.cuda.is_initialized()]))
"""
    assert run(code) == [[], False]


def test_declarations_and_reports_load_no_vendor_code() -> None:
    code = f"""
import json, sys, torch
before = set(sys.modules)
from kernelmux.dispatch import registry
count = sum(len(b.kernels) for b in registry.backends().values())
new = set(sys.modules) - before
print(json.dumps([count > 0, [m for m in {VENDORS!r} if m in new]]))
"""
    assert run(code) == [True, []]


def test_a_source_checkout_on_the_path_works() -> None:
    code = f"""
import json, sys
sys.meta_path = [f for f in sys.meta_path if "editable" not in str(f)]
sys.path.insert(0, {str(ROOT)!r})
import kernelmux, kernelmux.dispatch
print(json.dumps(kernelmux.dispatch.__file__))
"""
    assert Path(str(run(code))) == ROOT / "dispatch" / "__init__.py"


def test_every_public_name_is_there_and_documented() -> None:
    import kernelmux

    assert len(set(kernelmux.__all__)) == len(kernelmux.__all__)
    for name in kernelmux.__all__:
        value = getattr(kernelmux, name)
        if callable(value):
            assert value.__doc__, f"{name} has no docstring"
