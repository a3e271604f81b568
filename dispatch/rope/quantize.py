"""rope_quantize_fp8 and mla_rope_quantize_fp8: RoPE from a table, then 8-bit floats."""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kernelmux.capabilities import Request
from kernelmux.dispatch.arguments import check_fp8, needs_grad, refuse_grad
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.rope import quantize_reference as reference
from kernelmux.dispatch.rope.cos_sin_cache import check_positions
from kernelmux.dispatch.rope.quantize_check import DIMS, FEATURES, ROLES, facts, quantize_request, still

Four = tuple[Tensor, Tensor, Tensor, Tensor]
OP = "rope_quantize_fp8"


def _describe(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool,
    quantize_dtype: torch.dtype,
    quant_scale_q: float,
    quant_scale_kv: float,
    q_rope_out: Tensor | None,
    k_rope_out: Tensor | None,
    q_nope_out: Tensor | None,
    k_nope_out: Tensor | None,
) -> Request:
    check_fp8(OP, "quantize_dtype", quantize_dtype)
    parts = {"q_rope": q_rope, "k_rope": k_rope, "q_nope": q_nope, "k_nope": k_nope}
    outs = {"q_rope_out": q_rope_out, "k_rope_out": k_rope_out, "q_nope_out": q_nope_out, "k_nope_out": k_nope_out}
    return quantize_request(OP, parts, cos_sin_cache, {"pos_ids": pos_ids}, is_neox, quantize_dtype, outs)


def _check(*args: Any) -> None:
    check_positions(args[5], args[4])


ROPE_QUANTIZE_FP8 = Op(
    OP, "rope", reference.rope_quantize_fp8, _describe,
    growing=("tokens",), dims=DIMS, roles=ROLES, features=FEATURES, check=_check,
    in_place=True,
    schema="(Tensor q_rope, Tensor k_rope, Tensor? q_nope, Tensor? k_nope, Tensor cos_sin_cache, Tensor pos_ids, "
    "bool is_neox, float quant_scale_q, float quant_scale_kv, Tensor(a!) q_rope_out, Tensor(b!) k_rope_out, "
    "Tensor(c!) q_nope_out, Tensor(d!) k_nope_out) -> ()",
)  # fmt: skip


def rope_quantize_fp8(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Tensor | None = None,
    k_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    k_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
    backend: str = "cuda",
) -> Four:
    """Rotate the rope parts of queries and keys, multiply all parts by a scale, and round them to 8-bit floats.

    The rotation is that of `apply_rope_with_cos_sin_cache` over all of rope_dim. Results are rounded once; what lies
    beyond the largest finite number of the dtype becomes that number. The scales multiply: to store x / s, pass 1 / s.

    Args:
        q_rope: [tokens, num_qo_heads, rope_dim], float16, bfloat16, float32 or float64, any strides.
        k_rope: [tokens, num_kv_heads, rope_dim], or [tokens, rope_dim] for the one key head of MLA.
        q_nope: None, or [tokens, num_qo_heads, nope_dim]: dims that are not turned.
        k_nope: None, or [tokens, num_kv_heads, nope_dim], or [tokens, nope_dim] beside a 2-D k_rope.
        cos_sin_cache: float32 [max_position, rope_dim], cosines in the first half of a row and sines in the second.
        pos_ids: int32 or int64 [tokens], each a row of the table.
        is_neox: True for rotate-half pairs (i, i + rope_dim / 2), False for adjacent pairs (2i, 2i + 1).
        quantize_dtype: float8_e4m3fn or float8_e5m2; None means that of the outputs given, else float8_e4m3fn.
        quant_scale_q, quant_scale_kv: what queries and keys are multiplied by.
        q_rope_out, k_rope_out, q_nope_out, k_nope_out: None, or where to write, of the inputs' shapes, any strides.
        enable_pdl: accepted for compatibility; it changes no result.
        backend: a hint, as FlashInfer's names are; the choice is automatic.

    Returns:
        (q_rope, k_rope, q_nope, k_nope): the outputs given, or new tensors; a part that is None gives one of width 0.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit together, or a cache not in float32.
        NoKernelError: when an input requires grad.

    Source: FlashInfer's `rope_quantize_fp8`.

    >>> import torch
    >>> cache = torch.tensor([[0.0, 1.0]])  # a quarter turn
    >>> q, k = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[3.0, 4.0]])
    >>> made = rope_quantize_fp8(q, k, None, None, cache, torch.tensor([0]), quant_scale_q=10.0, quant_scale_kv=200.0)
    >>> [part.float().flatten().tolist() for part in made]
    [[-20.0, 10.0], [-448.0, 448.0], [], []]
    """
    outs = q_rope_out, k_rope_out, q_nope_out, k_nope_out
    if quantize_dtype is None:
        quantize_dtype = next((out.dtype for out in outs if out is not None), torch.float8_e4m3fn)
    args = q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox
    scales = float(quant_scale_q), float(quant_scale_kv)
    if is_compiling():
        return _compiled(args, quantize_dtype, scales, outs)
    return _run(*args, quantize_dtype, *scales, *outs)


