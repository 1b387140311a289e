"""A process with an engine: its environment, allocator and threads, and the device that the installed vLLM is for."""

from __future__ import annotations

import ctypes
import math
import os
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from gkd.errors import ConfigError, RunFailed

if TYPE_CHECKING:
    from gkd.inference.engine import Device

BYTES_PER_THREAD = 4 << 20
"""Of weights, a million parameters in float32. Below that, threads wait for each other for longer than they help: with
students and teachers of 0.1 and 0.6 million parameters all processes of a run take 0.84 of the CPU time on one."""
WEIGHTS = {".safetensors", ".bin"}
ALLOCATOR_VARIABLES = {
    "MALLOC_MMAP_THRESHOLD_": 32 << 20,
    "MALLOC_TRIM_THRESHOLD_": 512 << 20,
    "MALLOC_TOP_PAD_": 16 << 20,
}
"""Memory that a process without a GPU frees and soon wants again is kept, instead of given back to the system.

Every operation of torch on a CPU allocates its result. glibc gives larger pieces back at once, and the system then
clears and maps each page anew when it is next written to, which takes a third of the time of a small model. By glibc's
names: from this size on a piece is mapped by itself, and given back when it is freed (glibc takes no larger limit); so
many free bytes are kept at the end of a heap; it grows by so many. A process reads them as it starts.
"""
_MALLOPT_NUMBERS = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_MMAP_THRESHOLD_": -3}  # of <malloc.h>

_OF_BUNDLE = re.compile(r"GPU_group_(\d+)_[0-9a-f]+")


def environment(device: Device, models: Iterable[str], cpu_threads: int | None = None) -> dict[str, str]:
    """Return variables to set before torch or vLLM is imported in a process whose engine runs on ``device``.

    On a CPU those are among them that :func:`allocate_by` is to be given, and it computes with
    :func:`compute_threads` of ``models`` and ``cpu_threads``. vLLM logs errors only, unless ``VLLM_LOGGING_LEVEL``
    already sets them.
    """
    common = {
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
        **{name: str(size) for name, size in ALLOCATOR_VARIABLES.items() if name not in os.environ},
    }


def allocate_by(variables: Mapping[str, str]) -> None:
    """Have this process, which has started, allocate by those of ``variables`` that are among ALLOCATOR_VARIABLES.

    Other C libraries than glibc have no such limits, and nothing happens there.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for name, number in _MALLOPT_NUMBERS.items():
        if mallopt is not None and name in variables:
            mallopt(number, int(variables[name]))


def compute_threads(models: Iterable[str], n_threads: int | None = None) -> int:
    """Return threads for a process with one of ``models``, directories: ``n_threads``, or as many cores as are of use.

    That is one for each :data:`BYTES_PER_THREAD` of the largest model's files, and at most all that this process may
    use.
    """
    return threads_for(max(map(_weight_bytes, models), default=0), n_threads)


def threads_for(weight_bytes: float, n_threads: int | None = None) -> int:
    """Return threads for a model with so many bytes of weights, as :func:`compute_threads`."""
    return n_threads or max(1, min(len(os.sched_getaffinity(0)), math.ceil(weight_bytes / BYTES_PER_THREAD)))


def _weight_bytes(model: str) -> int:
    return sum(file.stat().st_size for file in Path(model).iterdir() if file.suffix in WEIGHTS)


def compile_apart(device: Device) -> None:
    """Have vLLM keep what it compiles for GPUs in a directory by the GPUs that this process sees.

    Engines of one model that start at the same time on different GPUs would write the same files. Before the process'
    engine starts.
    """
    if device == "cuda":
        from vllm import envs

        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "all").replace(",", "-")
        # Not from vLLM alone: in a process that has had an engine it is what the variable was then.
        root, own = Path(os.environ.get("VLLM_CACHE_ROOT", envs.VLLM_CACHE_ROOT)), f"gpu-{gpus}"
        os.environ["VLLM_CACHE_ROOT"] = str(root if root.name == own else root / own)


def installed_device() -> Device:
    """Return where engines run on this machine: "cpu" when the CPU build of vLLM is installed, "cuda" otherwise."""
    try:
        metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        return "cuda"
    return "cpu"


def require_device(device: Device, who: str) -> None:
    """Raise ConfigError unless the installed vLLM runs on ``device``, where ``who`` is to run an engine."""
    if installed_device() == device:
        return
    if device == "cpu":
        raise ConfigError(
            f"{who} has a simulated GPU, where vLLM computes on the CPU, but its CUDA build is installed: "
            "GKD_DEVICE=cpu ./launch/quickstart.sh installs the other into a fresh .venv"
        )
    raise ConfigError(
        f"{who} has a GPU, but vLLM's CPU build is installed: pip install 'gkd[cuda]' into a fresh environment, "
        "or simulate GPUs with placement=cpu"
    )


def share_gpu_of_worker() -> dict[str, str]:
    """Return the variables by which vLLM's process takes as much of this worker's GPU as Ray has left of it."""
    from ray._private.worker import global_worker  # the public ways leave out which bundle it is

    held = {name: sum(amount for _, amount in its) for name, its in global_worker.core_worker.resource_ids().items()}
    bundle, share = find_bundle(held.items())
    return {
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1",
        "VLLM_RAY_BUNDLE_INDICES": str(bundle),
        "VLLM_RAY_PER_WORKER_GPUS": f"{share:g}",
    }


def find_bundle(resources: Iterable[tuple[str, float]]) -> tuple[int, float]:
    """Return the index of the bundle that a worker's GPU is in, and the share of the GPU that the worker has.

    ``resources`` are Ray's own names and amounts. Raises RunFailed for a worker outside of a reservation.
    """
    for name, amount in resources:
        if match := _OF_BUNDLE.fullmatch(name):
            return int(match[1]), amount
    raise RunFailed("weights.transfer=sharded_rdt: this worker has no reserved GPU that vLLM's process could share")
