"""What a checkpoint is: everything a run needs to go on exactly where it stopped.

``output_dir/checkpoints/step_N/`` holds weights and optimizer state, a safetensors file for each of the actor's ranks
(:mod:`gkd.actor.state`), and ``state.json``, the driver's few numbers and the sums of all files, which is written last:
a directory without it is not complete. ``latest`` names the newest complete one. What is sampled depends on the seed
and the place in the run alone, so no more is needed. No file of a checkpoint can run code when it is read.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from gkd.durable import Checksum, compute_checksum, flush, reason, replace
from gkd.errors import describe_error
from gkd.version import __version__

STATE = "state.json"
RANKS = "actor"
"""Directory of the ranks' files within a checkpoint."""

_RANK_FILE = re.compile(rf"{RANKS}/rank_\d+\.safetensors")

Cause = Literal["step", "time", "end"]
"""Why a checkpoint was written: trainer.save_every, trainer.save_minutes, or a run that ended before its time."""


class DamagedCheckpoint(Exception):
    """A checkpoint that is not what was written, and in what."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The driver's part: ``step`` steps are done; ``prompts`` is that of the stream; the rest is for the summary.

    ``ahead``: steps whose prompts were drawn and that are not done, each with the indices of these.
    ``row`` are metrics of ``step`` where these are not in metrics.jsonl yet: its validation, where one is due, and its
    row there are still to be made. ``wall_s`` are the seconds that were spent before the run was resumed.
    """

    step: int = 0
    prompts: dict[str, Any] = field(default_factory=dict)
    ahead: list[tuple[int, list[int]]] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    teacher: dict[str, float] = field(default_factory=dict)
    validated: dict[str, float] = field(default_factory=dict)
    row: dict[str, float] | None = None
    wall_s: float = 0.0

    @property
    def last_logged_step(self) -> int:
        """The last step that is in metrics.jsonl."""
        return self.step if self.row is None else self.step - 1


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint, as ``state.json`` describes it.

    ``config`` is the run's configuration, ``model`` the directory of the model that was trained and ``dtype`` what was
    computed in. ``data`` has fingerprints of its prompts and models, and ``files`` the sums of all other files, by name
    within ``path``. ``version`` is that of the gkd that wrote it.
    """

    path: Path
    cause: Cause
    state: RunState
    config: Mapping[str, Any]
    model: str
    dtype: str
    data: Mapping[str, str]
    files: Mapping[str, Checksum]
    version: str = __version__

    @property
    def rank_files(self) -> list[Path]:
        """The ranks' files, by rank."""
        return [self.path / name for name in sorted(self.files)]


def write(saved: SavedCheckpoint) -> None:
    """Make a checkpoint whose other files are on the disk complete. Raises OSError."""
    content = asdict(saved)
    del content["path"]
    # The sum is of these characters, so that it does not depend on how they are laid out.
    described = json.dumps({"sha256": _sum(content), **content}, indent=1, allow_nan=False)
    replace(saved.path / STATE, described.encode())
    flush(saved.path.parent)
    replace(saved.path.parent / "latest", saved.path.name.encode())


def read(path: Path) -> SavedCheckpoint:
    """Describe the checkpoint in ``path``, without looking at its other files. Raises DamagedCheckpoint."""
    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
        if "sha256" not in content:
            raise DamagedCheckpoint(
                f"{STATE} cannot be read: it has no checksum; an earlier version of this program wrote none"
            )
        if content.pop("sha256") != _sum(content):
            raise DamagedCheckpoint(f"{STATE} is not what was written: its checksum differs")
        content.setdefault("version", "0.1.0")  # the last that did not write its own
        content["state"] = RunState(**content["state"])
        content["files"] = {name: Checksum(**saved) for name, saved in content["files"].items()}
        saved = SavedCheckpoint(path, **content)
    except OSError as error:
        raise DamagedCheckpoint(reason(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{STATE} cannot be read: {describe_error(error)}") from None
    if strange := [name for name in saved.files if not _RANK_FILE.fullmatch(name)]:
        raise DamagedCheckpoint(f"{STATE} names {strange[0]!r}, which is no file of a checkpoint")
    return saved


def read_intact(path: Path) -> SavedCheckpoint:
    """Do as :func:`read`, with every file compared with its checksum. Raises DamagedCheckpoint."""
    saved = read(path)
    if not saved.files:
        raise DamagedCheckpoint(f"{STATE} names no files")

    def compare(name: str) -> None:
        try:
            if compute_checksum(path / name) != saved.files[name]:
                raise DamagedCheckpoint(f"{name} is not what was written: its checksum differs")
        except OSError as error:
            raise DamagedCheckpoint(reason(error)) from None

    with ThreadPoolExecutor(max_workers=8) as threads:
        list(threads.map(compare, saved.files))
    return saved


def find_newest_intact(directory: Path) -> tuple[SavedCheckpoint | None, dict[Path, str]]:
    """Return the newest intact checkpoint in ``directory``, and what is wrong with each complete one after it."""
    damaged: dict[Path, str] = {}
    return next(iterate_intact(directory, damaged), None), damaged


def iterate_intact(directory: Path, damaged: dict[Path, str]) -> Iterator[SavedCheckpoint]:
    """Yield the intact checkpoints in ``directory``, newest first; ``damaged`` gets what is wrong with the others."""
    for path in reversed(complete(directory)):
        try:
            yield read_intact(path)
        except DamagedCheckpoint as error:
            if is_complete(path):  # else its run has deleted it meanwhile
                damaged[path] = str(error)


def is_complete(path: Path) -> bool:
    """Return whether a checkpoint was written to its end, intact or not, and is not deleted."""
    return (path / STATE).exists()


def complete(directory: Path) -> list[Path]:
    """Return complete checkpoints, intact or not, oldest first."""
    return sorted(filter(is_complete, _list_all(directory)), key=step_of)


def describe_none(directory: Path) -> str:
    """Describe that there is no complete checkpoint in ``directory``, and where the run's student is if it has one."""
    model = directory.parent / "model"
    student = f"; the run's trained student is in {model}" if model.is_dir() else ""
    return f"there is no complete checkpoint in {directory} (trainer.save_every){student}"


def list_incomplete(directory: Path) -> list[Path]:
    """Return checkpoints that were never finished."""
    return [path for path in _list_all(directory) if not is_complete(path)]


def step_of(path: Path) -> int:
    """Return the step of a checkpoint's directory."""
    return int(path.name.removeprefix("step_"))


def remove(path: Path) -> None:
    """Delete a checkpoint, which is not complete any more from the first moment on. Raises OSError."""
    if path.exists():
        (path / STATE).unlink(missing_ok=True)
        flush(path)
        shutil.rmtree(path)


def _list_all(directory: Path) -> list[Path]:
    return [path for path in directory.glob("step_*") if re.fullmatch(r"step_\d+", path.name)]


def _sum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
