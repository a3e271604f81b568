"""Scales of a call of run(): what is folded into the logits, and what multiplies the output."""

from numbers import Real

import torch
from torch import Tensor

from kernelmux.capabilities import RunExtras, dtype_name

Scale = float | Tensor | None


def fold(q_scale: Scale, k_scale: Scale) -> tuple[float, Tensor | None]:
    """The product of two scalar scales: a number, and a tensor for what is known on the device only."""
    factor, held = 1.0, None
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale)):
        if scale is None:
            continue
        if not isinstance(scale, Tensor):
            factor *= number(name, scale)
        elif scale.is_cpu and not torch.compiler.is_compiling() and not scale.requires_grad:
            factor *= float(scalar(name, scale))
        else:
            held = scalar(name, scale) if held is None else held * scalar(name, scale)
    return factor, held


def number(name: str, scale: object) -> float:
    if not isinstance(scale, Real):
        raise TypeError(f"{name} is a {type(scale).__name__}, it must be a number or a tensor of one value")
    return float(scale)


def scalar(name: str, scale: Tensor) -> Tensor:
    """A one-element scale as a float32 tensor without dims."""
    if scale.numel() != 1:
        raise ValueError(
            f"{name} has {scale.numel()} values, it must be one number; pass per-head scales as positional arguments"
        )
    return scale.reshape(()).to(torch.float32)


def per_head(args: tuple[object, ...], num_qo_heads: int, num_kv_heads: int) -> list[Tensor]:
    """Positional scale_q [num_qo_heads], scale_k and scale_v [num_kv_heads] of run(), float32."""
    if len(args) != 3:
        raise ValueError(
            f"run() got {len(args)} extra positional arguments, they must be scale_q, scale_k and scale_v; "
            "user-written attention variants are not supported"
        )
    found = []
    expected = {"scale_q": num_qo_heads, "scale_k": num_kv_heads, "scale_v": num_kv_heads}
    for (name, heads), t in zip(expected.items(), args, strict=True):
        if not isinstance(t, Tensor) or t.numel() != heads or not t.dtype.is_floating_point:
            got = f"{list(t.shape)} of {dtype_name(t.dtype)}" if isinstance(t, Tensor) else f"a {type(t).__name__}"
            raise ValueError(f"{name} is {got}, it must be float32 [{heads}]; one value per head")
        found.append(t.reshape(-1).to(torch.float32))
    return found


def sink_values(sinks: Tensor, num_qo_heads: int, device: torch.device) -> Tensor:
    """Attention sinks as float32 [num_qo_heads]."""
    if sinks.numel() != num_qo_heads or sinks.device != device:
        raise ValueError(
            f"sinks has shape {list(sinks.shape)} on {sinks.device}, it must be [{num_qo_heads}] on {device}; "
            "one value per query head"
        )
    return sinks.reshape(-1).to(torch.float32)


def block_scales(given: tuple[Tensor, Tensor], kv: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """NVFP4 block scales of keys and values, one for 16 elements, which are 8 bytes of the cache."""
    found = []
    for sf, packed in zip(given, kv, strict=True):
        wanted = (*packed.shape[:-1], packed.shape[-1] // 8)
        if sf.dtype not in (torch.float8_e4m3fn, torch.uint8) or sf.shape != wanted:
            raise ValueError(
                f"kv_cache_sf has a part {list(sf.shape)} of {dtype_name(sf.dtype)} as [..., tokens, heads, dim / 16], "
                f"it must be {list(wanted)} of float8_e4m3fn; give one scale for 16 elements"
            )
        found.append(sf.view(torch.float8_e4m3fn))
    return found[0], found[1]


def is_one(scale: Scale) -> bool:
    return scale is None or (not isinstance(scale, Tensor) and scale == 1.0)


def rescale(out: Tensor, computed: Tensor, v_scale: Scale, o_scale: Scale) -> None:
    """out = computed * v_scale / o_scale, rounded once when `computed` is another tensor than `out`."""
    if computed is out:
        _multiply(out, v_scale, o_scale)
        return
    wide = computed.to(torch.float32)
    _multiply(wide, v_scale, o_scale)
    limit = torch.finfo(out.dtype).max
    out.copy_(wide.clamp_(-limit, limit))


def _multiply(out: Tensor, v_scale: Scale, o_scale: Scale) -> None:
    if not is_one(v_scale):
        out.mul_(scalar("v_scale", v_scale) if isinstance(v_scale, Tensor) else number("v_scale", v_scale))
    if not is_one(o_scale):
        out.div_(scalar("o_scale", o_scale) if isinstance(o_scale, Tensor) else number("o_scale", o_scale))


def extras_with(extras: RunExtras | None, held: Tensor | None) -> RunExtras | None:
    """Extra arguments with a scale that is known on the device only."""
    if held is None:
        return extras
    extras = extras or RunExtras()
    extras.qk_scale = held
    return extras


def single_extras(
    given: tuple[Tensor | None, ...] | None, sf: tuple[Tensor, Tensor] | None, q: Tensor, k: Tensor, v: Tensor
) -> RunExtras | None:
    """Extra arguments of a call with one sequence; per-head scales that are None are 1."""
    if (sf is not None) != (k.dtype == torch.uint8):
        raise ValueError(
            f"kv_cache_sf is {'given' if sf is not None else 'None'} and k {dtype_name(k.dtype)}; pass the block "
            "scales of uint8 (NVFP4) keys and values, and only of those"
        )
    if given is None and sf is None:
        return None
    extras = RunExtras()
    if given is not None:
        heads = (q.shape[1], k.shape[1], k.shape[1])
        whole = tuple(q.new_ones(n, dtype=torch.float32) if t is None else t for t, n in zip(given, heads, strict=True))
        extras.scale_q, extras.scale_k, extras.scale_v = per_head(whole, q.shape[1], k.shape[1])
    if sf is not None:
        extras.k_sf, extras.v_sf = block_scales(sf, (k, v))
    return extras
