"""The Ray nodes that launch/ray_cluster.sh started on this machine: where they are written down, and how they end.

Every process of a node, and whatever those start, inherits a variable of its environment that names the node. That is
how they are found, so that ending a node ends all of it and nothing of another Ray on the machine.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import stat
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from gkd.cluster import host
from gkd.cluster.session import reaper
from gkd.cluster.session.control_service import VARIABLE
from gkd.errors import ConfigError, one_line

DIRECTORY = "GKD_RAY_DIR"  # a directory of this machine; not of the home directory, which machines may share
MARK = "GKD_RAY_NODE"
NICENESS = "RAY_worker_niceness"
PRESTART = "RAY_prestart_worker_first_driver"
log = logging.getLogger("gkd")
GRACE_S = 10.0  # for Ray to end its servers and for workers to end their children
LONGEST_DIRECTORY = 27  # Ray puts Unix sockets up to 80 characters deeper, and their paths may have 107


def server_variables(reconnect_s: float) -> dict[str, str]:
    """Return variables with which Ray's servers start on this machine, and through them its workers.

    Ray's processes live for ``reconnect_s`` without their control service. Its own niceness of workers, 15, leaves
    them a thirtieth of what other programs have, so that a run beside a compiler or another user's job stands still.
    By itself Ray starts a worker for each core of the machine once a program connects, and keeps those that idle.
    """
    return {
        VARIABLE: str(reconnect_s),
        NICENESS: os.environ.get(NICENESS, "0"),
        PRESTART: os.environ.get(PRESTART, "0"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def require_limits() -> None:
    """Raise ConfigError for a limit of this process with which Ray does not start here."""
    for state, mend in host.find_small_limits():
        raise ConfigError(f"{state}: {mend}")


@dataclass(frozen=True)
class LocalNode:
    """One ``ray start`` of this user on this machine."""

    kind: Literal["head", "worker"]
    address: str
    """host:port of the cluster's head."""
    dashboard: str | None
    """The address jobs are submitted to; None on a worker."""
    pid: int
    mark: str
    simulated_gpus: int | None = None

    @property
    def log(self) -> Path:
        """What ``ray start`` printed."""
        return directory() / f"node-{self.mark}.log"

    @property
    def ray_directory(self) -> Path:
        """Ray's files, logs included. Each node has its own: two unpacking a job's package in one place collide."""
        return directory() / f"ray-{self.mark}"

    @property
    def is_alive(self) -> bool:
        """Whether the process that holds the node together is there."""
        return _is_marked(self.pid, self.mark)

    def processes(self) -> list[int]:
        """Return pids of everything that the node started, jobs and workers included.

        Ray's agents write their title over their environment. They are found by their logs, as a run is that joined
        the cluster; but only they are of the session that the node began.
        """
        marked = {pid for pid in reaper.list_other_processes() if _is_marked(pid, self.mark)}
        return sorted(marked.union(filter(self._is_of_session, reaper.processes_of(str(self.ray_directory)))))

    def _is_of_session(self, pid: int) -> bool:
        try:
            return os.getsid(pid) == self.pid
        except ProcessLookupError:
            return False

    def write(self) -> None:
        """Write it down for other programs to find."""
        unfinished = _record(self).with_suffix(".writing")
        unfinished.write_text(json.dumps(asdict(self)) + "\n")
        unfinished.replace(_record(self))


def directory() -> Path:
    """Return where the nodes of this user on this machine are written down."""
    return Path(os.environ.get(DIRECTORY) or f"/tmp/gkd-ray-{os.getuid()}").absolute()


def make_directory() -> Path:
    """Return :func:`directory`, made if it is not there. Raises ConfigError when it cannot be used."""
    path = directory()
    if len(str(path)) <= LONGEST_DIRECTORY:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            text = f"{path} cannot be made ({error.strerror}); set {DIRECTORY} to another directory"
            raise ConfigError(text) from None
    if obstacle := find_obstacle():
        raise ConfigError(obstacle)
    return path


def find_obstacle() -> str | None:
    """Return why :func:`directory` cannot be used, None where it can, or could be made."""
    path = directory()
    if len(str(path)) > LONGEST_DIRECTORY:
        return f"{DIRECTORY}={path}: at most {LONGEST_DIRECTORY} characters; Ray's sockets go below it"
    if path.exists() and not _is_ours(path):
        return f"{path} belongs to another user or lets others write; set {DIRECTORY} to another directory"
    return None


def nodes() -> list[LocalNode]:
    """Return nodes that run, the head first; records of others are ignored."""
    return [node for node in _read_records() if node.is_alive]


def _read_records() -> list[LocalNode]:
    """Return every node that was written down and not taken back, the head first; what cannot be read is none."""
    path = directory()
    if not path.is_dir() or not _is_ours(path):
        return []
    records = []
    for file in sorted(path.glob("node-*.json")):
        try:
            records.append(LocalNode(**json.loads(file.read_text())))
        except (ValueError, TypeError, OSError) as error:
            log.warning("%s is not read: %s", file, one_line(error))
    return sorted(records, key=lambda node: node.kind != "head")


def clear() -> None:
    """Remove the files of nodes that do not run any more; another that is starting now is not written down yet."""
    running = {node.mark for node in nodes()}
    for path in directory().iterdir():
        kind, _, mark = path.stem.partition("-")
        if kind not in ("node", "ray") or mark in running:
            continue
        with suppress(FileNotFoundError):  # another that starts removes them too
            if time.time() - path.stat().st_mtime >= reaper.NEW_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def find_running_address() -> str | None:
    """Return host:port of the cluster that a node of this machine belongs to; None when there is no node."""
    return next((node.address for node in nodes()), None)


def dashboard() -> str | None:
    """Return where jobs are submitted to, when the head runs on this machine."""
    return next((node.dashboard for node in nodes() if node.dashboard is not None), None)


def stop(node: LocalNode) -> list[int]:
    """End a node with everything on it. Returns pids that would not end."""
    if node.is_alive:
        os.kill(node.pid, signal.SIGTERM)
    alive = reaper.end(node.processes, GRACE_S)
    if not alive:
        _record(node).unlink(missing_ok=True)
    return alive


def stop_all() -> int:
    """End every node of this user on this machine, workers before their head, and print that. Returns the exit code."""
    # Of a dead one agents may be left.
    left_over = [node for node in _read_records() if node.is_alive or node.processes()]
    if not left_over:
        print(f"no Ray node of ./launch/ray_cluster.sh runs here ({directory()})")
    code = 0
    for node in reversed(left_over):
        alive = stop(node)
        print(f"stopped the {node.kind} of {node.address}")
        if alive:
            print(f"failed: processes that would not end: {', '.join(map(str, alive))}", file=sys.stderr)
            code = 1
    return code


def _record(node: LocalNode) -> Path:
    return directory() / f"node-{node.mark}.json"


def _is_ours(path: Path) -> bool:
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_marked(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone meanwhile, or another user's
        return False
