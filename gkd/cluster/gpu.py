"""What a GPU is: a device with a UUID that two workers must not share.

Ray and CUDA name devices by tokens of CUDA_VISIBLE_DEVICES (``3``, ``GPU-8f2c...``, ``MIG-...``), which mean different
devices on different nodes; the UUID, read through NVML, does not. Where there is no GPU, a simulated one gets a
stand-in made from its Ray node and its index. Importing this loads neither torch nor Ray, and nothing here
initialises CUDA, so a worker may still choose its devices afterwards.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gkd.errors import ConfigError, RunFailed

VISIBLE = "CUDA_VISIBLE_DEVICES"
STAND_IN = "SIM-"  # how the stand-in for a UUID begins
SIMULATED = "GKD_SIMULATED_GPUS"  # "1" in the environment of a node whose GPUs are only Ray's numbers
DEVICES = Path("/dev")


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """Yield NVIDIA's management library (pynvml), open for the block; None where there is no driver, hence no GPU.

    Raises ConfigError where there are GPUs but no nvidia-ml-py; RunFailed where there are and the library does not
    open, as after an update of the driver, and for what the driver answers in the block with an error, as of a GPU that
    it has lost.
    """
    try:
        import pynvml
    except ImportError:
        if has_device_files():
            raise ConfigError("this machine has GPUs, but the package nvidia-ml-py is missing: install it") from None
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if has_device_files():
            raise RunFailed(
                f"{platform.node()} has GPUs that NVIDIA's library NVML does not open: {error} (restart the machine or "
                "the container; a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
            ) from None
        yield None
        return
    try:
        yield pynvml
    except pynvml.NVMLError_NoPermission as error:
        raise RunFailed(
            f"NVIDIA's driver on {platform.node()}: {error} (of a GPU in slices {VISIBLE} is to name these, as "
            "nvidia-smi -L lists them)"
        ) from None
    except pynvml.NVMLError as error:
        raise RunFailed(f"NVIDIA's driver on {platform.node()}: {error} (nvidia-smi names the GPU)") from None
    finally:
        pynvml.nvmlShutdown()


def has_device_files() -> bool:
    """Return whether this machine, or container, has been given GPUs, whatever state the driver reports them in."""
    return any(DEVICES.glob("nvidia[0-9]*"))


def _handles(library: Any) -> list[Any]:
    """Return what an open :func:`nvml` calls this machine's GPUs by, in PCI order; none without a driver.

    NVML counts GPUs that this process may not use as well, such as those of other jobs, and CUDA does not.
    """
    handles: list[Any] = []
    for i in range(0 if library is None else library.nvmlDeviceGetCount()):
        with contextlib.suppress(library.NVMLError_NoPermission):
            handles.append(library.nvmlDeviceGetHandleByIndex(i))
    return handles


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this machine; ``total`` and ``free`` are bytes of its memory, 0 where this process may not know."""

    index: int
    uuid: str
    name: str
    capability: str
    total: int
    free: int


def read_gpus() -> list[Gpu]:
    """Return this machine's GPUs in PCI order; none where there is no driver. Raises what :func:`nvml` raises."""
    with nvml() as library:
        return [_read_gpu(library, index, handle) for index, handle in enumerate(_handles(library))]


def _read_gpu(library: Any, index: int, handle: Any) -> Gpu:
    total = free = 0
    with contextlib.suppress(library.NVMLError_NoPermission):  # of a whole GPU, in a container that has a slice of it
        total, free = _read_memory(library, handle)
    major, minor = library.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        uuid=str(library.nvmlDeviceGetUUID(handle)),
        name=str(library.nvmlDeviceGetName(handle)),
        capability=f"{major}.{minor}",
        total=total,
        free=free,
    )


def _read_memory(library: Any, handle: Any) -> tuple[int, int]:
    """Return bytes of a device's memory, and how many are free; the machine's where it has none of its own (GB10)."""
    try:
        memory = library.nvmlDeviceGetMemoryInfo(handle)
    except library.NVMLError_NotSupported:
        import psutil

        machine = psutil.virtual_memory()
        return machine.total, machine.available
    return int(memory.total), int(memory.free)


def read_driver() -> tuple[str, int] | None:
    """Return the driver's version and the newest CUDA that it runs (1000 major + 10 minor); None without a driver.

    Raises what :func:`nvml` raises.
    """
    with nvml() as library:
        if library is None:
            return None
        return str(library.nvmlSystemGetDriverVersion()), int(library.nvmlSystemGetCudaDriverVersion())


def nvml_uuids() -> list[str]:
    """Return UUIDs of this machine's GPUs in PCI order, which is CUDA's order under CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Raises what :func:`nvml` raises.
    """
    with nvml() as library:
        return [str(library.nvmlDeviceGetUUID(handle)) for handle in _handles(library)]


def read_first_usable() -> tuple[str, int] | None:
    """Return the driver's name and bytes of memory of the first device that CUDA_VISIBLE_DEVICES lets be used.

    Of a slice of a GPU they are its own. None without a device. Raises what :func:`nvml` raises.
    """
    with nvml() as library:
        uuids = [str(library.nvmlDeviceGetUUID(handle)) for handle in _handles(library)]
        for entry in usable_devices(os.environ.get(VISIBLE), uuids):
            handle = library.nvmlDeviceGetHandleByUUID(uuid_of(entry, uuids))
            return str(library.nvmlDeviceGetName(handle)), _read_memory(library, handle)[0]
    return None


