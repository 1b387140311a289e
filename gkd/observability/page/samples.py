"""Which of a run's samples the page has: steps at even distances, whole, within bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from gkd.config.output_files import parse
from gkd.errors import ConfigError, describe_error

MAX_SAMPLES = 2_000
MAX_TOKENS = 100_000
"""Tokens with log-probabilities, some 60 bytes each, of all samples of a page."""
MAX_CHARACTERS = 20_000
"""Of one prompt or response."""

_STEP = re.compile(rb'^\{"step": (\d+),')
_KEPT = ("step", "answer", "finish_reason", "version", "prompt_id", "index", "length", "reward", "rewards")
_MEANS = ("logprob_mean", "teacher_logprob_mean")


class Texts(dict[str, int]):
    """Texts of tokens, each once and at its number, which samples have; one that is asked for is added."""

    def __missing__(self, text: str) -> int:
        return self.setdefault(text, len(self))


def read_samples(file: Path, texts: Texts, share: int = 1) -> list[dict[str, Any]]:
    """Return samples for the page, of which ``share`` runs share the bounds; none where there is no file.

    Of all steps those at even distances are taken, the first and the last among them, with all of their samples. Raises
    ConfigError for a line that is no sample.
    """
    if not file.exists():
        return []
    try:
        return _describe_rows(_read_evenly(file, max(1, MAX_SAMPLES // share)), texts, MAX_TOKENS / share)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} holds what is no sample: {describe_error(error)}") from None


def _describe_rows(rows: Sequence[Mapping[str, Any]], texts: Texts, most_tokens: float) -> list[dict[str, Any]]:
    """Return rows as the page has them, as many steps at even distances with their tokens as are within the bound."""
    by_step = [list(group) for _, group in groupby(rows, key=lambda row: row["step"])]
    sizes = [sum(len(row.get("tokens", {}).get("text", ())) for row in group) for group in by_step]
    part = min(1.0, most_tokens / max(1, sum(sizes)))
    samples = []
    for number, group in enumerate(by_step):
        back = len(by_step) - 1 - number  # from the last step, whose samples always have their tokens
        detailed = math.floor(back * part) > math.floor((back - 1) * part)
        samples += [_sample(row, texts, detailed) for row in group]
    return samples


def _read_evenly(file: Path, most: int) -> list[dict[str, Any]]:
    """Read the lines of evenly chosen steps, without holding the others."""
    places: list[tuple[int, int]] = []  # of each step and where its lines begin, of which there may be millions
    with file.open("rb") as lines:
        n_rows, position, last = 0, 0, b""
        for number, line in enumerate(lines, 1):
            if not (last and line.startswith(last)) and line.endswith(b"\n"):
                if not (match := _STEP.match(line)):
                    raise ConfigError(f"{file} line {number} is no sample")
                last = match[0]
                places.append((int(match[1]), position))
            n_rows, position = n_rows + line.endswith(b"\n"), position + len(line)
        steps = list(dict.fromkeys(step for step, _ in places))
        n = max(1, min(len(steps), most * len(steps) // max(1, n_rows)))
        # From the last one on, which is the one where there is room for no other.
        chosen_steps = {steps[-1 - round(i * (len(steps) - 1) / max(1, n - 1))] for i in range(n)} if steps else set()
        rows: list[dict[str, Any]] = []
        for step, position in places:
            lines.seek(position)
            while step in chosen_steps and len(rows) < most and _is_of(line := lines.readline(), step):
                rows.append(parse(line))
    return rows


def _is_of(line: bytes, step: int) -> bool:
    """Return whether a line is whole, and a sample of a step."""
    return line.endswith(b"\n") and line.startswith(b'{"step": %d,' % step)


def _cut(text: str) -> str:
    more = len(text) - MAX_CHARACTERS
    return text if more <= 0 else f"{text[:MAX_CHARACTERS]}\u2026 {more:,} more characters"


def _sample(row: Mapping[str, Any], texts: Texts, detailed: bool) -> dict[str, Any]:
    """Return a row as the page has it; ``detailed``: with its tokens."""
    sample: dict[str, Any] = {name: row[name] for name in _KEPT if name in row}
    sample |= {name: round(row[name], 4) for name in _MEANS if name in row}
    sample |= {name: _cut(str(row[name])) for name in ("prompt", "response")}
    tokens = row.get("tokens") if detailed else None
    if tokens:
        columns: dict[str, Any] = {"t": [texts[text] for text in tokens["text"]]}
        columns |= {short: tokens[name] for short, name in (("s", "student"), ("h", "teacher")) if name in tokens}
        if "top" in tokens:
            columns["k"] = [[[texts[text], p] for text, p in position] for position in tokens["top"]]
        sample["tokens"] = columns
    return sample
