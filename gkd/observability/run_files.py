"""Reading what a run writes, also while it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gkd.errors import ConfigError


class RunFiles:
    """The output directory ``path``. Raises ConfigError where there is no run. Every question reads anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.yaml").exists():
            raise ConfigError(f"{path}: there is no run here (no config.yaml)")
        self.total_steps = int(OmegaConf.load(path / "config.yaml").trainer.total_steps)

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return (self.path / "summary.json").exists()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl that are whole."""
        file = self.path / "metrics.jsonl"
        *lines, _ = file.read_text(encoding="utf-8").split("\n") if file.exists() else [""]
        return [json.loads(line) for line in lines]

    @property
    def last(self) -> dict[str, Any]:
        """The newest step's metrics, with the newest validation's; empty before there is any."""
        found: dict[str, Any] = {}
        for row in self.rows:
            found = {key: value for key, value in found.items() if key.startswith("val/")} | row
        return found

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.last.get("step", 0))

    def placement(self) -> list[dict[str, Any]]:
        """Records of placement.json; none before the workers are placed."""
        file = self.path / "placement.json"
        return list(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []

    def pids(self) -> dict[str, list[int]]:
        """Processes by group."""
        found: dict[str, list[int]] = {}
        for row in self.placement():
            found.setdefault(row["group"], []).append(row["pid"])
        return found

    def groups_on(self, uuid: str) -> list[str]:
        """Groups with a worker on the GPU ``uuid``."""
        return list(dict.fromkeys(row["group"] for row in self.placement() if uuid in row["gpu_uuids"]))
