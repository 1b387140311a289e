"""events.jsonl: what happened in a run and when, one object a line, written as it happens.

``time`` (seconds since 1970), ``kind``, ``text``; where they are known ``step`` (the one under way), ``metric``, and
``settings``, those that the text names. A resumed run appends.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from gkd.cluster.session.shutdown import received_signal
from gkd.config import Config
from gkd.durable import reason
from gkd.errors import describe_error
from gkd.observability.metrics import JsonLines

Kind = Literal["start", "resume", "warning", "death", "restart", "checkpoint", "validation", "stop", "end"]

log = logging.getLogger("gkd")
_SETTING = re.compile(rf"(?<![\w./])(?:{'|'.join(Config.model_fields)})(?:\.[A-Za-z_]\w*)+")


def note(kind: Kind, text: str, **more: Any) -> None:
    """Keep an event in the file of the run that is under way, without printing it; ``more``: ``step``, ``metrics``."""
    for events in _entered:
        events.write({"time": round(time.time(), 3), "kind": kind, "step": events.step, "text": text, **more})


_entered: list[Events] = []
"""Of the run that is under way in this process."""


class Events(logging.Handler):
    """Writes warnings of the ``gkd`` logger, records with a ``kind``, and what :func:`note` is given, while entered.

    A record may have ``kind``, ``step`` and ``metric`` (``extra``). A file that cannot be written (a full disk) costs
    one warning and never ends the run; what is not written then is once that can be. ``started_s``
    (``time.monotonic``): when the run began, None for now.
    """

    def __init__(self, path: Path, step: int = 0, started_s: float | None = None) -> None:
        super().__init__(logging.INFO)
        self._started_s = time.monotonic() if started_s is None else started_s
        self.step, self._one_at_a_time = step, threading.RLock()
        self._is_finished = False
        self._path, self._lines, self._lost = path, JsonLines(path), False

    def emit(self, record: logging.LogRecord) -> None:
        """Append a warning, or what has a kind."""
        if record.levelno < logging.WARNING and not hasattr(record, "kind"):
            return
        text = record.getMessage()
        row = {"time": round(record.created, 3), "kind": getattr(record, "kind", "warning")}
        row |= {"step": getattr(record, "step", self.step), "text": text}
        if metric := getattr(record, "metric", None):
            row["metric"] = metric
        if names := list(dict.fromkeys(_SETTING.findall(text))):
            row["settings"] = names
        self.write(row)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one event."""
        try:
            with self._one_at_a_time:
                self._lines.write(row)
        except OSError as error:
            first, self._lost = not self._lost, True
            if first:
                log.warning("events are not written: %s", reason(error, self._path))

    def finish(self, step: int) -> None:
        """Note that the run has done its last step, whatever ends what comes after it, such as closing a tracker."""
        self.step, self._is_finished = step, True

    def __enter__(self) -> Self:
        log.addHandler(self)
        _entered.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        signalled = received_signal() if isinstance(error, SystemExit) else None  # which a call into Ray makes 0 or 1
        finished = ["finished"] if self._is_finished or error is None else []
        how = "; then ".join([*finished, *([] if error is None else [describe_error(signalled or error)])])
        note("end", f"{how} after {time.monotonic() - self._started_s:.0f} s", failed=not finished)
        log.removeHandler(self)
        _entered.remove(self)
        self._lines.__exit__()
