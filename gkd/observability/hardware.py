"""What the machine itself says of its memory: GPUs through NVML, the host and its processes through psutil."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil

from gkd.cluster.gpu import handles, nvml, text

GB = 1e9


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU."""

    index: int
    uuid: str
    name: str
    capability: str
    total_gb: float
    free_gb: float


def cards() -> list[Card]:
    """Return this machine's GPUs in PCI order; none where there is no driver."""
    with nvml() as library:
        return [_card(library, index, handle) for index, handle in enumerate(handles(library))]


def _card(library: Any, index: int, handle: Any) -> Card:
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    major, minor = library.nvmlDeviceGetCudaComputeCapability(handle)
    return Card(
        index=index,
        uuid=text(library.nvmlDeviceGetUUID(handle)),
        name=text(library.nvmlDeviceGetName(handle)),
        capability=f"{major}.{minor}",
        total_gb=memory.total / GB,
        free_gb=memory.free / GB,
    )


def resident_gb(pid: int) -> float | None:
    """Return memory of a process and its children on this machine; None where it has ended."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return float(sum(member.memory_info().rss for member in family) / GB)
    except psutil.NoSuchProcess:
        return None


def host_free_gb() -> float:
    """Return memory of this machine that programs can still have."""
    return float(psutil.virtual_memory().available / GB)
