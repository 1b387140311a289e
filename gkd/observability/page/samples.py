"""Which of a run's samples the page has: steps at even distances, whole, within bounds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from gkd.errors import ConfigError

MAX_SAMPLES = 2_000
MAX_TOKENS = 100_000
"""Tokens with log-probabilities, some 60 bytes each, of all samples of a page."""
MAX_CHARACTERS = 20_000
"""Of one prompt or response."""

_STEP = re.compile(rb'^\{"step": (\d+)')
_KEPT = ("step", "answer", "finish_reason", "version", "prompt_id", "index", "length", "reward", "rewards")
_MEANS = ("logprob_mean", "teacher_logprob_mean")


@dataclass
class Texts:
    """Texts of tokens, each once; samples have their numbers."""

    numbers: dict[str, int] = field(default_factory=dict)

    def number_of(self, text: str) -> int:
        """Return the number of a text."""
        return self.numbers.setdefault(text, len(self.numbers))

    def list_all(self) -> list[str]:
        """Return all texts, each at its number."""
        return list(self.numbers)


def read_samples(file: Path, texts: Texts, share: int = 1) -> list[dict[str, Any]]:
    """Return samples for the page, of which ``share`` runs share the bounds; none where there is no file.

    Of all steps those at even distances are taken, the first and the last among them, with all of their samples. Raises
    ConfigError for a line that is no sample.
    """
    if not file.exists():
        return []
    rows = _read_evenly(file, max(1, MAX_SAMPLES // share))
    by_step = [list(group) for _, group in groupby(rows, key=lambda row: row["step"])]
    sizes = [sum(len(row.get("tokens", {}).get("text", ())) for row in group) for group in by_step]
    part = min(1.0, MAX_TOKENS / share / max(1, sum(sizes)))
    samples = []
    for number, group in enumerate(by_step):
        back = len(by_step) - 1 - number  # from the last step, whose samples always have their tokens
        detailed = math.floor(back * part) > math.floor((back - 1) * part)
        samples += [_sample(row, texts, detailed) for row in group]
    return samples


def _read_evenly(file: Path, most: int) -> list[dict[str, Any]]:
    """Read the lines of evenly chosen steps, without holding the others."""
    places: list[tuple[int, int]] = []  # step and position of every whole line
    with file.open("rb") as lines:
        position = 0
        for number, line in enumerate(lines, 1):
            if line.endswith(b"\n"):
                if not (match := _STEP.match(line)):
                    raise ConfigError(f"{file} line {number} is no sample")
                places.append((int(match[1]), position))
            position += len(line)
        steps = list(dict.fromkeys(step for step, _ in places))
        n = max(1, min(len(steps), most * len(steps) // max(1, len(places))))
        chosen_steps = {steps[round(i * (len(steps) - 1) / max(1, n - 1))] for i in range(n)} if steps else set()
        rows: list[dict[str, Any]] = []
        for step, position in places:
            if step in chosen_steps and len(rows) < most:
                lines.seek(position)
                rows.append(_parse(lines.readline(), file))
    return rows


def _parse(line: bytes, file: Path) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    return row


def _sample(row: Mapping[str, Any], texts: Texts, detailed: bool) -> dict[str, Any]:
    """Return a row as the page has it; ``detailed``: with its tokens."""
    sample: dict[str, Any] = {name: row[name] for name in _KEPT if name in row}
    sample |= {name: round(row[name], 4) for name in _MEANS if name in row}
    sample |= {name: str(row[name])[:MAX_CHARACTERS] for name in ("prompt", "response")}
    tokens = row.get("tokens") if detailed else None
    if tokens:
        columns: dict[str, Any] = {"t": [texts.number_of(text) for text in tokens["text"]]}
        columns |= {short: tokens[name] for short, name in (("s", "student"), ("h", "teacher")) if name in tokens}
        if "top" in tokens:
            columns["k"] = [[[texts.number_of(text), p] for text, p in position] for position in tokens["top"]]
        sample["tokens"] = columns
    return sample
