"""TensorBoard."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from gkd.observability.trackers.tracker import SpelledNames, TrackedRun, Tracker, sample_table


class TensorBoard(Tracker):
    """Writes event files to ``output_dir/tensorboard``, and there to directories of the run's group and name.

    TensorBoard calls a run by the path of its files, so what is given and not a part of that already is made one.
    """

    package: ClassVar[str | None] = "tensorboardX"

    def __init__(self, run: TrackedRun) -> None:
        trainer, directory = run.config.trainer, run.output_dir / "tensorboard"
        for part in (trainer.run_group, trainer.run_name):
            if part is not None and part not in run.output_dir.parts:
                directory /= _as_name(part)
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._next_step = directory, run.first_step
        self._file: Any = None
        self._names = SpelledNames(lambda name: re.sub(r"[^-/\w.]", "_", name).lstrip("/"))  # as it would
        self._write([])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        from tensorboardX import summary

        self._write([(step, summary.scalar(self._names[name], value)) for name, value in metrics.items()])

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write samples as a table of its text page."""
        from tensorboardX import summary

        columns, rows = sample_table(samples)
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in lines)
        self._write([(step, summary.text("samples", text))])

    def close(self, failed: bool) -> None:
        """Write what is left."""
        self._write([])
        self._file.close()

    def _write(self, summaries: Sequence[tuple[int, Any]]) -> None:
        """Append summaries of steps. What raises, as on a full disk, ends the file; what comes then is in another one.

        SummaryWriter has a thread for that, which such an error ends; what comes then waits for it forever.
        """
        from tensorboardX.proto.event_pb2 import Event

        file, self._file = self._file or self._begin_file(), None
        for step, summary in summaries:
            file.write(Event(wall_time=time.time(), step=step, summary=summary).SerializeToString())
        file.flush()
        self._file, self._next_step = file, max([self._next_step, *(step + 1 for step, _ in summaries)])

    def _begin_file(self) -> Any:
        """Return an event file, which begins by withdrawing the steps that are done again, as by a resumed run."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import RecordWriter

        path = self._directory / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        file, now = RecordWriter(str(path)), time.time()
        version, start = {"file_version": "brain.Event:2"}, {"session_log": SessionLog(status=SessionLog.START)}
        for content in (version, start):
            file.write(Event(wall_time=now, step=self._next_step, **content).SerializeToString())
        try:
            file.flush()
        except OSError:
            path.unlink()  # an empty one a step would be left
            raise
        return file


def _as_name(text: str) -> str:
    """Return a text as the name of one directory."""
    return re.sub(r"[^\w .=,+@-]|^\.+$", "_", text)


def _cell(value: Any) -> str:
    """Return a value as Markdown shows it within a table."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
