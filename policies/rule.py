"""One rule: for which calls, in which order kernels are preferred, and what shows that it is right."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kernelmux.capabilities.device import Device
from kernelmux.capabilities.request import Request, dtype_name
from kernelmux.capabilities.support import Limit


@dataclass(frozen=True, slots=True)
class Rule:
    """Orders able kernels of the calls it matches; it never makes an unable kernel able.

    `order` names backends or kernel ids. `arch` limits the compute capability (an empty Limit also matches CPUs);
    `when` limits dimensions, `dtypes` fixes dtypes by role, `features` must all be used, `without` none of them.
    """

    name: str
    op: str
    order: tuple[str, ...]
    why: str
    phase: str = ""
    device: str = ""  # "cuda", "cpu" or "" for any
    arch: Limit = field(default_factory=Limit)
    when: Mapping[str, Limit] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    evidence: Mapping[str, str] = field(default_factory=dict)
    source: str = "packaged rule"

    def matches(self, request: Request, device: Device) -> bool:
        return (
            self.op == request.op
            and self.phase in ("", request.phase)
            and self.device in ("", device.type)
            and (self.arch == Limit() or (device.type == "cuda" and self.arch.problem(device.sm) is None))
            and self.features <= request.features
            and not (self.without & request.features)
            and all(d in request.dims and limit.problem(request.dims[d]) is None for d, limit in self.when.items())
            and all(
                role in request.dtypes and dtype_name(request.dtypes[role]) == name
                for role, name in self.dtypes.items()
            )
        )
