"""KERNELMUX_CHECK=1 on offsets that leave their tensors or fall; without it nothing is read."""

import pytest
import torch

import kernelmux as km


@pytest.fixture
def _checking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELMUX_CHECK", "1")
    km.reload()


@pytest.mark.usefixtures("_checking")
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 2, 9], r"indptr\[-1\] is 9, q has 4 entries"),
        ([0, 3, 2], r"indptr\[2\] is 2, less than the offset before it"),
        ([-1, 2, 4], r"indptr\[0\] is -1, it must not be negative"),
    ],
)
def test_bad_offsets_raise(offsets: list[int], message: str) -> None:
    indptr, q = torch.tensor(offsets), torch.ones(4, 2, 8)
    with pytest.raises(ValueError, match=message):
        km.apply_rope(q, q, indptr, torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=message):
        km.apply_rope_inplace(q.clone(), q.clone(), indptr, torch.tensor([0, 0]))


@pytest.mark.usefixtures("_checking")
def test_segments_beyond_the_bits_raise() -> None:
    with pytest.raises(ValueError, match=r"indptr\[-1\] is 20, x has 8 entries"):
        km.segment_packbits(torch.ones(8, dtype=torch.bool), torch.tensor([0, 3, 20]))


@pytest.mark.usefixtures("_checking")
def test_good_offsets_pass() -> None:
    q = torch.ones(4, 2, 8)
    assert km.apply_rope(q, q, torch.tensor([0, 1, 4]), torch.tensor([0, 0]))[0].shape == q.shape
    assert km.segment_packbits(torch.ones(8, dtype=torch.bool), torch.tensor([0, 3, 8]))[1].tolist() == [0, 1, 2]
