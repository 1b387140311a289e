"""A process in which a model computes: its environment, allocator and threads."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gkd.cluster import host

if TYPE_CHECKING:  # workers start without the settings, whose import takes as long as Ray's
    from gkd.config.device import Device

BYTES_PER_THREAD = 4 << 20
"""Of weights, a million parameters in float32. Below that, threads wait for each other for longer than they help: with
students and teachers of 0.1 and 0.6 million parameters all processes of a run take 0.84 of the CPU time on one."""
WEIGHTS = {".safetensors", ".bin"}
ALLOCATOR_VARIABLES = {
    "MALLOC_MMAP_THRESHOLD_": (32 << 20, -3),
    "MALLOC_TRIM_THRESHOLD_": (512 << 20, -1),
    "MALLOC_TOP_PAD_": (16 << 20, -2),
}
"""Memory that a process without a GPU frees and soon wants again is kept, instead of given back to the system.

Every operation of torch on a CPU allocates its result. glibc gives larger pieces back at once, and the system then
clears and maps each page anew when it is next written to, which takes a third of the time of a small model. By glibc's
names: from this size on a piece is mapped by itself, and given back when it is freed (older glibc takes no larger
limit, and with one of 256 MiB a teacher with pieces of 64 MiB was 0.95 of the time, a student none); so many free bytes
are kept at the end of a heap; it grows by so many. A process reads them as it starts. The other numbers are what
mallopt calls them by (<malloc.h>).
"""


def environment(device: Device, models: Iterable[str], cpu_threads: int | None = None) -> dict[str, str]:
    """Return variables to set before torch or vLLM is imported in a process whose engine runs on ``device``.

    On a CPU those are among them that :func:`allocate_by` is to be given, and it computes with
    :func:`compute_threads` of ``models`` and ``cpu_threads``. vLLM logs errors only, unless ``VLLM_LOGGING_LEVEL``
    already sets them.
    """
    from gkd.config.own_code import read_kept_variables

    common = read_kept_variables() | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process; 38 s to start become 5
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        # It warns of things chosen here on purpose, with a traceback for the chat template it cannot warm up.
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        # Scoring needs room for one token more than the longest sequence; it is never computed (vllm_scorer).
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Threads that spin while they wait take the cores from whoever has work: with one other program on two cores a
        # step takes ten times as long.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
    }
    if device == "cuda":
        # Never used here (requests carry seeds), but imported all the same where it is not switched off.
        return {**common, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return {
        **common,
        # Otherwise every engine of a machine pins itself to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Ray sets this to the CPUs an actor reserves, which is a share for scheduling, not a width to compute with.
        "OMP_NUM_THREADS": str(compute_threads(models, cpu_threads)),
        # All that would be compiled in eager mode is the count behind a token's rank, in 5 to 18 s.
        "TORCHDYNAMO_DISABLE": "1",
        # What the user has set, processes have read as they started.
        **{name: str(size) for name, (size, _) in ALLOCATOR_VARIABLES.items() if name not in os.environ},
    }


def allocate_by(variables: Mapping[str, str]) -> None:
    """Have this process, which has started, allocate by those of ``variables`` that are among ALLOCATOR_VARIABLES.

    Other C libraries than glibc have no such limits, and nothing happens there.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for name, (_, number) in ALLOCATOR_VARIABLES.items():
        if mallopt is not None and name in variables:
            mallopt(number, int(variables[name]))


def compute_threads(models: Iterable[str], n_threads: int | None = None) -> int:
    """Return threads for a process with one of ``models``, directories: ``n_threads``, or as many cores as are of use.

    That is one for each :data:`BYTES_PER_THREAD` of the largest model's files, and at most all that this process may
    use.
    """
    return threads_for(max(map(_weight_bytes, models), default=0), n_threads)


def threads_for(weight_bytes: float, n_threads: int | None) -> int:
    """Return threads for a model with so many bytes of weights, as :func:`compute_threads`."""
    return n_threads or max(1, min(host.cores(), math.ceil(weight_bytes / BYTES_PER_THREAD)))


def _weight_bytes(model: str) -> int:
    return sum(file.stat().st_size for file in Path(model).iterdir() if file.suffix in WEIGHTS)
