"""Bit packing against numpy.packbits."""

import numpy as np
import pytest
import torch

from kernelmux.dispatch.attention.packbits import packbits, segment_packbits


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 64, 1000])
def test_packbits(n: int, bitorder: str) -> None:
    x = torch.rand(n, generator=torch.Generator().manual_seed(n)) < 0.5
    got = packbits(x, bitorder)
    assert got.dtype == torch.uint8 and got.shape == (-(-n // 8),)
    assert got.tolist() == np.packbits(x.numpy(), bitorder=bitorder).tolist()


def test_any_shape_stride_and_integer_type() -> None:
    x = (torch.arange(48).view(4, 12) * 7) % 3
    for y in (x, x.t(), x[:, ::2], x.bool(), x.to(torch.uint8), x.int()):
        assert packbits(y).tolist() == np.packbits(y.bool().numpy().ravel()).tolist()
    assert packbits(torch.ones(16, dtype=torch.bool)[::2]).tolist() == [255]


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("lengths", [[], [0], [5], [3, 0, 8, 17, 0, 1], [64, 64], [0, 0]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_segments(lengths: list[int], bitorder: str, dtype: torch.dtype) -> None:
    """Each segment as if packed alone; offsets count bytes, in int32."""
    x = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(1)) < 0.5
    y, indptr = segment_packbits(x, torch.tensor([0, *np.cumsum(lengths)], dtype=dtype), bitorder)
    parts = [np.packbits(p.numpy(), bitorder=bitorder).tolist() for p in x.split(lengths)] if lengths else []
    assert y.dtype == torch.uint8 and y.tolist() == [byte for part in parts for byte in part]
    assert indptr.dtype == torch.int32 and indptr.tolist() == [0, *np.cumsum([len(p) for p in parts])]


@pytest.mark.gpu
@pytest.mark.parametrize("bitorder", ["big", "little"])
def test_on_a_gpu(bitorder: str) -> None:
    x, indptr = torch.rand(100, generator=torch.Generator().manual_seed(1)) < 0.5, torch.tensor([0, 3, 3, 51, 100])
    assert packbits(x.cuda(), bitorder).tolist() == packbits(x, bitorder).tolist()
    for there in (indptr, indptr.cuda()):
        got, want = segment_packbits(x.cuda(), there, bitorder), segment_packbits(x, indptr, bitorder)
        assert [t.tolist() for t in got] == [t.tolist() for t in want]


def test_elements_outside_every_segment_are_left_out() -> None:
    x = torch.ones(12, dtype=torch.bool)
    y, indptr = segment_packbits(x, torch.tensor([2, 4, 9]), bitorder="little")
    assert y.tolist() == [3, 31] and indptr.tolist() == [0, 1, 2]


def test_compiles() -> None:
    x = torch.rand(3, 21) < 0.5
    compiled = torch.compile(lambda t: packbits(t, "little"), backend="aot_eager", fullgraph=True)
    assert compiled(x).tolist() == packbits(x, "little").tolist()


def test_wrong_arguments() -> None:
    x = torch.ones(4, dtype=torch.bool)
    with pytest.raises(ValueError, match="packbits: bitorder is 'middle', it must be 'big' or 'little'"):
        packbits(x, "middle")
    with pytest.raises(
        TypeError, match="packbits: x is float32, it must be bool or an integer type; compare it with 0"
    ):
        packbits(x.float())
    with pytest.raises(ValueError, match="segment_packbits: bitorder is 'BIG'"):
        segment_packbits(x, torch.tensor([0, 4]), "BIG")
    with pytest.raises(ValueError, match=r"x has shape \[2, 2\] and indptr \[2\] of int64, give x \[n\]"):
        segment_packbits(x.view(2, 2), torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="of float32, give x"):
        segment_packbits(x, torch.tensor([0.0, 4.0]))
