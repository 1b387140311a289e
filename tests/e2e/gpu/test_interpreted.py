"""What vLLM and Liger run on GPUs, on a CPU: model runner V2, asynchronous scheduling, and Triton's kernels."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.e2e.conftest import ROOT

INTERPRETER = ROOT / "tests" / "gpu" / "interpreter"
TESTS = [
    "tests/vllm/inference/test_in_flight.py",
    "tests/vllm/inference/test_scoring.py",
    "tests/vllm/weights/test_adapter.py::test_responses_under_way_go_on_with_the_new_adapter",
    "tests/vllm/kernels.py",
]


def test_what_runs_on_gpus_alone_passes_the_same_tests() -> None:
    """Which expect a pass under way when weights come, and find that scores are of the wanted positions alone."""
    path = os.pathsep.join([str(INTERPRETER), str(ROOT)])
    command = [sys.executable, "-m", "pytest", "-p", "no:anyio", "-p", "no:hydra_pytest", "-p", "no:xdist", *TESTS]
    done = subprocess.run(
        command,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
