"""NVFP4 in plain torch: two E2M1 values a byte (the first in the low nibble), one E4M3 scale for 16 of them."""

from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 16
E4M3_MAX = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDPOINTS = tuple((low + high) / 2 for low, high in pairwise(E2M1))


def encode_e2m1(x: Tensor) -> Tensor:
    """Codes 0..15 of the nearest E2M1 values: ties go to the even code, what is beyond 6 becomes 6."""
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for lower, middle in enumerate(_MIDPOINTS):
        code += size > middle if lower % 2 == 0 else size >= middle
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of codes 0..15: sign, two bits of exponent, one of mantissa. Without a table, to copy none to a GPU."""
    size, mantissa = codes & 7, codes & 1
    quarters = torch.where(size < 2, 2 * mantissa, (2 + mantissa) << (size >> 1))
    return quarters.to(dtype) / 4 * (1 - 2 * (codes >> 3).to(dtype))


def pack_nvfp4(x: Tensor, global_scale: Tensor | float) -> tuple[Tensor, Tensor]:
    """Quantise the last dim (a multiple of 16) of x: (uint8 [..., dim/2], float8_e4m3fn [..., dim/16]).

    `global_scale` dequantises: x ~ e2m1 * block_scale * global_scale. A block of zeros, or one so small that its scale
    underflows, becomes zeros.
    """
    work = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32) / global_scale
    blocks = work.unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1) / E2M1[-1]).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    step = scales.to(work.dtype)[..., None]
    codes = encode_e2m1(torch.where(step == 0, 0.0, blocks / step)).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def unpack_nvfp4(packed: Tensor, block_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., 2 * packed dim] of `dtype`, without the global scale. Scales are float8_e4m3fn, or their bytes."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    scales = block_scales.view(torch.float8_e4m3fn) if block_scales.dtype == torch.uint8 else block_scales
    return decode_e2m1(codes, dtype) * scales.to(dtype).repeat_interleave(BLOCK, dim=-1)


def nvfp4_kv_quantize(
    input: Tensor, global_scale: Tensor, packed: Tensor | None = None, block_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """input [rows, dim] as (uint8 [rows, dim/2], E4M3 bytes in uint8 [rows, dim/16])."""
    codes, scales = pack_nvfp4(input, global_scale)
    result = (codes, scales.view(torch.uint8))
    if packed is None or block_scales is None:
        return result
    packed.copy_(result[0])
    block_scales.copy_(result[1])
    return packed, block_scales


def nvfp4_kv_dequantize(
    packed: Tensor, block_scales: Tensor, global_scale: Tensor, output_dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """e2m1 * block_scale * global_scale, rounded once to `output_dtype`."""
    work = torch.float64 if output_dtype == torch.float64 else torch.float32
    value = (unpack_nvfp4(packed, block_scales, work) * global_scale).to(output_dtype)
    return value if out is None else out.copy_(value)
