"""TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from gkd.observability.trackers.tracker import TrackedRun, Tracker


class TensorBoard(Tracker):
    """Writes event files to ``output_dir/tensorboard``."""

    package: ClassVar[str | None] = "tensorboardX"

    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX import SummaryWriter

        # A resumed run does steps again whose first metrics are there already.
        self._writer = SummaryWriter(str(run.output_dir / "tensorboard"), purge_step=run.first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """Write what is left."""
        self._writer.close()
