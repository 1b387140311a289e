"""Everything a run needs to go on exactly where it stopped.

``output_dir/checkpoints/step_N/`` holds the actor's weights and optimizer state (torch's distributed format) and
``state.json``, the driver's few numbers, which is written last: a directory without it is not complete. ``latest``
names the newest complete one. What is sampled depends on the seed and the place in the run alone, so no more is needed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gkd.actor.group import ActorGroup
from gkd.config import Config
from gkd.errors import ConfigError, RunFailed

log = logging.getLogger("gkd")

_SAME = ("algorithm", "builtin", "data", "model", "reward", "rollout.n", "trainer.batch_size", "trainer.seed")
"""Settings that a run must go on with."""


@dataclass(frozen=True, slots=True)
class State:
    """The driver's part: ``step`` steps are done; ``prompts`` is that of the stream; the rest is for the summary.

    ``wall_s`` are the seconds that were spent before the run was resumed.
    """

    step: int = 0
    prompts: dict[str, int] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)
    teacher: dict[str, float] = field(default_factory=dict)
    validated: dict[str, float] = field(default_factory=dict)
    wall_s: float = 0.0


class Checkpoints:
    """Writes the checkpoints of one run, which was started at ``started`` (``time.monotonic``)."""

    def __init__(self, config: Config, output: Path, started: float) -> None:
        self.config, self.directory, self.started = config, output / "checkpoints", started
        self.state: State | None = None  # of the last step that is whole, if any was done since the start

    def write(self, actor: ActorGroup, state: State) -> Path:
        """Write a checkpoint and forget the oldest ones. Raises RunFailed when the actor cannot."""
        path = self.directory / f"step_{state.step}"
        actor.save_state(str(path / "actor"))
        wall_s = state.wall_s + time.monotonic() - self.started
        told = {"state": asdict(state) | {"wall_s": wall_s}, "settings": _settings(self.config)}
        _replace(path / "state.json", json.dumps(told, indent=1, allow_nan=False))
        _replace(self.directory / "latest", path.name)
        for old in _complete(self.directory)[: -self.config.trainer.keep_checkpoints]:
            shutil.rmtree(old)
        return path

    def after(self, actor: ActorGroup, state: State) -> None:
        """A step is whole: write a checkpoint if it is time."""
        self.state = state
        every = self.config.trainer.save_every
        if every is not None and (state.step % every == 0 or state.step == self.config.trainer.total_steps):
            self.write(actor, state)

    def rescue(self, actor: ActorGroup) -> None:
        """The run ends before its time: save what is whole. Says so; never raises."""
        if self.state is None or (self.directory / f"step_{self.state.step}" / "state.json").exists():
            return
        if not actor.settled:
            log.warning("no checkpoint of step %d: the actor is in the middle of an update", self.state.step)
            return
        try:
            path = self.write(actor, self.state)
            log.warning("checkpoint of step %d: %s (go on with trainer.resume=true)", self.state.step, path)
        except (RunFailed, OSError) as error:
            log.warning("no checkpoint of step %d could be written: %s", self.state.step, error)


def find(config: Config, output: Path) -> tuple[Path, State]:
    """The newest complete checkpoint in ``output``.

    Raises ConfigError when there is none, or when it is of a run with other settings.
    """
    directory = output / "checkpoints"
    complete = _complete(directory)
    if not complete:
        raise ConfigError(f"trainer.resume=true: there is no complete checkpoint in {directory}")
    try:
        told = json.loads((complete[-1] / "state.json").read_text(encoding="utf-8"))
        state, settings = State(**told["state"]), dict(told["settings"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"trainer.resume=true: {complete[-1] / 'state.json'} cannot be read: {error}") from None
    here = _settings(config)
    for key, value in settings.items():
        if here.get(key) != value:
            raise ConfigError(
                f"trainer.resume=true: {complete[-1]} was made with {key}={value}, this is {here.get(key)}"
            )
    if state.step >= config.trainer.total_steps:
        raise ConfigError(f"trainer.resume=true: all of trainer.total_steps={config.trainer.total_steps} are done")
    return complete[-1], state


def cut(file: Path, step: int) -> None:
    """Forget what a JSON-lines file says of steps after ``step``: they are done again."""
    if not file.exists():
        return
    rows = file.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [row for row in rows if row.endswith("\n") and json.loads(row)["step"] <= step]
    _replace(file, "".join(kept))


def _complete(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    numbered = {path: re.fullmatch(r"step_(\d+)", path.parent.name) for path in directory.glob("step_*/state.json")}
    found = [(int(number[1]), path.parent) for path, number in numbered.items() if number]
    return [path for _, path in sorted(found)]


def _settings(config: Config) -> dict[str, Any]:
    tree = config.model_dump(mode="json")
    found: dict[str, Any] = {}
    for name in _SAME:
        value: Any = tree
        for part in name.split("."):
            value = value[part]
        found |= _flat(name, value)
    return found


def _flat(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        return {key: v for part, below in value.items() for key, v in _flat(f"{name}.{part}", below).items()}
    return {name: value}


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
