"""Dense matrix products in plain torch: accumulated in float32 (float64 for float64 inputs), rounded once."""

import torch
from torch import Tensor


def mm_bf16(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """a [m, k] @ b [k, n] + bias [n]."""
    work = torch.float64 if a.dtype == torch.float64 else torch.float32
    product = a.to(work) @ b.to(work)
    if bias is not None:
        product = product + bias.to(work)
    return product.to(out_dtype) if out is None else out.copy_(product)


def bmm_bf16(A: Tensor, B: Tensor, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """A [batch, m, k] @ B [batch, k, n]."""
    return mm_bf16(A, B, None, out_dtype, out)
