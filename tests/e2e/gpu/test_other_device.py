"""What a GPU would run, beside the host: with the host's figures, and no tensor where it must not be."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.e2e.conftest import ROOT


def test_what_runs_on_a_gpu_runs_beside_the_host_with_the_same_figures() -> None:
    command = [sys.executable, "-m", "tests.gpu.on_other_device"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    why = [line for line in done.stderr.splitlines() if "terminate" in line or "what()" in line or "Error" in line]
    assert done.returncode == 0 and all(row["ok"] for row in rows), (rows[-1:], why, done.stderr[-2000:])
    assert sum(row["figures"] for row in rows) > 100
    assert {"notices", "scores", "samples", "distill", "bfloat16", "lora", "offload", "ranks"} <= {
        row["check"] for row in rows
    }
