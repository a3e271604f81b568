"""Where the seed and offset of a random op come from: its caller, or a generator."""

import torch
from torch import Tensor

from kernelmux.capabilities import dtype_name


def get_seed_and_offset(
    increment: int, generator: torch.Generator | None = None, device: torch.device | str | int | None = None
) -> tuple[int, int]:
    """Take a seed and an offset from a generator, and move the generator on.

    A CUDA generator gives its seed and its Philox offset, which then grows by `increment` rounded up to a multiple of
    4: the numbers in between belong to the caller. Any other generator draws the pair, an offset divisible by 4. Equal
    states give equal pairs; consecutive calls differ.

    Args:
        increment: how many numbers per row the caller may use, at least 1.
        generator: None means the default generator of `device`.
        device: None means the current CUDA device if there is one, else the CPU.

    Returns:
        (seed, offset), two ints.

    Raises:
        RuntimeError: while a CUDA graph is captured: its replays would repeat one pair.

    Source: FlashInfer's helper of this name.

    >>> generator = torch.Generator().manual_seed(0)
    >>> get_seed_and_offset(4, generator) != get_seed_and_offset(4, generator)
    True
    """
    if generator is None:
        generator = _default(device)
    elif not isinstance(generator, torch.Generator):
        raise TypeError(f"generator is {generator!r}, it must be a torch.Generator or None; pass a number as seed")
    if generator.device.type != "cuda":
        seed, offset = torch.randint(2**63 - 1, (2,), generator=generator, device=generator.device).tolist()
        return seed, offset & ~3
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph is being captured, no seed can be read; give seed and offset as tensors")
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + (increment + 3) // 4 * 4)
    return seed, offset


def _default(device: torch.device | str | int | None) -> torch.Generator:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def choose(
    seed: int | Tensor | None,
    offset: int | Tensor | None,
    generator: torch.Generator | None,
    batch: int,
    increment: int,
    device: torch.device,
) -> tuple[int | Tensor, int | Tensor]:
    """The pair to use: the caller's when both are given (two ints or two tensors), else one from the generator."""
    if seed is None or offset is None:
        return get_seed_and_offset(increment, generator, device)
    if isinstance(seed, int) and isinstance(offset, int):
        return seed, offset
    if not (isinstance(seed, Tensor) and isinstance(offset, Tensor)):
        got = f"{type(seed).__name__} and {type(offset).__name__}"
        raise ValueError(f"seed and offset are {got}, they must both be int or both be tensors; convert one of them")
    for name, value in (("seed", seed), ("offset", offset)):
        if value.dtype not in (torch.int64, torch.uint64):
            raise ValueError(f"{name} is {dtype_name(value.dtype)}, it must be int64 or uint64; convert it")
        if value.ndim != 1 or value.shape[0] not in (1, batch):
            raise ValueError(
                f"{name} has shape {list(value.shape)}, it must be [1] or [{batch}]; give one value, or one per output"
            )
        if value.device != device:
            raise ValueError(f"{name} is on {value.device}, the distributions are on {device}; move it")
    return seed, offset
