"""What one kernel can do, and the only judge of whether it can serve a call."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from kernelmux.capabilities.device import Device
from kernelmux.capabilities.reason import Reason
from kernelmux.capabilities.request import Request, dtype_name


@dataclass(frozen=True, slots=True)
class Limit:
    """Allowed values of one integer: all that are given must hold.

    >>> Limit(max=256, multiple_of=8).problem(320)
    'at most 256'
    >>> Limit(one_of=(64, 128)).problem(64) is None
    True
    """

    min: int | None = None
    max: int | None = None
    multiple_of: int | None = None
    one_of: tuple[int, ...] = ()

    def problem(self, value: int) -> str | None:
        if self.one_of and value not in self.one_of:
            allowed = ", ".join(map(str, self.one_of))
            return f"must be {allowed}" if len(self.one_of) == 1 else f"one of {allowed}"
        if self.min is not None and value < self.min:
            return f"at least {self.min}"
        if self.max is not None and value > self.max:
            return f"at most {self.max}"
        if self.multiple_of is not None and value % self.multiple_of:
            return f"a multiple of {self.multiple_of}"
        return None

    @property
    def thresholds(self) -> frozenset[int]:
        """Values at which the verdict may change, as first values of an interval."""
        edges = {v + d for v in self.one_of for d in (0, 1)}
        if self.min is not None:
            edges.add(self.min)
        if self.max is not None:
            edges.add(self.max + 1)
        return frozenset(edges)

    def __str__(self) -> str:
        if self.one_of:
            return "{" + ", ".join(map(str, self.one_of)) + "}"
        low = "" if self.min is None else f"{self.min}"
        high = "" if self.max is None else f"{self.max}"
        span = f"{low}..{high}" if low or high else ""
        return span + (f" %{self.multiple_of}" if self.multiple_of else "") or "any"


Check = Callable[[Request, Device], Iterable[Reason]]


@dataclass(frozen=True, slots=True)
class Support:
    """Declared abilities of one kernel. A dtype combination, a feature or a phase that is not named is refused.

    `roles` names the dtype roles in the order of the tuples in `dtypes`; None as `dtypes` means any. Dimensions that
    are not named are unlimited. `also` yields further reasons and reads, of the growing dims, only those in
    `also_reads`, which therefore enter a decision's key exactly.
    """

    device: str = "cuda"  # "cuda", "cpu" or "any"
    arch: Limit = field(default_factory=Limit)  # compute capability as an integer: 90 is sm90
    phases: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    dtypes: frozenset[tuple[torch.dtype, ...]] | None = None
    dims: Mapping[str, Limit] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    also: Check | None = None
    also_reads: tuple[str, ...] = ()

    def reasons(self, request: Request, device: Device) -> list[Reason]:
        """Every reason why this kernel cannot serve the request there, the gravest kind first. Empty: able."""
        found = [*self._device(device), *self._features(request), *self._dtypes(request), *self._dims(request, device)]
        if self.also is not None and not any(r.kind == "device" for r in found):
            found += self._also(self.also, request, device)
        return sorted(found, key=lambda r: r.rank)

    @staticmethod
    def _also(also: Check, request: Request, device: Device) -> list[Reason]:
        try:
            return list(also(request, device))
        except KeyError as error:
            if error.args[0] not in request.dims and error.args[0] not in request.dtypes:
                return [Reason("shape", str(error.args[0]), None, "the request does not say")]
            return [Reason("broken", "a check", None, f"KeyError: {error}")]
        except Exception as error:
            what = f"{getattr(also, '__module__', 'a')}.{getattr(also, '__name__', 'check')}"
            return [Reason("broken", what, None, f"{type(error).__name__}: {error}")]

    def _device(self, device: Device) -> Iterator[Reason]:
        if self.device not in ("any", device.type):
            yield Reason("device", "the device", device.type, f"needs a {self.device} device")
        elif device.type == "cuda" and (problem := self.arch.problem(device.sm)):
            yield Reason("device", "the GPU", f"sm{device.sm}", f"needs sm {problem}")

    def _features(self, request: Request) -> Iterator[Reason]:
        if self.phases and request.phase not in self.phases:
            yield Reason("feature", "phase", request.phase or "none", f"one of {', '.join(self.phases)}")
        for feature in sorted(request.features - self.features):
            yield Reason("feature", feature, None, "not supported by this kernel")
        if request.grad and "grad" not in self.features:
            yield Reason("feature", "grad", None, "this kernel is not differentiable", "call it under torch.no_grad()")

    def _dtypes(self, request: Request) -> Iterator[Reason]:
        if self.dtypes is None:
            return
        for role in request.dtypes:
            if role not in self.roles:
                yield Reason("dtype", role, dtype_name(request.dtypes[role]), "this kernel names no dtypes for it")
        roles = [r for r in self.roles if r in request.dtypes]
        got = tuple(request.dtypes[r] for r in roles)
        at = [self.roles.index(r) for r in roles]
        allowed = {tuple(combo[i] for i in at) for combo in self.dtypes}
        if got not in allowed:
            names = sorted("/".join(map(dtype_name, combo)) for combo in allowed)
            yield Reason("dtype", "/".join(roles), "/".join(map(dtype_name, got)), f"one of {', '.join(names)}")

    def _dims(self, request: Request, device: Device) -> Iterator[Reason]:
        where = f" on sm{device.sm}" if device.type == "cuda" else ""
        for name, limit in self.dims.items():
            if name in request.dims and (problem := limit.problem(request.dims[name])):
                yield Reason("shape", name, request.dims[name], problem + where)


def dtype_combos(roles: str, *combos: str) -> tuple[tuple[str, ...], frozenset[tuple[torch.dtype, ...]]]:
    """Roles and dtype combinations from short texts: `dtype_combos("q kv out", "bf16 bf16 bf16")`."""
    return tuple(roles.split()), frozenset(tuple(SHORT[name] for name in combo.split()) for combo in combos)


SHORT = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "u8": torch.uint8,
    "i8": torch.int8,
    "i32": torch.int32,
    "i64": torch.int64,
    "bool": torch.bool,
}
