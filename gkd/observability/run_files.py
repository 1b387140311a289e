"""Reading what a run writes, also while it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gkd.errors import ConfigError


class RunFiles:
    """The output directory ``path``. Raises ConfigError where there is no run. Every property is read anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.yaml").exists():
            raise ConfigError(f"{path}: there is no run here (no config.yaml)")
        config = OmegaConf.load(path / "config.yaml")
        self.total_steps = int(config.trainer.total_steps)
        self.transfer = str(OmegaConf.select(config, "weights.transfer", default="auto"))

    @property
    def finished(self) -> bool:
        """Return whether the run has come to its end."""
        return (self.path / "summary.json").exists()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return lines of metrics.jsonl that are whole."""
        return whole_lines(self.path / "metrics.jsonl")

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return lines of events.jsonl that are whole."""
        return whole_lines(self.path / "events.jsonl")

    def summary(self) -> dict[str, Any] | None:
        """Return summary.json, None before the end. Raises ConfigError where it cannot be read."""
        if not self.finished:
            return None
        try:
            content: dict[str, Any] = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{self.path / 'summary.json'} cannot be read: {error}") from None
        return content

    @property
    def last(self) -> dict[str, Any]:
        """Return the newest step's metrics, with the newest validation's; empty before there is any."""
        metrics: dict[str, Any] = {}
        for row in self.rows:
            metrics = {key: value for key, value in metrics.items() if key.startswith("val/")} | row
        return metrics

    @property
    def step(self) -> int:
        """Return steps done."""
        return int(self.last.get("step", 0))

    def queues(self) -> dict[str, Any] | None:
        """Return engines.json (:class:`gkd.rollout.queues.Queues` and ``time``), None where there is none."""
        file = self.path / "engines.json"
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None

    def placement(self) -> list[dict[str, Any]]:
        """Return records of placement.json; none before the workers are placed."""
        file = self.path / "placement.json"
        return list(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []

    def pids(self) -> dict[str, list[int]]:
        """Return processes by group."""
        pids: dict[str, list[int]] = {}
        for row in self.placement():
            pids.setdefault(row["group"], []).append(row["pid"])
        return pids

    def groups_on(self, uuid: str) -> list[str]:
        """Return groups with a worker on the GPU ``uuid``."""
        return list(dict.fromkeys(row["group"] for row in self.placement() if uuid in row["gpu_uuids"]))


def whole_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file without a last line that is not whole; none where there is no file.

    Raises ConfigError, naming the line, for one that is no JSON.
    """
    *lines, _ = file.read_text(encoding="utf-8").split("\n") if file.exists() else [""]
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{file} line {number} cannot be read: {error}") from None
    return rows
