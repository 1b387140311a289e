"""A node that starts, with a Python below a directory with a space in its name, at an IPv6 address if there is one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tests.e2e.conftest import ROOT, environment
from tests.e2e.on_a_cluster.conftest import free_port

TASK = """
import os, ray, sys
from gkd.cluster.session.connect import join
join(sys.argv[1])
task = ray.remote(lambda: (os.nice(0), sys.prefix)).options(runtime_env={"env_vars": {"OF_A_JOB": "1"}})
print(*ray.get(task.remote(), timeout=60))
"""


def has_address(host: str) -> bool:
    with suppress(OSError), socket.create_server((host, 0), family=socket.AF_INET6):
        return True
    return False


def test_processes_with_an_environment_of_their_own_start(tmp_path: Path) -> None:
    """As those of jobs, whose command Ray hands to a shell. Ray tries again without end where they do not."""
    host = "::1" if has_address("::1") else "127.0.0.1"
    (link := tmp_path / "my venv").symlink_to(sys.prefix)
    python = link / Path(sys.executable).relative_to(sys.prefix)
    with tempfile.TemporaryDirectory(prefix="gkd-t-", dir="/tmp") as directory:
        variables = {**environment(), "HOME": directory, "GKD_RAY_DIR": directory, "GKD_PYTHON": str(python)}
        port = free_port()
        ports = ["--port", str(port), "--dashboard-port", str(free_port())]
        head = ["./launch/ray_cluster.sh", "head", "--node-ip-address", host, "--simulate-gpus", "1", *ports]
        try:
            started = subprocess.run(head, cwd=ROOT, env=variables, check=True, timeout=200, stdout=subprocess.PIPE)
            address = started.stdout.decode().partition("--address ")[2].split()[0]  # as it is printed for others
            command = [str(python), "-c", TASK, address]
            done = subprocess.run(
                command, cwd=ROOT, env=variables, check=False, timeout=200, capture_output=True, text=True
            )
        finally:
            subprocess.run(["./launch/ray_cluster.sh", "stop"], cwd=ROOT, env=variables, check=True, timeout=200)
    assert done.returncode == 0, done.stderr
    niceness, _, prefix = done.stdout.strip().partition(" ")
    assert Path(prefix).name == "python"
    assert int(niceness) == os.nice(0)  # Ray's own is 15, with which workers stand still beside other programs
