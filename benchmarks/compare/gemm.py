"""Dense matrix products."""

from functools import partial
from typing import Any

import torch
from compare.case import Case, Results, Side
from compare.kv import BF16, fp8


def mm(
    side: Side, m: int, n: int, k: int, backend: str, bias: bool = False, out: bool = False, **kwargs: Any
) -> Results:
    a, b = side.rand(m, k, seed=1, dtype=BF16), side.rand(n, k, seed=2, dtype=BF16).T
    given = torch.empty(m, n, dtype=BF16, device=side.device) if out else None
    extra = side.rand(n, seed=3, dtype=BF16) if bias else None
    made = side.mm_bf16(a, b, bias=extra, out=given, **kwargs, **side.backend(backend))
    return {"out": made if given is None else given}


def bmm(side: Side, backend: str, **kwargs: Any) -> Results:
    a = side.rand(3, 48, 128, seed=1, dtype=BF16)
    b = side.rand(3, 80, 128, seed=2, dtype=BF16).transpose(1, 2)
    return {"out": side.bmm_bf16(a, b, **kwargs, **side.backend(backend))}


def bmm_fp8(side: Side, dtype: torch.dtype) -> Results:
    a = fp8(side.rand(3, 48, 128, seed=1))
    b = fp8(side.rand(3, 80, 128, seed=2)).transpose(1, 2)
    scales = torch.tensor(0.3, device=side.device), torch.tensor(1.7, device=side.device)
    return {"out": side.bmm_fp8(a, b, *scales, dtype, **side.backend("cublas"))}


def cases() -> list[Case]:
    def case(name: str, features: str, run: partial) -> Case:
        return Case(name, features, "gemm", "gemm", run)

    found = []
    for backend in ("cudnn", "cublaslt"):
        run = partial(mm, backend=backend)
        found += [
            case("mm_bf16", f"{backend}: 65x320x512", partial(run, m=65, n=320, k=512)),
            case("mm_bf16", f"{backend}: 1x256x1024, out given", partial(run, m=1, n=256, k=1024, out=True)),
            case("mm_bf16", f"{backend}: fp32 out", partial(run, m=33, n=256, k=256, out_dtype=torch.float32)),
            case("mm_bf16", f"{backend}: fp16 out", partial(run, m=33, n=256, k=256, out_dtype=torch.float16)),
        ]
    return [
        *found,
        case("mm_bf16", "cublaslt: bias", partial(mm, backend="cublaslt", m=33, n=256, k=256, bias=True)),
        case("bmm_bf16", "cudnn: 3x48x80x128", partial(bmm, backend="cudnn")),
        case("bmm_bf16", "cudnn: fp32 out", partial(bmm, backend="cudnn", out_dtype=torch.float32)),
        case("bmm_fp8", "cublas: bf16 out", partial(bmm_fp8, dtype=BF16)),
        case("bmm_fp8", "cublas: fp16 out", partial(bmm_fp8, dtype=torch.float16)),
    ]
