"""mm_bf16 and bmm_bf16: dense matrix products."""

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from kernelmux.capabilities import Request, dtype_name
from kernelmux.dispatch.arguments import (
    check_device,
    check_floats,
    check_writable,
    needs_grad,
    shape_error,
)
from kernelmux.dispatch.gemm import reference
from kernelmux.dispatch.op import PREFER, Op

FEATURES = ("bias", "a_column_major", "b_row_major", "a_strided", "b_strided", "out_strided", "unaligned")


def _describe(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, out: Tensor | None) -> Request:
    return _request("mm_bf16", {"a": a, "b": b}, bias, out_dtype, out)


def _describe_batched(A: Tensor, B: Tensor, out_dtype: torch.dtype, out: Tensor | None) -> Request:
    return _request("bmm_bf16", {"A": A, "B": B}, None, out_dtype, out)


def _request(
    op: str, factors: dict[str, Tensor], bias: Tensor | None, out_dtype: torch.dtype, out: Tensor | None
) -> Request:
    (left, a), (right, b) = factors.items()
    _check_shapes(op, factors)
    check_floats(op, {**factors, "bias": bias, "out": out})
    if a.dtype != b.dtype:
        got = f"{dtype_name(a.dtype)} and {dtype_name(b.dtype)}"
        raise TypeError(f"{op}: {left} and {right} are {got}, they must be of one dtype; convert one of them")
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"{op}: out_dtype is {out_dtype!r}, it must be a torch.dtype such as torch.bfloat16")
    if not out_dtype.is_floating_point or out_dtype.itemsize < 2:
        raise TypeError(f"{op}: out_dtype is {dtype_name(out_dtype)}, it must be a float of 16 bits or more")
    if out is not None and out.dtype != out_dtype:
        raise TypeError(f"{op}: out is {dtype_name(out.dtype)}, out_dtype {dtype_name(out_dtype)}; make them equal")
    n = b.shape[-1]
    if bias is not None and bias.shape != (n,):
        raise shape_error(op, "bias", bias, [n], "give one value per column of the result")
    check_device(op, a.device, {**factors, "bias": bias, "out": out})
    check_writable(op, {"out": out})
    features = layouts(a, b, out) | ({"bias"} if bias is not None else set())
    dtypes = {"a": a.dtype, "b": b.dtype, "out": out_dtype} | ({} if bias is None else {"bias": bias.dtype})
    return Request(
        op=op,
        family="gemm",
        device=a.device,
        dtypes=dtypes,
        dims={"m": a.shape[-2], "n": n, "k": a.shape[-1]} | ({"batch": a.shape[0]} if a.ndim == 3 else {}),
        features=frozenset(features),
        empty=0 in (*a.shape, n),
        grad=needs_grad(a, b, bias, out),
    )


def _check_shapes(op: str, factors: dict[str, Tensor]) -> None:
    dims = 2 if op == "mm_bf16" else 3
    for (name, t), form in zip(factors.items(), ("[m, k]", "[k, n]"), strict=True):
        if t.ndim != dims:
            raise shape_error(op, name, t, form if dims == 2 else "[batch, " + form[1:], "reshape it")
    (left, a), (right, b) = factors.items()
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"{op}: {left} has k = {a.shape[-1]}, {right} k = {b.shape[-2]}; make them equal, {right} is [k, n] "
            "(pass weight.T for a weight [n, k])"
        )


def layouts(a: Tensor, b: Tensor, out: Tensor | None) -> set[str]:
    """How the operands lie, beyond the plain a row-major, b column-major and out row-major, all aligned to 16 bytes.

    Nothing here depends on how many rows there are: m and batch grow under one cached decision.
    """
    features = set()
    if a.shape[-1] > 1 and a.stride(-1) != 1:
        features.add("a_column_major" if a.stride(-2) == 1 else "a_strided")
    if b.shape[-2] > 1 and b.stride(-2) != 1:
        features.add("b_row_major" if b.shape[-1] == 1 or b.stride(-1) == 1 else "b_strided")
    if out is not None and out.shape[-1] > 1 and out.stride(-1) != 1:
        features.add("out_strided")
    for t in (a, b, out):
        if t is not None and (t.data_ptr() % 16 or any(s != 1 and s * t.element_size() % 16 for s in t.stride())):
            features.add("unaligned")
    return features


MM_BF16 = Op(
    "mm_bf16", "gemm", reference.mm_bf16, _describe,
    growing=("m",), batch_invariant=False, dims=("n", "k"), roles=("a", "b", "out", "bias"), features=FEATURES,
    schema="(Tensor a, Tensor b, Tensor? bias, Tensor(a!) out, str backend) -> ()",
)  # fmt: skip
BMM_BF16 = Op(
    "bmm_bf16", "gemm", reference.bmm_bf16, _describe_batched,
    growing=("batch", "m"), batch_invariant=False, dims=("n", "k"), roles=("a", "b", "out"), features=FEATURES,
    schema="(Tensor A, Tensor B, Tensor(a!) out, str backend) -> ()",
)  # fmt: skip


