"""CUDA's Multi-Process Service: processes that share a GPU, beside each other instead of in turn."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.gpu.checks.context import Context, Skipped, require
from tests.gpu.checks.w1 import run_w1

CONTROL = "nvidia-cuda-mps-control"
LIMIT_S = 20.0
CLIENTS_S = 5  # for what still uses the service to end by itself


def beside_each_other(context: Context) -> None:
    """Seconds a step of W1 with the service and without it."""
    if shutil.which(CONTROL) is None:
        raise Skipped(f"the driver came without {CONTROL}")
    with _running(context):
        beside = run_w1(context, "with_mps")
    without = run_w1(context, "without_mps")
    steps = [result.median("timing_s/step") for result in (without, beside)]
    context.note(without_s=steps[0], with_s=steps[1], ratio=steps[1] / steps[0])
    require(beside.largest("mismatch/kl") < 0.02, "sampler and trainer disagree under MPS")


@contextmanager
def _running(context: Context) -> Iterator[None]:
    """Run a service of this check's own, for what it starts meanwhile. Raises Skipped where it does not start."""
    place = context.scratch / "mps"
    place.mkdir()
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(place), "CUDA_MPS_LOG_DIRECTORY": str(place)}
    os.environ.update(own)
    try:
        _control(place / "said", "-d")
        _control(place / "said", command="get_server_list")
        try:
            yield
        finally:
            _control(place / "said", command=f"quit -t {CLIENTS_S}")  # else it waits for all, for ever
    finally:
        for name in own:
            del os.environ[name]


def _control(output: Path, *arguments: str, command: str = "") -> None:
    with output.open("w") as out:  # no pipe, which what it starts would keep open
        done = subprocess.run(
            [CONTROL, *arguments], input=f"{command}\n".encode(), stdout=out, stderr=out, timeout=LIMIT_S, check=False
        )
    if done.returncode:
        raise Skipped(f"{CONTROL} {' '.join(arguments) or command}: {output.read_text().strip()[:300]}")
