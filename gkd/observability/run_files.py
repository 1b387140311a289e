"""Reading what a run writes, also while it goes on."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil

from gkd.cluster.health.queues import EngineQueue, Queues
from gkd.config import Config
from gkd.config.loading import read_run, read_yaml
from gkd.config.output_files import (
    CONFIG,
    ENGINES,
    EVENTS,
    METRICS,
    PLACEMENT,
    SAMPLES,
    SUMMARY,
    LineReader,
    find_fault,
    read_json,
)
from gkd.durable import is_held
from gkd.errors import ConfigError, clean
from gkd.observability.report import Summary, read

AGAIN_S = 60.0
"""Time after which a run that has ended has not begun again by itself (trainer.restarts)."""

WRITTEN = (CONFIG, PLACEMENT, ENGINES, METRICS, EVENTS, SAMPLES)
"""Files that a run writes and nobody else, as ``gkd report`` writes its page."""

QUEUES: dict[str, type] = {"time": float, "waiting": int, "slots": int, "engines": list}
QUEUE: dict[str, type] = {"rank": int, "health": str, "sampling": int, "scoring": int}
"""What engines.json has, and each engine there."""

PLACED: dict[str, type] = {"group": str, "node": str, "pid": int, "gpu_uuids": list}
"""What each record of placement.json has that is read."""
MOST_PIDS = 1 << 31
"""Beyond which the system's type for them has no number."""


def find_runs(path: Path) -> list[Path]:
    """Return a run's directory, or those of the runs in a sweep's, by name."""
    return [path] if (path / CONFIG).exists() else sorted(file.parent for file in path.glob(f"*/{CONFIG}")) or [path]


def tell_apart(directories: Collection[Path]) -> dict[Path, str]:
    """Return what each of these is called: its name, with as many directories above as no two of them share."""
    n_parts = 1
    while len({directory.parts[-n_parts:] for directory in directories}) < len(directories):
        n_parts += 1
    return {directory: "/".join(directory.parts[-n_parts:]) for directory in directories}


class RunFiles:
    """The output directory ``path``. Raises ConfigError where there is no run. Every property is what they hold now."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics = LineReader(path / METRICS, numbers=True, step=int)
        self._events = LineReader(path / EVENTS, kind=str, time=float, text=str)
        if not (path / CONFIG).exists():
            raise ConfigError(f"{path}: there is no run here (no config.yaml)")
        _ = self.total_steps  # a file that lacks it is no run's

    @property
    def total_steps(self) -> int:
        """Steps that the run is to have done at its end. Raises ConfigError where its file lacks them."""
        tree = read_yaml(self.path / CONFIG)
        try:
            return int(tree["trainer"]["total_steps"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ConfigError(f"{self.path / 'config.yaml'} is no run's: it lacks trainer.total_steps") from None

    def read_config(self, as_requested: bool = False) -> Config | None:
        """Return the run's settings, with what it has decided of them, or ``as_requested``.

        None where they are not ones of this version, or their own classes not here.
        """
        try:
            return read_run(self.path / CONFIG, as_requested)
        except ConfigError:
            return None

    @property
    def is_finished(self) -> bool:
        """Return whether the run has come to its end."""
        return (self.path / SUMMARY).exists()

    @property
    def has_ended(self) -> bool:
        """Return whether the run was killed, or has finished or failed and does not begin again.

        One that has finished still writes, or begins again, while somebody holds the directory.
        """
        if self.is_finished:
            return not is_held(self.path)
        if self.failure is None:
            return self.was_killed
        return time.time() - self.events[-1]["time"] > AGAIN_S and not is_held(self.path)

    @property
    def was_killed(self) -> bool:
        """Return whether the run was ended before it could record that, as by kill -9.

        That is seen where its workers were on this machine: they are gone, nobody holds the directory, and nothing has
        been written for a minute.
        """
        if self.is_finished or self.failure is not None:
            return False
        pids = [pid for group_pids in self.pids().values() for pid in group_pids]
        if not pids or any(psutil.pid_exists(pid) for pid in pids) or is_held(self.path):
            return False
        written = [file.stat().st_mtime for name in WRITTEN if (file := self.path / name).exists()]
        return time.time() - max(written) > AGAIN_S

    @property
    def failure(self) -> str | None:
        """Return how the run failed; None of one that goes on, has finished, or was killed before it recorded it."""
        events = self.events
        if self.is_finished or not events or events[-1]["kind"] != "end" or not events[-1].get("failed", False):
            return None
        return clean(events[-1]["text"])

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return lines of metrics.jsonl that are whole."""
        return self._metrics.read()

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return lines of events.jsonl that are whole."""
        return self._events.read()

    def summary(self) -> Summary | None:
        """Return summary.json, None before the end. Raises ConfigError where it cannot be read."""
        return read(self.path) if self.is_finished else None

    @property
    def last_metrics(self) -> dict[str, Any]:
        """Return the newest step's metrics, with the newest validation's; empty before there is any."""
        rows, metrics = self.rows, dict[str, Any]()
        for row in rows:
            metrics |= {key: value for key, value in row.items() if key.startswith("val/")}
        return metrics | (rows[-1] if rows else {})

    @property
    def step(self) -> int:
        """Return steps done."""
        return int(self.last_metrics.get("step", 0))

    def queues(self) -> Queues | None:
        """Return engines.json, None where there is none. Raises ConfigError where it cannot be read."""
        file = self.path / ENGINES
        if not file.exists():
            return None
        content = read_json(file, dict, **QUEUES)
        for engine in content["engines"]:
            if fault := find_fault(engine, QUEUE):
                raise ConfigError(f"{file} cannot be read: {fault}")
        engines = [EngineQueue(**{name: engine[name] for name in QUEUE}) for engine in content["engines"]]
        return Queues(**{name: content[name] for name in QUEUES} | {"engines": engines})

    def placement(self) -> list[dict[str, Any]]:
        """Return records of placement.json; none before the workers are placed.

        Raises ConfigError where it cannot be read.
        """
        file = self.path / PLACEMENT
        placed: list[dict[str, Any]] = read_json(file, list) if file.exists() else []
        for number, worker in enumerate(placed, 1):
            fault = find_fault(worker, PLACED)
            if fault is None and not 0 < worker["pid"] < MOST_PIDS:
                fault = f"pid={worker['pid']} is no process"
            elif fault is None and not all(isinstance(uuid, str) for uuid in worker["gpu_uuids"]):
                fault = "gpu_uuids are no texts"
            if fault:
                raise ConfigError(f"{file} cannot be read: record {number}: {fault}")
        return placed

    def pids(self) -> dict[str, list[int]]:
        """Return the processes on this machine by group; those of other machines have pids of programs here."""
        local_ips = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
        pids: dict[str, list[int]] = {}
        for row in self.placement():
            group_pids = pids.setdefault(row["group"], [])
            if row["node"].partition("/")[0] in local_ips:  # behind it is the Ray node, where several share an address
                group_pids.append(row["pid"])
        return pids

    def groups_on(self, uuid: str) -> list[str]:
        """Return groups with a worker on the GPU ``uuid``."""
        return list(dict.fromkeys(row["group"] for row in self.placement() if uuid in row["gpu_uuids"]))