def mla_rope_quantize_fp8(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Tensor | None = None,
    k_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    k_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
) -> Four:
    """Rotate, scale and round to 8-bit floats the queries and keys of multi-head latent attention.

    It is `rope_quantize_fp8` with keys that have one head: k_rope is [tokens, rope_dim] and k_nope [tokens,
    nope_dim], the compressed keys and values. All Args, Returns and Raises are those of `rope_quantize_fp8`.

    Source: FlashInfer's `mla_rope_quantize_fp8`.

    >>> import torch
    >>> q, k = torch.ones(2, 8, 4), torch.ones(2, 4)
    >>> cache = torch.tensor([[1.0, 1.0, 0.0, 0.0]])  # no turn
    >>> made = mla_rope_quantize_fp8(q, k, torch.ones(2, 8, 16), torch.ones(2, 16), cache, torch.tensor([0, 0]))
    >>> [tuple(part.shape) for part in made]
    [(2, 8, 4), (2, 4), (2, 8, 16), (2, 16)]
    """
    return rope_quantize_fp8(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype, quant_scale_q, quant_scale_kv,
        q_rope_out, k_rope_out, q_nope_out, k_nope_out,
    )  # fmt: skip


def _compiled(
    args: tuple[Any, ...],
    quantize_dtype: torch.dtype,
    scales: tuple[float, float],
    outs: tuple[Tensor | None, ...],
) -> Four:
    q_rope, k_rope, q_nope, k_nope = args[:4]
    refuse_grad(OP, q_rope, k_rope, q_nope, k_nope)
    like = (
        q_rope,
        k_rope,
        q_rope[..., :0] if q_nope is None else q_nope,
        k_rope[..., :0] if k_nope is None else k_nope,
    )
    made = [
        part.new_empty(part.shape, dtype=quantize_dtype) if out is None else out
        for part, out in zip(like, outs, strict=True)
    ]
    torch.ops.kernelmux.rope_quantize_fp8(*args, *scales, *made)
    return made[0], made[1], made[2], made[3]


def _run(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool,
    quantize_dtype: torch.dtype,
    quant_scale_q: float,
    quant_scale_kv: float,
    q_rope_out: Tensor | None,
    k_rope_out: Tensor | None,
    q_nope_out: Tensor | None,
    k_nope_out: Tensor | None,
) -> Four:
    op, tokens = ROPE_QUANTIZE_FP8, q_rope.shape[0]
    if not pos_ids.is_contiguous():
        pos_ids = pos_ids.contiguous()
    key = (
        facts(q_rope, tokens), facts(k_rope, tokens), facts(q_nope, tokens), facts(k_nope, tokens),
        still(cos_sin_cache), pos_ids.dtype, pos_ids.device, pos_ids.shape == (tokens,), is_neox, quantize_dtype,
        facts(q_rope_out, tokens), facts(k_rope_out, tokens), facts(q_nope_out, tokens), facts(k_nope_out, tokens),
        needs_grad(q_rope, k_rope, q_nope, k_nope), op.bucket(tokens), PREFER.get(),
    )  # fmt: skip
    args = (
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype, quant_scale_q, quant_scale_kv,
        q_rope_out, k_rope_out, q_nope_out, k_nope_out,
    )  # fmt: skip
    run = op.cache.get(key) or op.pick(key, args)
    return run(*args)  # type: ignore[no-any-return]


def _eager(*args: Any) -> None:
    outs = args[-4:]
    _run(*[*args[:7], outs[0].dtype, *args[7:9], *outs])


ROPE_QUANTIZE_FP8.eager = _eager
