"""Ask what would be chosen, and why, before any call."""

from kernelmux.capabilities import Device, Request, SettingError, detect
from kernelmux.dispatch.decision import Decision
from kernelmux.dispatch.resolve import AllInstalled, Probe, resolve
from kernelmux.dispatch.state import INSTALLED, OPS, rules, settings


def explain(
    request: Request, device: Device | None = None, *, installed: bool = True, backend: str = "auto"
) -> Decision:
    """The Decision for a request, also for a device that is not there.

    Args:
        request: what a call would need.
        device: a detected or preset Device; None = this machine's.
        installed: judge by the libraries of this machine; False takes every library as installed.
        backend: as the `backend` argument of the call.

    Raises:
        NoKernelError: when nothing is able; its text holds every reason.
    """
    op = OPS.get(request.op)
    if op is None:
        raise SettingError(f"op is {request.op!r}, one of {', '.join(sorted(OPS))}")
    probe: Probe = INSTALLED if installed else AllInstalled()
    where = device or detect(request.device)
    return resolve(request, where, op.candidates(), rules(), settings(), probe, op.choices(request, backend))
