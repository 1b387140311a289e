"""The files a run writes as it goes (metrics.jsonl, one object a step, and samples.jsonl), and what goes into them."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from gkd import durable
from gkd.types import TrainingSample

if TYPE_CHECKING:
    from gkd.cluster.workers.reports import WorkerReport

log = logging.getLogger("gkd")

_NO_TEXT = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""What some programs take for the end of a line, and halves of surrogate pairs, which no file can hold."""
BLOCK = 1 << 16
MOST_KEPT_BYTES = 64 << 20
Z_95 = 1.959963984540054
"""Quantile 0.975 of the normal distribution: a 95 % interval is so many standard errors to either side."""


class JsonLines:
    """A file of JSON objects, one a line, each written through at once so that a crash loses nothing.

    One that is there goes on after its last whole line: a full disk, or a crash of the machine, tears lines.
    """

    def __init__(self, path: Path) -> None:
        _cut_torn_line(path)
        self._file = path.open("ab", buffering=0)
        self._name = str(path)
        self._unwritten = b""  # of a disk that was full, of which a part of a line may be in the file
        self._is_behind = False

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one object.

        Raises ValueError for a number that JSON does not have (NaN, infinity), and OSError, which names the file; what
        could not be written then comes before the next object.
        """
        self._add(row)
        self.require_written()

    def keep(self, row: Mapping[str, Any]) -> None:
        """Append one object, now or, where the disk is full, before a later one: a run goes on meanwhile.

        A warning states that, and a line when the file is whole again. Raises ValueError as :meth:`write`, and OSError
        once there is more than :data:`MOST_KEPT_BYTES` to be written.
        """
        self._add(row)
        try:
            self.require_written()
        except OSError as error:
            if len(self._unwritten) > MOST_KEPT_BYTES:
                raise
            if not self._is_behind:
                log.warning("%s; what it lacks is written later", durable.reason(error))
            self._is_behind = True
        else:
            if self._is_behind:
                log.info("%s is whole again", self._name)
            self._is_behind = False

    def _add(self, row: Mapping[str, Any]) -> None:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        self._unwritten += _NO_TEXT.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode() + b"\n"

    def require_written(self) -> None:
        """Raise OSError, which names the file, unless all that was to be written is in it."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._name) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.require_written()
        except OSError as error:
            if self._is_behind:  # of what was not kept the error was raised
                log.warning("%s; its last lines are lost", durable.reason(error))
        with contextlib.suppress(OSError):
            self._file.close()


def _cut_torn_line(path: Path) -> None:
    """Cut what a file has after its last line break. Raises OSError."""
    if not path.is_file():  # as a device
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - BLOCK)
            file.seek(start)
            place = file.read(end - start).rfind(b"\n")
            end = start + place + 1
            if place >= 0:
                break
        file.truncate(end)


def keep_finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics without those that are not numbers: what could not be measured is left out."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of ``n`` answers (Wilson 1927, equation 3)."""
    z = Z_95
    middle, width = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (middle - width) / (1 + z * z / n), (middle + width) / (1 + z * z / n)


def response_metrics(samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Return response/* of samples."""
    lengths = np.array([sample.n_sampled for sample in samples])
    clipped = np.array([sample.finish_reason == "length" for sample in samples])
    return {
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/clip_ratio": float(clipped.mean()),
    }


def staleness_metrics(batch: Sequence[TrainingSample], version: int) -> dict[str, float]:
    """Return staleness/* of a batch that weights ``version`` learn from."""
    age = np.array([version - sample.version for sample in batch])
    return {"staleness/mean": float(age.mean()), "staleness/max": float(age.max())}


def stage_metrics(requested_s: float, samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Return timing_s/{generate,score} of samples requested at ``requested_s`` (``time.time``); none without any.

    ``generate`` lasts until the last sample was finished, ``score`` is what scoring took beyond that (it runs beside
    sampling). Times are by the driver's clock (:meth:`gkd.observability.timeline.Timeline.correct_times`).
    """
    if not samples:
        return {}
    generated = max(sample.generated_s for sample in samples)
    scored = max(sample.scored_s for sample in samples)
    return {"timing_s/generate": generated - requested_s, "timing_s/score": max(0.0, scored - generated)}


def memory_metrics(reports: Iterable[WorkerReport]) -> dict[str, float]:
    """Return memory/GROUP/*: the largest over a group's workers, without what nobody could measure."""
    rows: dict[str, float] = {}
    for report in reports:
        for key, value in report.contents["memory"].items():
            name = f"memory/{report.worker.group}/{key}"
            rows[name] = max(value, rows.get(name, value))
    return dict(sorted(rows.items()))
