"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30  # not gkd.config's, which imports pydantic: the doctor reports where that is missing

Level = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """Result of one check: its subject, what was observed, and, unless that is ok, what to do."""

    level: Level
    subject: str
    observation: str
    do: str = ""

    def __str__(self) -> str:
        advice = f" -> {self.do}" if self.do else ""
        return f"{self.level:8} {self.subject:14} {self.observation}{advice}"


def confirm(subject: str, observation: str) -> Finding:
    """Return that there is nothing to do."""
    return Finding("ok", subject, observation)


def warn(subject: str, observation: str, do: str) -> Finding:
    """Return that runs work, but worse, or not all of them."""
    return Finding("warning", subject, observation, do)


def fail(subject: str, observation: str, do: str) -> Finding:
    """Return that runs do not work."""
    return Finding("failed", subject, observation, do)
