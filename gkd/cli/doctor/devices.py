"""GPUs, their driver, and whether torch and NCCL can use them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from gkd.cli.doctor.finding import GIB, Finding, confirm, fail, warn
from gkd.cluster import gpu
from gkd.errors import ConfigError

IMPORT_TIMEOUT_S = 180.0
COMPILE_TIMEOUT_S = 60.0
MPS_TIMEOUT_S = 10.0
_PROBE = """
import json, torch, torch.distributed as dist, transformers
cuda = torch.cuda.is_available()
print(json.dumps({
    "cuda": torch.version.cuda, "available": cuda, "count": torch.cuda.device_count() if cuda else 0,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
    "gloo": dist.is_gloo_available(),
}))
"""


@dataclass(frozen=True)
class Gpus:
    """NVML's report: the driver, the newest CUDA it runs (1000 major + 10 minor), and the GPUs that are there.

    ``usable`` has the devices that CUDA_VISIBLE_DEVICES lets a process of this user's see: indices, or a slice's UUID.
    """

    driver: str
    cuda: int
    devices: list[gpu.Gpu]
    usable: list[int | str]


NO_GPUS = Gpus("", 0, [], [])


def read_gpus() -> Gpus:
    """Return what there is; none where there is no driver, or no package to reach it, which another check reports.

    Raises RunFailed where the driver answers with an error.
    """
    try:
        driver, devices = gpu.read_driver(), gpu.read_gpus()
    except ConfigError:
        return NO_GPUS
    if driver is None:
        return NO_GPUS
    uuids = [one.uuid for one in devices]
    named = (gpu.uuid_of(entry, uuids) for entry in gpu.usable_devices(os.environ.get(gpu.VISIBLE), uuids))
    usable: list[int | str] = [uuids.index(uuid) if uuid in uuids else uuid for uuid in named if uuid is not None]
    return Gpus(*driver, devices, usable)


def check_gpus(gpus: Gpus) -> Iterator[Finding]:
    """Check which there are, and whether somebody else uses them."""
    if not gpus.devices:
        yield confirm("gpus", "none: runs compute on the CPU, on GPUs that Ray only counts (placement=auto or cpu)")
        return
    names = f"driver {gpus.driver}: {', '.join(sorted({one.name for one in gpus.devices}))}"
    if not gpus.usable:
        lets = f"{gpu.VISIBLE}={os.environ.get(gpu.VISIBLE)} leaves out all {len(gpus.devices)}, {names}"
        yield warn("gpus", lets, f"unset {gpu.VISIBLE}, unless runs are to compute on the CPU")
        return
    yield confirm("gpus", f"{_count_usable(gpus)}, {names}")
    for one in gpus.devices:
        if one.index in gpus.usable and one.free < 0.9 * one.total:
            yield warn(
                "gpus",
                f"GPU {one.index}: {(one.total - one.free) / GIB:.1f} of {one.total / GIB:.1f} GiB are in use",
                f"nvidia-smi --id={one.index} names the processes; leave the GPU out with CUDA_VISIBLE_DEVICES",
            )


def _count_usable(gpus: Gpus) -> str:
    """Return ``2``, or ``1 of 2 (CUDA_VISIBLE_DEVICES)``, or ``7 slices of 1``."""
    if _are_slices(gpus):
        return f"{len(gpus.usable)} slices of {len(gpus.devices)}"
    left_out = len(gpus.usable) < len(gpus.devices)
    return f"{len(gpus.usable)} of {len(gpus.devices)} ({gpu.VISIBLE})" if left_out else f"{len(gpus.devices)}"


def _are_slices(gpus: Gpus) -> bool:
    return any(isinstance(device, str) for device in gpus.usable)


def check_torch(gpus: Gpus) -> Iterator[Finding]:
    """Import torch and transformers, as a worker does, and compare torch's CUDA with the driver's; NCCL."""
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield fail("torch", f"importing it takes more than {IMPORT_TIMEOUT_S:.0f} s", "is the disk of .venv slow?")
        return
    if probe.returncode != 0:
        lines = probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"]
        yield fail("torch", f"cannot be imported with transformers: {lines[-1]}", "rm -r .venv, ./launch/quickstart.sh")
        return
    yield from compare_torch(json.loads(probe.stdout.splitlines()[-1]), gpus)


def check_compiler(gpus: Gpus) -> Iterator[Finding]:
    """Compile what includes Python.h where there are GPUs: Triton does, for vLLM's kernels, in eager mode too."""
    if not gpus.devices:
        return
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # Triton's own order
    do = "install one with Python's headers (Debian: apt-get install gcc python3-dev), or set CC"
    if compiler is None:
        yield fail("compiler", "neither CC, gcc nor clang: Triton cannot build kernels, and no engine starts", do)
        return
    headers = sysconfig.get_paths()["include"]
    command = [compiler, "-fsyntax-only", "-x", "c", f"-I{headers}", "-"]
    try:
        completed = subprocess.run(
            command,
            input="#include <Python.h>\n",
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
        code, lines = completed.returncode, completed.stderr.strip().splitlines()
        wrong = (lines or [f"exit code {code}"])[0] if code else None
    except (OSError, subprocess.TimeoutExpired) as error:
        wrong = str(error)
    if wrong is None:
        yield confirm("compiler", f"{compiler}, with Python.h in {headers}")
    else:
        yield fail("compiler", f"{compiler} cannot compile with {headers}/Python.h: {wrong}", do)


def check_mps(gpus: Gpus) -> Iterator[Finding]:
    """Ask CUDA's Multi-Process Service whether it runs, where there are GPUs and the driver came with it."""
    control = shutil.which("nvidia-cuda-mps-control")
    if not gpus.devices or control is None:
        return
    where = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    try:
        completed = subprocess.run(
            [control], input="get_server_list\n", capture_output=True, text=True, timeout=MPS_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield warn("mps", f"{control} does not answer: {error}", "end it, or start it again: runs would wait for it")
        return
    if completed.returncode == 0:
        yield confirm("mps", f"runs in {where}: groups that share a GPU compute on it at the same time")
    else:
        yield confirm("mps", "does not run: groups that share a GPU compute on it in turn")


def compare_torch(facts: dict[str, str | int | bool | None], gpus: Gpus) -> Iterator[Finding]:
    """Compare what torch finds (``facts``, of _PROBE) with the machine's GPUs."""
    version, cuda = metadata.version("torch"), facts["cuda"]
    if not gpus.usable:
        yield confirm("torch", f"{version} on the CPU")
        if not facts["gloo"]:
            yield fail("gloo", "torch was built without it, so ranks cannot talk on a CPU", "install torch's own build")
        return
    if cuda is None:
        yield warn("torch", f"{version} is a CPU build", "rm -r .venv, GKD_DEVICE=cuda ./launch/quickstart.sh")
        return
    needed, driver = [int(part) for part in str(cuda).split(".")[:2]], (gpus.cuda // 1000, gpus.cuda % 1000 // 10)
    if needed[0] > driver[0]:
        yield fail(
            "torch",
            f"{version} is built for CUDA {cuda}; driver {gpus.driver} runs up to {driver[0]}.{driver[1]}",
            "install a newer driver, or a torch built for an older CUDA",
        )
    # Of slices CUDA shows a process one, and each worker has one.
    elif not facts["available"] or (facts["count"] != len(gpus.usable) and not _are_slices(gpus)):
        yield fail(
            "torch",
            f"{version} sees {facts['count']} of {len(gpus.usable)} GPUs",
            "see what `python -c 'import torch; torch.zeros(1).cuda()'` prints",
        )
    else:
        yield confirm(
            "torch", f"{version} with CUDA {cuda} sees {facts['count']} GPUs; the driver runs {driver[0]}.{driver[1]}"
        )
    if facts["nccl"] is None:
        yield fail("nccl", "torch was built without it, so GPUs cannot talk", "install torch's own CUDA build")
    else:
        yield confirm("nccl", str(facts["nccl"]))
