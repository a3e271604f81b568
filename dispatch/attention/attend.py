"""One attention call around its kernel: results allocated, scales folded, results converted."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelmux.capabilities import RunExtras
from kernelmux.dispatch.attention import results, scales
from kernelmux.dispatch.attention.scales import Scale

# launch(q, k, v, out, lse, factor, extras): run the kernel with sm_scale * factor
Launch = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, float, RunExtras | None], None]


class Result(NamedTuple):
    """What a call computes: [rows of q, heads, dim] of a dtype. `padded`: rows may belong to no sequence."""

    dtype: torch.dtype
    heads: int
    dim: int
    padded: bool = False


def attend(
    launch: Launch,
    result: Result,
    qkv: tuple[Tensor, Tensor, Tensor],
    extras: RunExtras | None,
    qkvo_scale: tuple[Scale, Scale, Scale, Scale],
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    lse_form: tuple[str, str] = ("log2", "NH"),
) -> Any:
    """out, or (out, lse). A v_scale or o_scale of 8-bit outputs is applied in float32, with one rounding."""
    q, k, v = qkv
    q_scale, k_scale, v_scale, o_scale = qkvo_scale
    factor = 1.0
    if q_scale is not None or k_scale is not None:
        factor, held = scales.fold(q_scale, k_scale)
        extras = scales.extras_with(extras, held)
    if q.ndim != 3:
        raise ValueError(f"q has shape {list(q.shape)}, it must be [tokens, heads, head_dim]; reshape it")
    shape = (q.shape[0], result.heads, result.dim)
    final = results.output(out, shape, result.dtype, q, k, v, result.padded)
    rescaled = not (scales.is_one(v_scale) and scales.is_one(o_scale))
    computed = final
    if rescaled and result.dtype.itemsize == 1:
        computed = torch.empty(shape, dtype=torch.bfloat16, device=q.device)
    sums = results.lse_buffer(lse, lse_form, shape[:2], q) if return_lse or lse is not None else None
    launch(q, k, v, computed, sums, factor, extras)
    if rescaled:
        scales.rescale(final, computed, v_scale, o_scale)
    if sums is None:
        return final
    sums = results.finish_lse(sums, lse, lse_form)
    return (final, sums) if return_lse else final


def returning_lse(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with return_lse=True. A plain function, as torch.compile cannot trace functools.partialmethod."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("return_lse", True)
        return method(self, *args, **kwargs)

    signature = inspect.signature(method)
    parameters = [p.replace(default=True) if p.name == "return_lse" else p for p in signature.parameters.values()]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__doc__ = f"{method.__name__}() with return_lse=True."
    call.__name__ = f"{method.__name__}_return_lse"
    return call
