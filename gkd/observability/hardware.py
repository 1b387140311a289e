"""What the machine itself says of its memory: GPUs through NVML, the host and its processes through psutil."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import pynvml

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
    """This machine's GPUs in PCI order; none where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_card(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _card(index: int) -> Card:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Card(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        capability=f"{major}.{minor}",
        total_gb=memory.total / GB,
        free_gb=memory.free / GB,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def resident_gb(pid: int) -> float | None:
    """Memory of a process and its children on this machine; None where it has ended."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return float(sum(member.memory_info().rss for member in family) / GB)
    except psutil.NoSuchProcess:
        return None


def host_free_gb() -> float:
    """Memory of this machine that programs can still have."""
    return float(psutil.virtual_memory().available / GB)
