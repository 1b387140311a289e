"""TensorBoard."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from gkd.observability.trackers.tracker import TrackedRun, Tracker, sample_table


class TensorBoard(Tracker):
    """Writes event files to ``output_dir/tensorboard``, and there to directories of the run's group and name.

    TensorBoard calls a run by the path of its files, so what is given and not a part of that already is made one.
    """

    package: ClassVar[str | None] = "tensorboardX"

    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX import SummaryWriter

        trainer, directory = run.config.trainer, run.output_dir / "tensorboard"
        for part in (trainer.run_group, trainer.run_name):
            if part is not None and part not in run.output_dir.parts:
                directory /= _as_name(part)
        # A resumed run does steps again whose first metrics are there already.
        self._writer = SummaryWriter(str(directory), purge_step=run.first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write samples as a table of its text page."""
        columns, rows = sample_table(samples)
        lines = [columns, ["---"] * len(columns), *rows]
        self._writer.add_text("samples", "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in lines), step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """Write what is left."""
        self._writer.close()


def _as_name(text: str) -> str:
    """Return a text as the name of one directory."""
    return re.sub(r"[^\w .=,+@-]|^\.+$", "_", text)


def _cell(value: Any) -> str:
    """Return a value as Markdown shows it within a table."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
