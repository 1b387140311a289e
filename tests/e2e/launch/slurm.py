"""A Slurm of one machine that is two nodes: munged, slurmctld and two slurmd with their files in one folder."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.e2e.conftest import ROOT, environment
from tests.e2e.on_a_cluster.conftest import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "squeue")
NODES = ("node1", "node2")
CONFIGURATION = """\
ClusterName=gkd
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdTimeout=5
MinJobAge=300
FirstJobId={first}
GresTypes=gpu
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs={cpus} Gres=gpu:1
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} Gres=gpu:1
PartitionName=all Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return why there can be no Slurm here; None: there can."""
    absent = [program for program in PROGRAMS if _program(program) is None]
    return f"Slurm is not installed: no {', '.join(absent)} (Debian: slurm-wlm, munge)" if absent else None


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


class Slurm:
    """Jobs go to it with :meth:`submit`; ``folder`` has a short path, since sockets are in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (folder / "gpu0").touch()  # a GPU for each file that is there
        (folder / "gres.conf").write_text(f"NodeName=node[1-2] Name=gpu File={folder}/gpu0\n")
        ports = [free_port() for _ in range(3)]
        first = 100_000 + os.getpid() % 1_000_000  # a job's ports and folder are by its number
        who = {"host": socket.gethostname(), "user": getpass.getuser(), "first": first, "cpus": os.cpu_count()}
        text = CONFIGURATION.format(folder=folder, port=ports[0], ports=ports[1:], **who)
        (folder / "slurm.conf").write_text(text)
        files = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
        self._do("munged", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", *files)
        self._do("slurmctld", "-c")
        for node in NODES:
            self.start(node)

    def start(self, node: str) -> None:
        """Start a node's daemon."""
        self._do("slurmd", "-N", node)

    def _do(self, program: str, *arguments: str, **variables: str) -> str:
        command = _program(program)
        assert command is not None
        variables = {**environment(), "SLURM_CONF": f"{self.folder}/slurm.conf", **variables}
        done = subprocess.run(
            [command, *arguments], env=variables, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def submit(self, *overrides: str) -> int:
        """Queue launch/slurm.sbatch on both nodes, one simulated GPU each; returns the job's number."""
        options = ["--parsable", "--nodes=2", "--gpus-per-node=1", "--cpus-per-task=2", "--time=10"]
        options.append(f"--output={self.folder}/job-%j.log")
        variables = {"GKD_PYTHON": sys.executable, "GKD_SIMULATE_GPUS": "1", "SLURM_CPU_BIND": "cores"}
        return int(self._do("sbatch", *options, str(ROOT / "launch" / "slurm.sbatch"), *overrides, **variables))

    def state(self, job: int) -> str:
        """Return what Slurm calls a job's state, and the exit code: ``COMPLETED 0:0``."""
        shown = dict(part.split("=", 1) for part in self._do("scontrol", "-o", "show", "job", str(job)).split(" ")
                     if "=" in part)  # fmt: skip
        return f"{shown['JobState']} {shown['ExitCode']}"

    def wait_for(self, job: int, state: str, timeout_s: float) -> None:
        """Return once a job is in a state."""
        deadline = time.monotonic() + timeout_s
        while not (now := self.state(job)).startswith(state):
            assert time.monotonic() < deadline, f"{now} instead of {state}: {self.log(job)}"
            time.sleep(0.5)

    def cancel(self, job: int) -> None:
        """Cancel a job as a user does."""
        self._do("scancel", str(job))

    def resume(self, node: str, job: int) -> None:
        """Start a node that died again, and let a job that was queued again begin at once."""
        self.start(node)
        for command in (("update", f"nodename={node}", "state=resume"), ("release", str(job)),
                        ("update", f"jobid={job}", "starttime=now")):  # fmt: skip
            with contextlib.suppress(AssertionError):  # it may be so already
                self._do("scontrol", *command)

    def log(self, job: int) -> str:
        """Return what a job printed."""
        path = self.folder / f"job-{job}.log"
        return path.read_text() if path.exists() else "nothing was printed"

    def processes(self, job: int, node: str | None = None) -> list[psutil.Process]:
        """Return a job's processes, those of all nodes or of one."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                if variables.get("SLURM_JOB_ID") == str(job) and node in (None, variables.get("SLURMD_NODENAME")):
                    processes.append(process)
        return processes

    def raylets(self, job: int) -> list[psutil.Process]:
        """Return the servers of Ray that a job has, one on each node."""
        raylets = []
        for process in self.processes(job):
            with contextlib.suppress(psutil.NoSuchProcess):  # gone meanwhile
                if process.name() == "raylet":
                    raylets.append(process)
        return raylets

    def kill_node(self, node: str, job: int) -> None:
        """Kill a node's daemon and all that a job has there, as when a machine dies."""
        daemon = psutil.Process(int((self.folder / f"slurmd-{node}.pid").read_text()))
        daemon.kill()
        tasks = self.processes(job, node)
        doomed = {*tasks}
        for task in tasks:
            with contextlib.suppress(psutil.NoSuchProcess):  # gone meanwhile
                doomed |= {parent for parent in task.parents() if parent.name() == "slurmstepd"}
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def close(self) -> None:
        """End all daemons, and what they started."""
        for name in (*(f"slurmd-{node}" for node in NODES), "slurmctld", "munged"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self.folder / f"{name}.pid").read_text()), signal.SIGTERM)
        deadline = time.monotonic() + 20
        while (left := self.daemons()) and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def daemons(self) -> list[psutil.Process]:
        """Return the daemons of this folder, and what watches steps for them."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                theirs = process.environ().get("SLURM_CONF", "") == f"{self.folder}/slurm.conf"
                if theirs or f"{self.folder}/munge" in " ".join(process.cmdline()):
                    processes.append(process)
        return processes


@contextlib.contextmanager
def slurm_in(folder: Path) -> Iterator[Slurm]:
    """Have a Slurm for the time of the context."""
    slurm = Slurm(folder)
    try:
        yield slurm
    finally:
        slurm.close()
    assert slurm.daemons() == []
