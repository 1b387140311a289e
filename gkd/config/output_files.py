"""The files that a run writes into ``trainer.output_dir``: their names, and how those of a line a record are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gkd.errors import ConfigError

CONFIG = "config.yaml"
"""The resolved configuration."""

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


def whole_lines(file: Path, **fields: type) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file without a last line that is not whole; none where there is no file.

    ``fields``: what every one of them has, and of which type. Raises ConfigError, naming the line, for other lines.
    """
    *lines, _ = file.read_bytes().split(b"\n") if file.exists() else [b""]
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line.decode("utf-8"))
            if not isinstance(row, dict):
                raise TypeError("it is no object")
            for name, kind in fields.items():
                if not isinstance(row[name], (int, float) if kind is float else kind):
                    raise TypeError(f"{name} is no {kind.__name__}")
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{file} line {number} cannot be read: {error}") from None
        except KeyError as error:
            raise ConfigError(f"{file} line {number} cannot be read: it has no {error.args[0]}") from None
        rows.append(row)
    return rows
