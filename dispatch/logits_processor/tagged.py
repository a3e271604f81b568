"""What flows through a pipe: a tensor that knows what it holds."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class TensorType(Enum):
    """What a tensor of a pipe holds: unnormalised scores, probabilities, or token ids."""

    LOGITS = 1
    PROBS = 2
    INDICES = 3


@dataclass(frozen=True, slots=True)
class TaggedTensor:
    """A tensor and what it holds.

    >>> TaggedTensor.logits(torch.zeros(2, 4)).size(1)
    4
    """

    data: Tensor
    type: TensorType

    def __post_init__(self) -> None:
        if not isinstance(self.data, Tensor):
            raise TypeError(f"data is a {type(self.data).__name__}, it must be a torch.Tensor; convert it")

    @classmethod
    def logits(cls, t: Tensor) -> "TaggedTensor":
        return cls(t, TensorType.LOGITS)

    @classmethod
    def probs(cls, t: Tensor) -> "TaggedTensor":
        return cls(t, TensorType.PROBS)

    @classmethod
    def indices(cls, t: Tensor) -> "TaggedTensor":
        return cls(t, TensorType.INDICES)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def size(self, dim: int | None = None) -> Any:
        return self.data.size() if dim is None else self.data.size(dim)
