"""What one call needs, without its tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One call as the judge sees it.

    `dtypes` by role (q, kv, out, input, weight, …); `dims` by name; `features` names everything the call uses beyond
    the plain op, and a kernel that does not name one of them is out. `empty`: nothing to compute; `grad`: the result
    must be differentiable.
    """

    op: str
    family: str
    phase: str = ""
    device: torch.device | None = None
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    empty: bool = False
    grad: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", frozenset(self.features))

    @property
    def label(self) -> str:
        return f"{self.op}/{self.phase}" if self.phase else self.op

    def as_json(self) -> dict[str, object]:
        """A JSON value that `from_json` reads back; the device stays behind."""
        return {
            "op": self.op,
            "family": self.family,
            "phase": self.phase,
            "dtypes": {role: dtype_name(d) for role, d in self.dtypes.items()},
            "dims": dict(self.dims),
            "features": sorted(self.features),
            "grad": self.grad,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> "Request":
        known = {"op", "family", "phase", "dtypes", "dims", "features", "grad"}
        if extra := sorted(set(value) - known):
            raise ValueError(f"request has the unknown key {extra[0]!r}, known are {', '.join(sorted(known))}")
        fields = dict(value)
        dtypes = fields.get("dtypes", {})
        features = fields.get("features", ())
        if not isinstance(dtypes, Mapping) or not isinstance(features, Iterable):
            raise ValueError("request wants dtypes as a table and features as a list")
        fields["dtypes"] = {role: dtype_of(str(name)) for role, name in dtypes.items()}
        fields["features"] = frozenset(features)
        return cls(**fields)  # type: ignore[arg-type]

    def __str__(self) -> str:
        dtypes = " ".join(f"{role}={dtype_name(d)}" for role, d in self.dtypes.items())
        dims = " ".join(f"{name}={n}" for name, n in self.dims.items())
        parts = [self.label, dtypes, dims, "+".join(sorted(self.features)), "grad" if self.grad else ""]
        return "  ".join(p for p in parts if p)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name such as "bfloat16"; ValueError for anything else."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {name!r}, not a name of a torch dtype such as 'bfloat16'")
    return dtype
