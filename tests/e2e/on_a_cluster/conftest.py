"""One real cluster for all tests of the folder: a head with its dashboard and a worker node, on simulated GPUs.

Programs started here join it by themselves.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gkd.cluster.session import reaper
from tests.e2e.conftest import ROOT, SMALL, environment

HEAD_GPUS, WORKER_GPUS = 2, 4


HANDED_OUT: set[int] = set()


def free_port() -> int:
    """One below those that the system gives to whoever binds none, as it stays free until a program has started.

    No other call returns it, neither in this process nor in the others that run tests, three at most.
    """
    third = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 3
    ports = [*random.sample(sorted({*range(32_000 + third, 32_768, 3)} - HANDED_OUT), 50), 0]
    for port in ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            HANDED_OUT.add(chosen := int(probe.getsockname()[1]))
            return chosen
    raise AssertionError("no free port")


@dataclass
class ClusterHere:
    """The cluster's addresses, and programs started beside it as a user would."""

    directory: Path
    port: int
    dashboard_port: int
    address: str = ""
    home: Path | None = None
    """What has the cluster's token, for a node that writes itself down elsewhere."""

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    def environment(self, **more: str) -> dict[str, str]:
        """A home in which Ray has never run, so without its token; what is cached is the machine's."""
        caches = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
        here = {"HOME": str(self.home or self.directory), "XDG_CACHE_HOME": caches}
        return {**environment(), **here, "GKD_RAY_DIR": str(self.directory), "GKD_PYTHON": sys.executable, **more}

    def run(self, *command: str, cwd: Path = ROOT, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=cwd, env=self.environment(), capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def node(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("./launch/ray_cluster.sh", *arguments)

    def submit(self, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "launch" / "submit.py"), "--address", self.dashboard]
        return self.run(*command, *arguments, cwd=cwd)

    def free_gpus(self) -> int:
        """GPUs that nobody has reserved, as a new connection to the cluster sees it."""
        ask = (
            "from gkd.cluster.session.connect import join; from gkd.cluster.workers.reserve import read_nodes; "
            f"join('{self.address}'); print(sum(node.free_gpus for node in read_nodes()))"
        )
        return int(self.run(sys.executable, "-c", ask).stdout.split()[-1])


def marked(directory: Path) -> list[int]:
    """Processes of nodes started with this GKD_RAY_DIR.

    It is in the environment of everything they start, where a process has not written over that, as Ray's agents do:
    these hold logs below it open.
    """
    variable = f"GKD_RAY_DIR={directory}".encode()
    pids = reaper.processes_of(str(directory))
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if variable in variables:
                pids.append(int(entry.name))
    return pids


@pytest.fixture(scope="package")
def cluster() -> Iterator[ClusterHere]:
    directory = Path(tempfile.mkdtemp(prefix="gkd-t-", dir="/tmp"))
    here = ClusterHere(directory, free_port(), free_port())
    try:
        simulate = ("--simulate-gpus", str(HEAD_GPUS))
        head = here.node("head", "--port", str(here.port), "--dashboard-port", str(here.dashboard_port), *simulate)
        assert head.returncode == 0, head.stderr
        # The command it prints is the one that joins a worker.
        (join,) = [line.partition(":")[2].split() for line in head.stdout.splitlines() if line.startswith("join")]
        here.address = join[-1]
        worker = here.run(*join, "--simulate-gpus", str(WORKER_GPUS))
        assert worker.returncode == 0, worker.stderr
        yield here
    finally:
        stopped = here.node("stop")
        left = marked(directory)
        shutil.rmtree(directory)
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout.count("stopped the ") == 2
    assert not left


@pytest.fixture
def variables(cluster: ClusterHere) -> dict[str, str]:
    return cluster.environment()


@pytest.fixture(scope="package")
def small(cache: Path) -> list[str]:
    """Settings of a run of a few seconds, GRPO on the built-in task without vLLM."""
    few = ["data.val_limit=16", "trainer.batch_size=4", "rollout.n=4"]
    return ["+recipe=grpo", "rollout.engine=hf", *SMALL, *few, f"data.cache_dir={cache}"]
