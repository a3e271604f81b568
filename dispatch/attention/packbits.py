"""packbits and segment_packbits: booleans as bits, eight a byte."""

import torch
from torch import Tensor

from kernelmux.capabilities import Request, dtype_name
from kernelmux.dispatch.attention import packbits_reference as reference
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.page.check import check_offsets

_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _request(op: str, x: Tensor, bitorder: str, segments: int) -> Request:
    if bitorder not in ("big", "little"):
        raise ValueError(f"{op}: bitorder is {bitorder!r}, it must be 'big' or 'little'")
    if x.dtype not in _DTYPES:
        raise TypeError(f"{op}: x is {dtype_name(x.dtype)}, it must be bool or an integer type; compare it with 0")
    return Request(
        op=op,
        family="attention",
        device=x.device,
        dtypes={"x": x.dtype},
        dims={"bits": x.shape[0], "segments": segments},
        features=frozenset({bitorder} | ({"strided"} if x.stride(0) != 1 else set())),
        empty=x.shape[0] == 0,
    )


def _describe(x: Tensor, bitorder: str, y: Tensor | None) -> Request:
    return _request("packbits", x, bitorder, 1)


def _describe_segments(x: Tensor, indptr: Tensor, packed_indptr: Tensor, bitorder: str, y: Tensor) -> Request:
    return _request("segment_packbits", x, bitorder, indptr.shape[0] - 1)


PACKBITS = Op(
    "packbits",
    "attention",
    reference.packbits,
    _describe,
    growing=("bits",),
    dims=("segments",),
    roles=("x",),
    features=("big", "little", "strided"),
    schema="(Tensor x, str bitorder, Tensor(a!) y) -> ()",
)


def _check_segments(x: Tensor, indptr: Tensor, *others: object) -> None:
    check_offsets("indptr", indptr, x.shape[0], "x")


SEGMENT_PACKBITS = Op(
    "segment_packbits",
    "attention",
    reference.segment_packbits,
    _describe_segments,
    growing=("bits", "segments"),
    roles=("x",),
    features=("big", "little", "strided"),
    schema="(Tensor x, Tensor indptr, Tensor packed_indptr, str bitorder, Tensor(a!) y) -> ()",
    check=_check_segments,
)


def packbits(x: Tensor, bitorder: str = "big") -> Tensor:
    """Pack booleans into bytes, as numpy.packbits does.

    Args:
        x: bool or integer tensor, flattened; non-zero counts as 1.
        bitorder: "big": element 0 is the highest bit of byte 0; "little": the lowest, as attention masks have it.

    Returns:
        uint8 [ceil(n / 8)]; missing bits of the last byte are 0.

    Raises:
        ValueError: for another bitorder. TypeError: for a floating dtype.

    Source: FlashInfer's `packbits`.

    >>> import torch
    >>> packbits(torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1], dtype=torch.bool)).tolist()
    [179, 128]
    >>> packbits(torch.tensor([True, False, True]), bitorder="little").tolist()
    [5]
    """
    x = x.reshape(-1)
    if torch.compiler.is_compiling():
        y = x.new_empty((x.shape[0] + 7) // 8, dtype=torch.uint8)
        torch.ops.kernelmux.packbits(x, bitorder, y)
        return y
    return _packbits(x, bitorder, None)


def _packbits(x: Tensor, bitorder: str, y: Tensor | None) -> Tensor:
    key = (x.dtype, x.device, x.stride(), bitorder, PACKBITS.bucket(x.shape[0]), PREFER.get())
    run = PACKBITS.cache.get(key) or PACKBITS.pick(key, (x, bitorder, y))
    return run(x, bitorder, y)


def segment_packbits(x: Tensor, indptr: Tensor, bitorder: str = "big") -> tuple[Tensor, Tensor]:
    """Pack each segment of booleans into bytes of its own.

    The size of the result is read from `indptr`: on a GPU that is a host sync (none under a CPU `indptr`).

    Args:
        x: bool or integer tensor [n]; non-zero counts as 1.
        indptr: integer [segments + 1], segment i is x[indptr[i]:indptr[i + 1]]; on x's device or on the CPU.
        bitorder: "big" or "little", as in `packbits`.

    Returns:
        (y, new_indptr): uint8 bytes, and int32 [segments + 1] on x's device; segment i fills ceil(length / 8) bytes
        y[new_indptr[i]:new_indptr[i + 1]].

    Raises:
        ValueError: for another bitorder or an indptr that is not 1-D. TypeError: for a floating dtype.

    Source: FlashInfer's `segment_packbits`.

    >>> import torch
    >>> y, indptr = segment_packbits(torch.ones(11, dtype=torch.bool), torch.tensor([0, 3, 11]), bitorder="little")
    >>> y.tolist(), indptr.tolist()
    ([7, 255], [0, 1, 2])
    """
    if x.ndim != 1 or indptr.ndim != 1 or indptr.shape[0] == 0 or indptr.dtype.is_floating_point:
        raise ValueError(
            f"segment_packbits: x has shape {list(x.shape)} and indptr {list(indptr.shape)} of "
            f"{dtype_name(indptr.dtype)}, give x [n] and an integer indptr [segments + 1]"
        )
    lengths = (indptr[1:] - indptr[:-1] + 7) // 8
    packed = torch.cat((lengths.new_zeros(1), lengths.cumsum(0, dtype=indptr.dtype)))
    y = x.new_empty(int(packed[-1]), dtype=torch.uint8)
    indptr, packed = indptr.to(x.device, torch.int64), packed.to(x.device, torch.int32)
    if torch.compiler.is_compiling():
        torch.ops.kernelmux.segment_packbits(x, indptr, packed, bitorder, y)
    else:
        _segment_packbits(x, indptr, packed, bitorder, y)
    return y, packed


def _segment_packbits(x: Tensor, indptr: Tensor, packed_indptr: Tensor, bitorder: str, y: Tensor) -> None:
    op = SEGMENT_PACKBITS
    key = (x.dtype, x.device, x.stride(), bitorder, op.bucket(x.shape[0], indptr.shape[0] - 1), PREFER.get())
    run = op.cache.get(key) or op.pick(key, (x, indptr, packed_indptr, bitorder, y))
    run(x, indptr, packed_indptr, bitorder, y)


def _packbits_into(x: Tensor, bitorder: str, y: Tensor) -> None:
    _packbits(x, bitorder, y)


PACKBITS.eager = _packbits_into
SEGMENT_PACKBITS.eager = _segment_packbits
