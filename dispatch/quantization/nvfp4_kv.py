"""nvfp4_kv_quantize and nvfp4_kv_dequantize: rows of a KV cache to NVFP4 and back."""

from typing import Any

import torch
from torch import Tensor

from kernelmux.capabilities import Request, dtype_name
from kernelmux.dispatch.arguments import layout_features, needs_grad
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.quantization import nvfp4_kv_reference as reference
from kernelmux.dispatch.quantization.nvfp4_kv_reference import BLOCK

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check_scale(op: str, scale: Tensor, device: torch.device) -> None:
    if scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != device:
        raise ValueError(
            f"{op}: global_scale has shape {list(scale.shape)}, {dtype_name(scale.dtype)} on {scale.device}; "
            f"it must be one float32 value on {device}"
        )


def _describe_quantize(
    input: Tensor, global_scale: Tensor, packed: Tensor | None, block_scales: Tensor | None
) -> Request:
    op = "nvfp4_kv_quantize"
    if input.ndim != 2 or input.shape[1] % BLOCK:
        raise ValueError(f"{op}: input has shape {list(input.shape)}, it must be [rows, a multiple of {BLOCK}]; pad it")
    if input.dtype not in _FLOATS:
        raise TypeError(f"{op}: input is {dtype_name(input.dtype)}, use float16, bfloat16 or float32")
    _check_scale(op, global_scale, input.device)
    return Request(
        op=op,
        family="quantization",
        device=input.device,
        dtypes={"input": input.dtype},
        dims={"rows": input.shape[0], "dim": input.shape[1]},
        features=frozenset(_layout(input)),
        empty=input.numel() == 0,
        grad=needs_grad(input),
    )


def _describe_dequantize(
    packed: Tensor, block_scales: Tensor, global_scale: Tensor, output_dtype: torch.dtype, out: Tensor | None
) -> Request:
    op = "nvfp4_kv_dequantize"
    if packed.ndim != 2 or block_scales.ndim != 2 or packed.shape[1] * 2 != block_scales.shape[1] * BLOCK:
        raise ValueError(
            f"{op}: fp4_data has shape {list(packed.shape)}, block_scales {list(block_scales.shape)}; "
            f"give [rows, dim / 2] and [rows, dim / {BLOCK}]"
        )
    if packed.dtype != torch.uint8 or block_scales.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise TypeError(
            f"{op}: fp4_data is {dtype_name(packed.dtype)}, block_scales {dtype_name(block_scales.dtype)}; "
            "give uint8, and float8_e4m3fn or uint8"
        )
    if output_dtype not in _FLOATS:
        raise TypeError(f"{op}: output_dtype is {dtype_name(output_dtype)}, use float16, bfloat16 or float32")
    _check_scale(op, global_scale, packed.device)
    if block_scales.device != packed.device:
        raise ValueError(f"{op}: block_scales are on {block_scales.device}, fp4_data on {packed.device}; move one")
    return Request(
        op=op,
        family="quantization",
        device=packed.device,
        dtypes={"out": output_dtype},
        dims={"rows": packed.shape[0], "dim": packed.shape[1] * 2},
        features=frozenset(_layout(packed) | _layout(block_scales)),
        empty=packed.numel() == 0,
    )


def _layout(tensor: Tensor) -> set[str]:
    return layout_features(tensor) | (set() if tensor.stride() == (tensor.shape[1], 1) else {"strided"})


QUANTIZE = Op(
    "nvfp4_kv_quantize",
    "quantization",
    reference.nvfp4_kv_quantize,
    _describe_quantize,
    growing=("rows",),
    dims=("dim",),
    roles=("input",),
    features=("strided", "inner_strided", "unaligned"),
    schema="(Tensor input, Tensor global_scale, Tensor(a!) packed, Tensor(b!) block_scales) -> ()",
    in_place=True,
)
DEQUANTIZE = Op(
    "nvfp4_kv_dequantize",
    "quantization",
    reference.nvfp4_kv_dequantize,
    _describe_dequantize,
    growing=("rows",),
    dims=("dim",),
    roles=("out",),
    features=("strided", "inner_strided", "unaligned"),
    schema="(Tensor packed, Tensor block_scales, Tensor global_scale, ScalarType output_dtype, Tensor(a!) out) -> ()",
)


