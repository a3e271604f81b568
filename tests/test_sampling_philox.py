"""The random numbers: published vectors, what a draw depends on, and where seeds come from."""

import pytest
import torch

from kernelmux.dispatch.sampling import get_seed_and_offset, sampling_from_logits, sampling_from_probs
from kernelmux.dispatch.sampling.philox import Words, philox4x32, uniform
from kernelmux.dispatch.sampling.seeds import choose

CPU = torch.empty(0)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_published_vectors(counter: str, key: str, expected: str, device: str) -> None:
    words = [torch.tensor([int(w, 16)], device=device) for w in counter.split()]
    keys = [torch.tensor([int(w, 16)], device=device) for w in key.split()]
    assert [int(w) for w in philox4x32(Words(*words), (keys[0], keys[1]))] == [int(w, 16) for w in expected.split()]


def by_hand(seed: int, offset: int, sequence: int, index: int) -> float:
    """Number `index` by the definition in the module's docstring, in Python integers."""
    low = 0xFFFFFFFF
    position = (offset + index) % 2**64
    block = position // 4
    x, y, z, w = block & low, block >> 32, sequence & low, sequence >> 32
    k0, k1 = seed & low, seed >> 32 & low
    for _ in range(10):
        a, b = 0xD2511F53 * x, 0xCD9E8D57 * z
        x, y, z, w = (b >> 32) ^ y ^ k0, b & low, (a >> 32) ^ w ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return ((x, y, z, w)[position % 4] + 0.5) / 2**32


@pytest.mark.parametrize("seed", [0, 42, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize("offset", [0, 1, 6, 2**34 - 3, 2**63 + 2, 2**64 - 2])
def test_numbers_follow_the_definition(seed: int, offset: int) -> None:
    got = uniform(seed, offset, range(1, 3), batch=5, count=7, like=CPU)
    assert got.tolist() == [[by_hand(seed, offset, row, j) for j in range(7)] for row in (1, 2)]
    assert ((got > 0) & (got < 1)).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_tensor_seeds(dtype: torch.dtype) -> None:
    seeds = torch.tensor([3, 2**62, 5], dtype=torch.int64).to(dtype)
    offsets = torch.tensor([0, 9, 4], dtype=torch.int64).to(dtype)
    own = uniform(seeds, offsets, range(3), 3, 5, CPU)
    values = zip(seeds.tolist(), offsets.tolist(), strict=True)
    assert own.tolist() == [[by_hand(s, o, 0, j) for j in range(5)] for s, o in values]
    shared = uniform(seeds[:1], offsets[:1], range(3), 3, 5, CPU)
    assert torch.equal(shared, uniform(3, 0, range(3), 3, 5, CPU))
    assert torch.equal(uniform(seeds, offsets, range(1, 2), 3, 5, CPU), own[1:2])


def test_negative_and_unsigned_seeds_are_the_same_bits() -> None:
    assert torch.equal(uniform(-1, 0, range(2), 2, 3, CPU), uniform(2**64 - 1, 0, range(2), 2, 3, CPU))


def test_numbers_are_uniform() -> None:
    u = uniform(7, 0, range(64), 64, 1024, CPU).flatten()
    counts = torch.histc(u.float(), 64, 0, 1)
    assert ((counts - 1024) ** 2 / 1024).sum() < 63 + 4 * (2 * 63) ** 0.5
    assert abs(torch.corrcoef(torch.stack((u[:-1], u[1:])))[0, 1]) < 0.02


def test_a_cpu_generator_repeats_and_moves_on() -> None:
    pairs = [get_seed_and_offset(8, torch.Generator().manual_seed(5)) for _ in range(2)]
    assert pairs[0] == pairs[1]
    generator = torch.Generator().manual_seed(5)
    first, second = get_seed_and_offset(8, generator), get_seed_and_offset(8, generator)
    assert first == pairs[0]
    assert second != first
    assert all(o % 4 == 0 for _, o in (first, second))


def test_the_default_generator_is_the_devices() -> None:
    torch.manual_seed(11)
    first = get_seed_and_offset(4, device="cpu")
    assert first != get_seed_and_offset(4, device="cpu")
    torch.manual_seed(11)
    assert first == get_seed_and_offset(4, device=torch.device("cpu"))


@pytest.mark.gpu
def test_a_cuda_generator_advances_by_multiples_of_four() -> None:
    generator = torch.Generator("cuda").manual_seed(9)
    assert get_seed_and_offset(5, generator) == (9, 0)
    assert get_seed_and_offset(1, generator) == (9, 8)
    assert get_seed_and_offset(1, generator) == (9, 12)


@pytest.mark.gpu
def test_the_same_numbers_on_cuda() -> None:
    cuda = torch.empty(0, device="cuda")
    for seed, offset in ((1, 0), (2**63 + 5, 2**40 + 3)):
        there = uniform(seed, offset, range(3), 3, 1001, cuda)
        assert torch.equal(there.cpu(), uniform(seed, offset, range(3), 3, 1001, CPU))


def test_generator_state_decides_the_ids() -> None:
    probs = torch.full((64, 1000), 1e-3)
    torch.manual_seed(1)
    first, second = sampling_from_probs(probs), sampling_from_probs(probs)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(first, sampling_from_probs(probs))
    generator = torch.Generator().manual_seed(3)
    third = sampling_from_logits(probs, generator=generator)
    assert torch.equal(third, sampling_from_logits(probs, generator=torch.Generator().manual_seed(3)))
    assert not torch.equal(third, sampling_from_logits(probs, generator=generator))


def test_one_missing_of_seed_and_offset_means_the_generator() -> None:
    generator = torch.Generator().manual_seed(3)
    expected = get_seed_and_offset(4, torch.Generator().manual_seed(3))
    assert choose(7, None, generator, 1, 4, torch.device("cpu")) == expected


@pytest.mark.parametrize(
    ("seed", "offset", "message"),
    [
        (1, torch.tensor([0]), "seed and offset are int and Tensor, they must both be"),
        (torch.tensor([1]), 0, "seed and offset are Tensor and int"),
        (1.5, 0, "seed and offset are float and int"),
        (torch.tensor([1, 2]), torch.tensor([0]), r"seed has shape \[2\], it must be \[1\] or \[3\]"),
        (torch.tensor([1]), torch.tensor([[0]]), r"offset has shape \[1, 1\]"),
        (torch.tensor([1], dtype=torch.int32), torch.tensor([0]), "seed is int32, it must be int64 or uint64"),
        (torch.tensor([1], device="meta"), torch.tensor([0]), "seed is on meta, the distributions are on cpu; move it"),
    ],
)
def test_seeds_that_do_not_fit(seed: object, offset: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampling_from_probs(torch.full((3, 4), 0.25), seed=seed, offset=offset)  # type: ignore[arg-type]