def are_simulated(uuids: Iterable[str]) -> bool:
    """Return whether none of these devices is real, so that what has them computes on a CPU."""
    return all(uuid.startswith(STAND_IN) for uuid in uuids)


def read_memory(uuids: list[str]) -> tuple[int, int] | None:
    """Return bytes of the smallest of these devices, as the driver counts them, and those in use; None of none real."""
    if are_simulated(uuids):
        return None
    with nvml() as library:
        devices = [library.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids if not are_simulated([uuid])]
        return min((total, total - free) for total, free in (_read_memory(library, handle) for handle in devices))


def parse_visible_devices(value: str | None) -> list[str] | None:
    """Return entries of a CUDA_VISIBLE_DEVICES value; None when it is not set, which means every device."""
    if value is None:
        return None
    return [part.strip() for part in value.split(",") if part.strip()]


def uuid_of(entry: str, uuids: list[str]) -> str | None:
    """Return UUID of the device that a CUDA_VISIBLE_DEVICES entry names, or None when there is no such device."""
    if entry.isdigit():
        return uuids[int(entry)] if int(entry) < len(uuids) else None
    if entry.startswith("MIG-"):
        return entry  # a slice's name is its UUID already
    matches = [uuid for uuid in uuids if uuid.startswith(entry)]  # CUDA takes an unambiguous prefix
    return matches[0] if len(matches) == 1 else None


def index_of(entry: str, uuids: list[str], listed: list[str]) -> int:
    """Return the number users call a device by: its CUDA_VISIBLE_DEVICES entry, or PCI order when that is a UUID.

    Slices of GPUs count by their places in ``listed``, the entries of their node's raylet; -1: there is no such device.
    """
    if entry.isdigit():
        return int(entry)
    uuid = uuid_of(entry, uuids)
    if uuid in uuids:
        return uuids.index(uuid)
    return listed.index(entry) if entry in listed else -1


def usable_devices(visible: str | None, uuids: list[str]) -> list[str]:
    """Return devices that a process with this CUDA_VISIBLE_DEVICES may use: as for CUDA, up to an invalid entry."""
    entries = parse_visible_devices(visible)
    if entries is None:
        return [str(i) for i in range(len(uuids))]
    valid: list[str] = []
    for entry in entries:
        if uuid_of(entry, uuids) is None:
            break
        valid.append(entry)
    return valid if uuids else []


def node_indices(visible: str | None, n_gpus: int, uuids: list[str]) -> list[int]:
    """Return indices of the ``n_gpus`` GPUs that Ray hands out where its raylet has this CUDA_VISIBLE_DEVICES."""
    entries = (parse_visible_devices(visible) or [str(i) for i in range(n_gpus)])[:n_gpus]
    return [index_of(entry, uuids, entries) for entry in entries]


def read_raylet_environment() -> dict[str, str]:
    """Return the variables of the node's raylet, the parent of this process, which is a worker."""
    environ = Path(f"/proc/{os.getppid()}/environ").read_bytes().decode(errors="replace")
    return dict(entry.partition("=")[::2] for entry in environ.split("\0"))


def indices_of_raylet(n_gpus: int) -> list[int]:
    """Return indices of the ``n_gpus`` GPUs of this node, by the environment of its raylet."""
    variables = read_raylet_environment()
    uuids = [] if variables.get(SIMULATED) == "1" else nvml_uuids()
    return node_indices(variables.get(VISIBLE), n_gpus, uuids)


@dataclass(frozen=True)
class Devices:
    """The devices that a process sees: their UUIDs and their indices, in CUDA's order."""

    uuids: list[str]
    indices: list[int]


def visible_devices(visible: str, node_id: str) -> Devices:
    """Return devices of a worker on Ray node ``node_id`` (hex) whose CUDA_VISIBLE_DEVICES is ``visible``.

    An entry that names no device counts for nothing, so that it shows as a fault later.
    """
    entries = parse_visible_devices(visible) or []
    has_numbers = all(entry.isdigit() for entry in entries)
    listed = [] if has_numbers else parse_visible_devices(read_raylet_environment().get(VISIBLE)) or []
    uuids = [] if os.environ.get(SIMULATED) == "1" else nvml_uuids()
    if uuids:
        named = [(entry, uuid) for entry in entries if (uuid := uuid_of(entry, uuids)) is not None]
    else:  # no GPU on this machine: Ray's numbers are all there is
        named = [(entry, f"{STAND_IN}{node_id[:8]}-{entry}") for entry in entries]
    return Devices([uuid for _, uuid in named], [index_of(entry, uuids, listed) for entry, _ in named])


def range_text(indices: Sequence[int]) -> str:
    """Return ``0-3`` for consecutive indices, else ``0,2,5``; ``none`` for none."""
    if not indices:
        return "none"
    if len(indices) > 1 and list(indices) == list(range(indices[0], indices[-1] + 1)):
        return f"{indices[0]}-{indices[-1]}"
    return ",".join(map(str, indices))