def nvfp4_kv_quantize(input: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to NVFP4 as KV caches hold it: x ~ e2m1 * block scale * global_scale.

    For each 16 elements: scale = e4m3(amax / 6 / global_scale), e2m1 = nearest(x / global_scale / scale), ties to the
    even code, saturated at 6.

    Args:
        input: [rows, dim], float16, bfloat16 or float32; dim is a multiple of 16.
        global_scale: float32 tensor of one value, a dequantisation factor: amax(all) / (6 * 448) uses the whole range.

    Returns:
        (fp4, scales): uint8 [rows, dim / 2] with the first element of a pair in the low nibble, and uint8
        [rows, dim / 16] with the bytes of E4M3 scales: `scales.view(torch.float8_e4m3fn)`.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit.
        NoKernelError: when the input requires grad: rounding has no gradient.

    Source: FlashInfer's `nvfp4_kv_quantize`.

    >>> import torch
    >>> fp4, scales = nvfp4_kv_quantize(torch.arange(16.0).view(1, 16), torch.ones(1))
    >>> scales.view(torch.float8_e4m3fn).float().item(), fp4[0, :4].tolist()
    (2.5, [16, 34, 67, 84])
    """
    if torch.compiler.is_compiling():
        packed = input.new_empty(input.shape[0], input.shape[1] // 2, dtype=torch.uint8)
        scales = input.new_empty(input.shape[0], input.shape[1] // BLOCK, dtype=torch.uint8)
        torch.ops.kernelmux.nvfp4_kv_quantize(input, global_scale, packed, scales)
        return packed, scales
    return _quantize(input, global_scale, None, None)


def _quantize(
    input: Tensor, global_scale: Tensor, packed: Tensor | None, block_scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    if input.ndim == 0:
        raise ValueError("nvfp4_kv_quantize: input has no dimensions, it must be [rows, width]; reshape it")
    key = (
        (input.dtype, input.device, input.shape[1:], input.stride(), input.data_ptr() & 15),
        (global_scale.shape, global_scale.dtype, global_scale.device),
        needs_grad(input),
        QUANTIZE.bucket(input.shape[0]),
        PREFER.get(),
    )
    run = QUANTIZE.cache.get(key) or QUANTIZE.pick(key, (input, global_scale, packed, block_scales))
    return run(input, global_scale, packed, block_scales)


def nvfp4_kv_dequantize(
    fp4_data: Tensor, block_scales: Tensor, global_scale: Tensor, output_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Compute e2m1 * block scale * global_scale of NVFP4 rows, rounded once to `output_dtype`.

    Args:
        fp4_data: uint8 [rows, dim / 2], the first element of a pair in the low nibble.
        block_scales: [rows, dim / 16], float8_e4m3fn or uint8 (its bytes), row by row.
        global_scale: float32 tensor of one value.
        output_dtype: bfloat16, float16, float32 or float64.

    Returns:
        [rows, dim] of `output_dtype`.

    Raises:
        ValueError, TypeError: for shapes, dtypes or devices that do not fit.

    Source: FlashInfer's `nvfp4_kv_dequantize`.

    >>> import torch
    >>> fp4, scales = nvfp4_kv_quantize(torch.arange(16.0).view(1, 16), torch.ones(1))
    >>> nvfp4_kv_dequantize(fp4, scales, torch.ones(1))[0].tolist()[:8]
    [0.0, 1.25, 2.5, 2.5, 3.75, 5.0, 5.0, 7.5]
    """
    if fp4_data.ndim == 0 or block_scales.ndim == 0:
        raise ValueError("nvfp4_kv_dequantize: fp4_data and block_scales must be [rows, width]; reshape them")
    if fp4_data.shape[0] != block_scales.shape[0]:
        raise ValueError(
            f"nvfp4_kv_dequantize: fp4_data has {fp4_data.shape[0]} rows, block_scales {block_scales.shape[0]}; "
            "make them equal"
        )
    if torch.compiler.is_compiling():
        out = fp4_data.new_empty(fp4_data.shape[0], fp4_data.shape[1] * 2, dtype=output_dtype)
        torch.ops.kernelmux.nvfp4_kv_dequantize(fp4_data, block_scales, global_scale, output_dtype, out)
        return out
    return _dequantize(fp4_data, block_scales, global_scale, output_dtype, None)


def _dequantize(
    packed: Tensor, block_scales: Tensor, global_scale: Tensor, output_dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    key = (
        (packed.dtype, packed.device, packed.shape[1:], packed.stride(), packed.data_ptr() & 15),
        (block_scales.dtype, block_scales.device, block_scales.shape[1:], block_scales.stride()),
        block_scales.data_ptr() & 15,
        (global_scale.shape, global_scale.dtype, global_scale.device, output_dtype),
        DEQUANTIZE.bucket(packed.shape[0]),
        PREFER.get(),
    )
    run = DEQUANTIZE.cache.get(key) or DEQUANTIZE.pick(key, (packed, block_scales, global_scale, output_dtype, out))
    return run(packed, block_scales, global_scale, output_dtype, out)


def _quantize_into(*args: Any) -> None:
    _quantize(*args)


def _dequantize_into(*args: Any) -> None:
    _dequantize(*args)


QUANTIZE.eager = _quantize_into
DEQUANTIZE.eager = _dequantize_into
