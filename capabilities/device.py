"""Facts about one device: detected on this machine, or preset so that every GPU's choices can be tested anywhere."""

from dataclasses import dataclass
from functools import cache

import torch

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Device:
    """What is known of a device before anything runs on it.

    `sm` is the compute capability as an integer (90 = 9.0), 0 on a CPU; sizes are bytes, `bandwidth` bytes/s of device
    memory (0 = unknown), `links` the fastest way to peers: "nvlink", "pcie" or "none".
    """

    type: str
    name: str
    sm: int = 0
    sm_count: int = 0
    shared_memory: int = 0  # most that one block may ask for
    l2: int = 0
    memory: int = 0
    bandwidth: float = 0.0
    links: str = "none"

    @property
    def arch(self) -> str:
        return f"sm{self.sm}" if self.type == "cuda" else self.type

    def __str__(self) -> str:
        return f"{self.name} ({self.arch})" if self.type == "cuda" else self.name


def _gpu(name: str, sm: int, sms: int, smem: int, l2: float, gib: int, tb_s: float, links: str = "pcie") -> Device:
    return Device("cuda", name, sm, sms, smem * _KIB, int(l2 * _MIB), gib * _GIB, tb_s * 1e12, links)


# Shared memory per block: CUDA programming guide, table of technical specifications. The rest: NVIDIA's datasheets.
PRESETS: dict[str, Device] = {
    "T4": _gpu("NVIDIA T4", 75, 40, 64, 4, 16, 0.32),
    "A100": _gpu("NVIDIA A100-SXM4-80GB", 80, 108, 163, 40, 80, 2.04, "nvlink"),
    "A10": _gpu("NVIDIA A10", 86, 72, 99, 6, 24, 0.6),
    "L40S": _gpu("NVIDIA L40S", 89, 142, 99, 96, 48, 0.864),
    "H100": _gpu("NVIDIA H100 80GB HBM3", 90, 132, 227, 50, 80, 3.35, "nvlink"),
    "H200": _gpu("NVIDIA H200", 90, 132, 227, 60, 141, 4.8, "nvlink"),
    "B200": _gpu("NVIDIA B200", 100, 148, 227, 126, 180, 8.0, "nvlink"),
    "B300": _gpu("NVIDIA B300", 103, 148, 227, 126, 288, 8.0, "nvlink"),
    "Thor": _gpu("NVIDIA Thor", 110, 20, 227, 32, 128, 0.273, "none"),
    "RTX5090": _gpu("NVIDIA GeForce RTX 5090", 120, 170, 99, 96, 32, 1.792),
    "GB10": _gpu("NVIDIA GB10", 121, 48, 99, 24, 128, 0.273),
    "CPU": Device("cpu", "CPU"),
}


def preset(name: str) -> Device:
    """The preset of that name, whatever its case and spaces; ValueError lists the names.

    >>> preset("rtx 5090").sm
    120
    """
    wanted = name.replace(" ", "").replace("_", "").lower()
    for key, device in PRESETS.items():
        if key.lower() == wanted:
            return device
    raise ValueError(f"device is {name!r}, one of {', '.join(PRESETS)}")


def detect(device: "torch.device | str | int | None" = None) -> Device:
    """Facts of a device of this machine: the current GPU when there is one, else the CPU. Cached per index."""
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        return PRESETS["CPU"] if device.type == "cpu" else Device(device.type, device.type)
    return _detect_gpu(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _detect_gpu(index: int) -> Device:
    p = torch.cuda.get_device_properties(index)
    sm = p.major * 10 + p.minor
    known = next((d for d in PRESETS.values() if d.name == p.name), None)
    clock, width = getattr(p, "memory_clock_rate", 0), getattr(p, "memory_bus_width", 0)  # kHz, bits
    peers = any(torch.cuda.can_device_access_peer(index, i) for i in range(torch.cuda.device_count()) if i != index)
    return Device(
        type="cuda",
        name=p.name,
        sm=sm,
        sm_count=p.multi_processor_count,
        shared_memory=getattr(p, "shared_memory_per_block_optin", 0) or (known.shared_memory if known else 48 * _KIB),
        l2=getattr(p, "L2_cache_size", 0),
        memory=p.total_memory,
        bandwidth=known.bandwidth if known else 2e3 * clock * width / 8,
        links="none" if not peers else (known.links if known else "pcie"),
    )
