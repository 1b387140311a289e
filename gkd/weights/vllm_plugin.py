"""What every process of vLLM's loads of this project: its weight backends, how it ends, a note of why it did not start.

vLLM loads what is named under the entry point ``vllm.general_plugins`` (see pyproject.toml) as each of its processes
starts, so nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from gkd.errors import ConfigError, describe_error, end_with_parent

BACKENDS = {
    "gkd": ("gkd.weights.vllm_backend", "BucketTransferEngine"),
    "gkd_nccl_m2n": ("gkd.weights.vllm_m2n", "M2NTransferEngine"),
}
"""Modules and classes by their names in ``weight_transfer_config``."""
_NOTES = "GKD_VLLM_ERRORS"  # in the environment: the file to note errors in


def register() -> None:
    """Make the backends known to vLLM, once a process, and which GPU an entry of CUDA_VISIBLE_DEVICES names.

    A process that an engine of this project starts ends with the one that started it, and notes its errors for that.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    for name, (module, engine) in BACKENDS.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, module, engine)
    if current_platform.is_cuda():
        type(current_platform).device_control_id_to_physical_device_id = staticmethod(find_gpu)
    if (path := os.environ.get(_NOTES)) is not None:
        # Where a process logs why it ends; what other parts of vLLM log they go on from.
        logging.getLogger("vllm.v1.executor").addHandler(_Notes(path))
        if multiprocessing.parent_process() is not None:
            # vLLM has them end by themselves, which one that waits for its GPU does not come to. The thread that starts
            # an engine is the one that it works on until the worker ends.
            end_with_parent(signal.SIGKILL)


def find_gpu(entry: str) -> int:
    """Return NVML's index of the GPU that an entry of CUDA_VISIBLE_DEVICES names, or is a slice (MIG) of.

    vLLM asks NVML for the index of the device, which of a slice is its place among those of its GPU, and by the entry
    as it is, where CUDA takes the beginning of a UUID as well.
    """
    from vllm.third_party import pynvml

    with contextlib.suppress(ValueError):
        return int(entry)
    pynvml.nvmlInit()
    try:
        device = pynvml.nvmlDeviceGetHandleByUUID(_complete(entry.strip(), pynvml))
        if entry.strip().startswith("MIG-"):
            device = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
        return int(pynvml.nvmlDeviceGetIndex(device))
    finally:
        pynvml.nvmlShutdown()


def _complete(entry: str, library: Any) -> str:
    """Return the UUID of the one GPU whose UUID begins with ``entry``; where there is no such one, ``entry``.

    ``library`` is NVML, open.
    """
    uuids: list[str] = []
    for index in range(library.nvmlDeviceGetCount()):
        with contextlib.suppress(library.NVMLError_NoPermission):  # another job's
            uuids.append(library.nvmlDeviceGetUUID(library.nvmlDeviceGetHandleByIndex(index)))
    matches = [uuid for uuid in uuids if uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else entry


def require_installed() -> None:
    """Raise ConfigError where vLLM's processes would load nothing of this project.

    That is where it is run without being installed, or VLLM_PLUGINS leaves it out.
    """
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "gkd" not in allowed.split(","):
        raise ConfigError(f"VLLM_PLUGINS={allowed} has vLLM's processes load nothing of gkd: add gkd to it")
    if all(point.name != "gkd" for point in metadata.entry_points(group="vllm.general_plugins")):
        raise ConfigError("gkd is not installed, and vLLM's processes find nothing of it: pip install -e .")


@contextlib.contextmanager
def note_errors(directory: str | None) -> Iterator[Callable[[], str | None]]:
    """Have processes of vLLM's that start meanwhile note their errors; yields what returns the first one, or None.

    vLLM itself states that one of them did not start, and leaves the reason to its log. The notes are in ``directory``,
    None for the one for temporary files, and stay there where this process is killed meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix="gkd-vllm-", dir=directory) as folder:
        file = Path(folder, "errors")
        os.environ[_NOTES] = str(file)
        try:
            yield lambda: file.read_text().splitlines()[0] if file.exists() else None
        finally:
            del os.environ[_NOTES]


class _Notes(logging.Handler):
    """Adds the error of a record to a file, in a line; nothing once the file's directory is gone."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = Path(path)

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            with contextlib.suppress(OSError), self._path.open("a") as file:
                file.write(f"{describe_error(record.exc_info[1])}\n")
