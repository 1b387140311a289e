"""A tracker of one's own: a CSV file with a line for every metric of every step."""

import csv
from collections.abc import Mapping

from pydantic import BaseModel

from gkd.observability.trackers.tracker import TrackedRun


class Csv:
    """Writes step, name and value."""

    class Config(BaseModel):
        file: str = "metrics.csv"

    def __init__(self, config: Config, run: TrackedRun) -> None:
        self._file = (run.output_dir / config.file).open("w", newline="")
        self._rows = csv.writer(self._file)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._rows.writerows([step, name, value] for name, value in metrics.items())

    def close(self, failed: bool) -> None:
        self._file.close()