def mm_bf16(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    pdl: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Tensor:
    """Multiply two matrices with float32 accumulation, and add a bias.

    In torch: `(a.float() @ b.float() + bias.float()).to(out_dtype)`, rounded once. float64 factors are accumulated
    in float64. Sums over no elements (k = 0) are 0.

    Args:
        a: [m, k], float16, bfloat16, float32 or float64, any strides.
        b: [k, n], of a's dtype, any strides; column-major, as weight.T of a weight [n, k], is the fast form.
        bias: None, or [n], a floating dtype.
        pdl: accepted for compatibility; it changes no result.
        out: None, or where to write the result: [m, n] of out_dtype, any strides.
        out_dtype: dtype of the result.
        backend: "auto", or the name of a backend of this package, which must then serve the call. FlashInfer's
            default is "cudnn"; here a name binds, so the default is automatic.

    Returns:
        `out`, or a new tensor [m, n] of out_dtype.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.
        NoKernelError, SettingError: when `backend` cannot serve the call, or is no backend.

    Source: FlashInfer's `mm_bf16`.

    >>> import torch
    >>> a, weight = torch.ones(2, 3, dtype=torch.bfloat16), torch.full((4, 3), 0.5, dtype=torch.bfloat16)
    >>> mm_bf16(a, weight.T, bias=torch.ones(4, dtype=torch.bfloat16))[0]
    tensor([2.5000, 2.5000, 2.5000, 2.5000], dtype=torch.bfloat16)
    """
    if is_compiling():
        if needs_grad(a, b, bias, out):
            return reference.mm_bf16(a, b, bias, out_dtype, out)
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype) if out is None else out
        torch.ops.kernelmux.mm_bf16(a, b, bias, out, backend)
        return out
    return _mm(a, b, bias, out_dtype, out, backend)


def bmm_bf16(
    A: Tensor,
    B: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Tensor:
    """Multiply batches of matrices with float32 accumulation: `torch.bmm(A.float(), B.float()).to(out_dtype)`.

    Args:
        A: [batch, m, k], float16, bfloat16, float32 or float64, any strides.
        B: [batch, k, n], of A's dtype, any strides; column-major matrices are the fast form.
        out: None, or where to write the result: [batch, m, n] of out_dtype, any strides.
        out_dtype: dtype of the result.
        backend: as in `mm_bf16`.

    Returns:
        `out`, or a new tensor [batch, m, n] of out_dtype.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together.
        NoKernelError, SettingError: when `backend` cannot serve the call, or is no backend.

    Source: FlashInfer's `bmm_bf16`.

    >>> import torch
    >>> A, B = torch.ones(2, 3, 4, dtype=torch.bfloat16), torch.ones(2, 4, 5, dtype=torch.bfloat16)
    >>> bmm_bf16(A, B)[1, 2].tolist()
    [4.0, 4.0, 4.0, 4.0, 4.0]
    """
    if is_compiling():
        if needs_grad(A, B, out):
            return reference.bmm_bf16(A, B, out_dtype, out)
        out = A.new_empty((A.shape[0], A.shape[1], B.shape[2]), dtype=out_dtype) if out is None else out
        torch.ops.kernelmux.bmm_bf16(A, B, out, backend)
        return out
    return _bmm(A, B, out_dtype, out, backend)


def _mm(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, out: Tensor | None, backend: str) -> Tensor:
    op, rows, right = MM_BF16, a.shape, b.shape
    if len(rows) != 2 or len(right) != 2:
        _check_shapes(op.name, {"a": a, "b": b})
    address, extra, written, grad = a.data_ptr() | b.data_ptr(), None, None, a.requires_grad or b.requires_grad
    if bias is not None:
        extra = (bias.dtype, bias.device, bias.shape, bias.stride())
        grad = grad or bias.requires_grad
    if out is not None:
        if out.shape != (rows[0], right[-1]):
            raise shape_error(op.name, "out", out, [rows[0], right[-1]], "give it the shape of a @ b")
        address |= out.data_ptr()
        grad = grad or out.requires_grad
        written = (out.dtype, out.device, out.stride())
    key = (
        a.dtype, b.dtype, a.device, b.device, rows[-1], right, a.stride(), b.stride(), extra, out_dtype,
        written, address & 15 == 0, grad and is_grad_enabled(), backend,
        op.bucket(rows[0]), PREFER.get(),
    )  # fmt: skip
    args = (a, b, bias, out_dtype, out)
    run = op.cache.get(key) or op.pick(key, args, backend)
    return run(*args)  # type: ignore[no-any-return]


def _bmm(A: Tensor, B: Tensor, out_dtype: torch.dtype, out: Tensor | None, backend: str) -> Tensor:
    op, left, right = BMM_BF16, A.shape, B.shape
    if len(left) != 3 or len(right) != 3:
        _check_shapes(op.name, {"A": A, "B": B})
    if left[0] != right[0]:
        raise ValueError(f"{op.name}: A has a batch of {left[0]}, B of {right[0]}; make them equal, expand one of them")
    address, written, grad = A.data_ptr() | B.data_ptr(), None, A.requires_grad or B.requires_grad
    if out is not None:
        if out.shape != (left[0], left[1], right[2]):
            raise shape_error(op.name, "out", out, [left[0], left[1], right[2]], "give it the shape of A @ B")
        address |= out.data_ptr()
        grad = grad or out.requires_grad
        written = (out.dtype, out.device, out.stride())
    key = (
        A.dtype, B.dtype, A.device, B.device, left[2], right[1:], A.stride(), B.stride(), out_dtype, written,
        address & 15 == 0, grad and is_grad_enabled(), backend,
        op.bucket(left[0], left[1]), PREFER.get(),
    )  # fmt: skip
    args = (A, B, out_dtype, out)
    run = op.cache.get(key) or op.pick(key, args, backend)
    return run(*args)  # type: ignore[no-any-return]


def _eager(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, backend: str) -> None:
    _mm(a, b, bias, out.dtype, out, backend)


def _eager_batched(A: Tensor, B: Tensor, out: Tensor, backend: str) -> None:
    _bmm(A, B, out.dtype, out, backend)


MM_BF16.eager = _eager
BMM_BF16.eager = _eager_batched
