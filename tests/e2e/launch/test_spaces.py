"""A Python below a directory with a space in its name, on a node that a job's processes start on."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.e2e.conftest import ROOT, environment
from tests.e2e.on_a_cluster.conftest import free_port

TASK = """
import ray, sys
from gkd.cluster.session.connect import join
join(sys.argv[1])
task = ray.remote(lambda: sys.prefix).options(runtime_env={"env_vars": {"OF_A_JOB": "1"}})
print(ray.get(task.remote(), timeout=60))
"""


def test_processes_with_an_environment_of_their_own_start(tmp_path: Path) -> None:
    """As those of jobs, whose command Ray hands to a shell. Ray tries again without end where they do not."""
    (folder := tmp_path / "my venv").symlink_to(sys.prefix)
    python = folder / Path(sys.executable).relative_to(sys.prefix)
    with tempfile.TemporaryDirectory(prefix="gkd-t-", dir="/tmp") as directory:
        variables = {**environment(), "HOME": directory, "GKD_RAY_DIR": directory, "GKD_PYTHON": str(python)}
        port = free_port()
        ports = ["--port", str(port), "--dashboard-port", str(free_port())]
        head = ["./launch/ray_cluster.sh", "head", "--node-ip-address", "127.0.0.1", "--simulate-gpus", "1", *ports]
        try:
            subprocess.run(head, cwd=ROOT, env=variables, check=True, timeout=200)
            command = [str(python), "-c", TASK, f"127.0.0.1:{port}"]
            done = subprocess.run(
                command, cwd=ROOT, env=variables, check=False, timeout=200, capture_output=True, text=True
            )
        finally:
            subprocess.run(["./launch/ray_cluster.sh", "stop"], cwd=ROOT, env=variables, check=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).name == "python"  # the path that a shell takes as it is
