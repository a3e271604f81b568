"""One adapter file per op family: renames, conversion of layouts and conventions, the vendor's call, the result.

No capability checks and no environment reads here: the declaration did the first, dispatch/settings.py the second. A
call that cannot run after all is refused before any launch: `raise Unsupported("why")`, and the next kernel takes it.
"""

import some_library
import torch
from torch import Tensor


def rmsnorm(input: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    out = torch.empty_like(input) if out is None else out
    some_library.rms_norm(output=out, x=input, gamma=weight, epsilon=eps)  # launches on torch's current stream
    return out
