"""The student as it was at its best validation: ``best/`` and ``best.json``."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from gkd import durable
from gkd.actor.group import ActorGroup
from gkd.cluster.workers.group import Attend
from gkd.config.output_files import BEST, read_best
from gkd.config.validating import is_better
from gkd.errors import RunFailed, StudentNotWritten

log = logging.getLogger("gkd")


class BestModel:
    """Writes the student to ``output/best`` whenever ``metric`` is better than at every validation of training before.

    The one before the first step is not among them: that student is in ``model.path``.

    ``best.json`` has the step at which that was, so that a run that goes on compares with it. Without it the next
    validation writes both, whatever its figure.
    """

    def __init__(self, metric: str, place: durable.DirectoryIdentity) -> None:
        output = place.path
        self.metric, self.file, self._place = metric, output / BEST, place
        self.directory = Path(os.path.realpath(output / "best"))  # written where a link leads
        self.value: float | None = None
        self._failure: str | None = None
        best = read_best(output)
        if best is not None and best["metric"] == metric:
            self.value = best["value"]

    def update(self, step: int, measured: Mapping[str, float], actor: ActorGroup, attend: Attend | None = None) -> None:
        """Write the student if it is better than before; nothing where the figure was not measured now.

        ``attend`` is called while it is written, as of :meth:`ActorGroup.save`. A failure is a warning, until
        :meth:`finish`.
        """
        value = measured.get(self.metric)
        if value is None or (self.value is not None and not is_better(self.metric, value, self.value)):
            return
        try:
            self._write(step, value, actor, attend)
            self._failure = None
        except (StudentNotWritten, OSError) as error:
            text = str(error) if isinstance(error, StudentNotWritten) else durable.reason(error, self.directory)
            self._failure = f"the student of step {step}, the best by {self.metric}, is not in {self.directory}: {text}"
            log.warning("%s; the run goes on", self._failure)
            if not self.file.exists():  # what the directory holds is not known
                self.value = None

    def finish(self) -> None:
        """Raise RunFailed when the best student could not be written, and no better one after it."""
        if self._failure is not None:
            raise RunFailed(self._failure)

    def _write(self, step: int, value: float, actor: ActorGroup, attend: Attend | None) -> None:
        if change := self._place.describe_change():
            raise StudentNotWritten(change)
        new = self.directory.with_name(f".{self.directory.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        actor.save(str(new), attend)
        if self.file.exists():  # a run that is killed now leaves a student without a record, not with another's
            self.file.unlink()
            durable.flush(self.file.parent)
        durable.replace_directory(new, self.directory)
        best = {"metric": self.metric, "value": value, "step": step}
        durable.replace(self.file, (json.dumps(best) + "\n").encode())
        self.value = value
