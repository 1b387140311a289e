"""What a tracker is.

The packages of built-in trackers are extras, imported only where a tracker is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, ClassVar

from gkd import durable
from gkd.config import Config

FINISH_S = 300.0
"""Time that a tracker has to start, and that what is left has to reach its server when a run ends; files stay."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker takes metrics of: its settings, its directory, and the first step that it makes."""

    config: Config
    output_dir: Path
    first_step: int

    @property
    def name(self) -> str:
        """What the run is called."""
        return self.config.trainer.run_name or self.output_dir.name


class Tracker:
    """Base of the built-in trackers; a user's class may derive from it, or have the same two methods.

    A class with a ``Config`` is made as ``Kind(settings, run)``, one without as ``Kind(run)``. ``package`` is what it
    imports beyond gkd's own requirements.
    """

    package: ClassVar[str | None] = None

    @classmethod
    def require_login(cls) -> None:
        """Raise ConfigError where it lacks what its server asks for; called before a run takes GPUs."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step."""
        raise NotImplementedError

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Take samples of a step, rows of samples.jsonl without their tokens; a class may do without this method."""

    def close(self, failed: bool) -> None:
        """Write what is left; ``failed``: the run did not come to its end."""


def keep_id(run: TrackedRun, name: str, make: Callable[[], str]) -> tuple[str, bool]:
    """Return the id that a run has at a tracker, and whether it had it before; it is kept in ``output_dir/name``.

    What a directory that was copied goes on with is another run, with an id of its own.
    """
    file, directory = run.output_dir / name, str(run.output_dir.absolute())
    if file.exists():
        id, _, place = file.read_text().partition("\n")
        original = Path(place or directory) / name
        if not original.exists() or original.samefile(file) or original.read_text().partition("\n")[0] != id:
            durable.replace(file, f"{id}\n{directory}".encode())  # it may have been moved
            return id, True
    id = make()
    durable.replace(file, f"{id}\n{directory}".encode())
    return id, False


class SpelledNames:
    """Names as a tracker takes them: as ``spell`` has each; of several that are one then, later ones have a number."""

    def __init__(self, spell: Callable[[str], str]) -> None:
        self._spell = spell
        self._spelled: dict[str, str] = {}
        self._taken: set[str] = set()

    def __getitem__(self, name: str) -> str:
        if name not in self._spelled:
            plain = self._spell(name)
            numbered = (f"{plain}_{n}" for n in count(2))
            self._spelled[name] = next(other for other in chain([plain], numbered) if other not in self._taken)
            self._taken.add(self._spelled[name])
        return self._spelled[name]


def sample_table(samples: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows of samples for trackers that have tables: each reward has a column of its own."""
    flat = [
        {name: value for name, value in sample.items() if name != "rewards"}
        | {f"reward/{name}": value for name, value in sample.get("rewards", {}).items()}
        for sample in samples
    ]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    return columns, [[row.get(name) for name in columns] for row in flat]
