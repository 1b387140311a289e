"""The files that a run writes into ``trainer.output_dir``: their names, and how those of a line a record are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gkd.errors import ConfigError, one_line

CONFIG = "config.yaml"
"""The resolved configuration."""

SOURCES = "sources"
"""Directory with the user's own files of code, as they were each time the run began, by their whole paths."""

PLACEMENT = "placement.json"
"""Which worker has which GPUs."""

METRICS = "metrics.jsonl"
"""One object a step."""

SAMPLES = "samples.jsonl"
"""A few samples a step."""

EVENTS = "events.jsonl"
"""Warnings, deaths, checkpoints, validations."""

ENGINES = "engines.json"
"""What each engine samples, and what waits."""

TIMELINE = "timeline.json"
"""What every worker did when: a Chrome trace."""

BEST = "best.json"
"""Figure and step of the student in ``best/``."""

SUMMARY = "summary.json"
"""Figures before and after; written at the end alone."""

REPORT = "report.html"
"""The page of ``gkd report``."""

REPLACED = (CONFIG, METRICS, SAMPLES, TIMELINE, BEST, SUMMARY, REPORT)
"""Those of which a new one takes the place of the old one, whole."""


class LineReader:
    """Reads a JSON-lines file while it grows: what was read is kept, so that only new lines are parsed.

    ``fields``: what every line has, and of which type. ``numbers``: everything else in it is a number.
    """

    def __init__(self, file: Path, numbers: bool = False, **fields: type) -> None:
        self._file, self._numbers, self._fields = file, numbers, fields
        self._forget()

    def _forget(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._last, self._end = b"", 0  # the last line that was read, and where it ends

    def read(self) -> list[dict[str, Any]]:
        """Return the objects of all lines without a last one that is not whole; none where there is no file.

        Raises ConfigError, naming the line, for one that is no such object.
        """
        if not self._file.exists():
            self._forget()
            return self._rows
        with self._file.open("rb") as file:
            file.seek(self._end - len(self._last))
            if file.read(len(self._last)) != self._last:  # a run that goes on has cut it, and logged other steps since
                self._forget()
                file.seek(0)
            *lines, _ = file.read().split(b"\n")
        for line in lines:
            self._rows.append(self._parse(line))
            self._last, self._end = line + b"\n", self._end + len(line) + 1
        return self._rows

    def _parse(self, line: bytes) -> dict[str, Any]:
        where = f"{self._file} line {len(self._rows) + 1} cannot be read"
        try:
            row: dict[str, Any] = parse(line)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        others = dict.fromkeys(row, float) if self._numbers and isinstance(row, dict) else {}
        if fault := find_fault(row, {**others, **self._fields}):
            raise ConfigError(f"{where}: {fault}")
        return row


def parse(content: bytes) -> Any:
    """Return what JSON holds.

    Raises ValueError, also for NaN, which it has not, for numbers that are no finite float, and for what is nested too
    deep.
    """
    try:
        return _DECODER.decode(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _require_finite(text: str, kind: type[int] | type[float]) -> float:
    number = kind(text)
    if not abs(number) <= sys.float_info.max:
        raise ValueError(f"{text[:20]}... is too large")
    return number


_DECODER = json.JSONDecoder(
    parse_constant=_refuse,
    parse_float=partial(_require_finite, kind=float),
    parse_int=partial(_require_finite, kind=int),
)


def read_json(file: Path, kind: type, **fields: type) -> Any:
    """Return what a JSON file holds.

    Raises ConfigError where it is not readable, not of the ``kind``, or an object without these ``fields``.
    """
    try:
        content = parse(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {one_line(error)}") from None
    if not isinstance(content, kind):
        raise ConfigError(f"{file} cannot be read: it holds no {kind.__name__}")
    if fields and (fault := find_fault(content, fields)):
        raise ConfigError(f"{file} cannot be read: {fault}")
    return content


def find_fault(record: Any, fields: Mapping[str, type]) -> str | None:
    """Return what is wrong with a record that is to be an object with ``fields`` of these types; None where it is one.

    A whole number is a float, too.
    """
    if not isinstance(record, dict):
        return "it is no object"
    for name, kind in fields.items():
        if name not in record:
            return f"it has no {name}"
        if not isinstance(record[name], (int, float) if kind is float else kind):
            return f"{name} is no {kind.__name__}"
    return None


def read_whole_lines(file: Path, **fields: type) -> list[dict[str, Any]]:
    """Return what :class:`LineReader` reads of a file, once. Raises ConfigError."""
    return LineReader(file, False, **fields).read()


def read_best(output: Path) -> dict[str, Any] | None:
    """Return ``metric``, ``value`` and ``step`` of a run's best validation; None where it states none.

    Raises ConfigError for one that cannot be read.
    """
    if not (output / BEST).exists():
        return None
    best: dict[str, Any] = read_json(output / BEST, dict, metric=str, value=float, step=int)
    return best
