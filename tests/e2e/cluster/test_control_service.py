"""A program that waits for a control service that is gone."""

from __future__ import annotations

import subprocess
import sys

STUCK = """
import sys, time
from gkd.cluster.session import control_service
control_service.INTERVAL_S, control_service.STUCK_S = 0.1, 2.5
service = control_service.ControlService(sys.argv[1], 0.0, 600.0)
end = time.monotonic() + 3.5
while time.monotonic() < end:  # what asks is not stuck
    service.require_time()
    time.sleep(0.2)
print("asked", flush=True)
time.sleep(600)
"""


def test_a_run_that_is_stuck_in_a_call_into_ray_is_ended_and_one_that_looks_is_not() -> None:
    run = subprocess.run(
        [sys.executable, "-c", STUCK, "127.0.0.1:9"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout) == (1, "asked\n")
    assert run.stderr.startswith("failed: Ray's control service (GCS) at 127.0.0.1:9 is gone")
    assert "waited for" in run.stderr
