"""Ends a run whose validation does not get better any more: ``trainer.stop_early``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gkd.config.output_files import read_whole_lines
from gkd.config.validating import StopEarly


class EarlyStop:
    """Looks at a figure of validation, from the first row of metrics.jsonl on, so that a run that goes on has it.

    ``rows``: that file of the run, whose last line may be torn. Raises ConfigError for another that cannot be read.
    """

    def __init__(self, settings: StopEarly, rows: Path) -> None:
        self.settings = settings
        self._measured = _read_figures(settings, rows)

    @property
    def reason(self) -> str | None:
        """Why the run is to end now, in one line; None where it goes on."""
        return self.settings.reason(self._measured)

    def update(self, step: int, measured: Mapping[str, float]) -> None:
        """Take the figures of a step, in which the one that counts may be."""
        value = measured.get(self.settings.metric or "")
        if value is not None:
            self._measured.append((step, value))


def _read_figures(settings: StopEarly, rows: Path) -> list[tuple[int, float]]:
    metric = settings.metric
    if metric is None:
        return []
    return [(row["step"], float(row[metric])) for row in read_whole_lines(rows, step=int) if metric in row]
