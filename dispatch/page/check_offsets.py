"""Deep checks of offsets (KERNELMUX_CHECK=1): they read values on the host."""

from itertools import pairwise

from torch import Tensor


def check_offsets(name: str, indptr: Tensor, rows: int) -> None:
    """Raise ValueError unless `indptr` starts at 0 or later, never falls, and ends inside `rows`. Synchronises."""
    values = indptr.tolist()
    if not values:
        return
    if values[0] < 0:
        raise ValueError(f"{name}[0] is {values[0]}, it must not be negative; correct it")
    for i, (a, b) in enumerate(pairwise(values)):
        if b < a:
            raise ValueError(f"{name}[{i + 1}] is {b}, less than {name}[{i}] = {a}; offsets must not fall")
    if values[-1] > rows:
        raise ValueError(f"{name} ends at {values[-1]}, there are {rows} rows; correct it")
