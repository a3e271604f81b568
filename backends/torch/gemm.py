"""Matrix products through torch: cuBLAS on a GPU, oneDNN on a CPU. Both accumulate in float32."""

import torch
from torch import Tensor


def mm_bf16(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    if out_dtype != a.dtype:  # 16-bit factors, float32 result: of the accumulators, without rounding
        result = torch.mm(a, b, out_dtype=out_dtype)
        return result if out is None else out.copy_(result)
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)


def bmm_bf16(A: Tensor, B: Tensor, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    return torch.bmm(A, B, out=out)
