"""``results/MODEL_SET_N.json``: scores of one model on one set, and those of each question, for comparisons."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gkd import durable
from gkd.config.evaluation import DEFAULT_STRATEGY
from gkd.errors import ConfigError
from gkd.evaluation.statistics import Estimate


@dataclass(frozen=True)
class Results:
    """Scores of one model on one set of ``n`` questions with ``samples`` answers each.

    ``scores`` are means over questions, by name. ``questions``: by a question's key, its own values of the same
    names. ``groups``: scores of the questions of one difficulty, by its value, with ``n`` beside them.
    """

    model: str
    set: str
    n: int
    samples: int
    scores: Mapping[str, Estimate]
    questions: Mapping[str, Mapping[str, float]]
    strategy: str = DEFAULT_STRATEGY
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    tokens_per_second: float | None = None

    @property
    def name(self) -> str:
        """The model as tables call it, with its strategy where that is not the plain one."""
        return self.model if self.strategy == DEFAULT_STRATEGY else f"{self.model} {self.strategy}"

    def write(self, directory: Path) -> Path:
        """Write the file into ``directory``, whole or not at all; returns its path. Raises OSError."""
        path = directory / name_file(self.model, self.strategy, self.set, self.n)
        durable.replace(path, (json.dumps(asdict(self), indent=1) + "\n").encode())
        return path


def name_file(model: str, strategy: str, name: str, n: int) -> str:
    """Return ``MODEL_SET_N.json`` of the set ``name``, or ``MODEL.STRATEGY_SET_N.json``.

    Characters that paths do not take become a dash.
    """
    named = model if strategy == DEFAULT_STRATEGY else f"{model}.{strategy}"
    return f"{file_safe(named)}_{file_safe(name)}_{n}.json"


def file_safe(name: str) -> str:
    """Return a name as part of a file's name."""
    return re.sub(r"[^\w.+-]+", "-", name).strip("-") or "unnamed"


def read_results(path: Path) -> Results:
    """Read a file that :meth:`Results.write` wrote. Raises ConfigError, in one line, for anything else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; gkd evaluate writes such files into results/") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is not JSON; a file that gkd evaluate wrote into results/ is expected") from None
    try:
        scores = {str(name): Estimate(**parts) for name, parts in values["scores"].items()}
        questions = {
            str(key): {str(name): _number(value) for name, value in question_scores.items()}
            for key, question_scores in values["questions"].items()
        }
        values |= {"scores": scores, "questions": questions}
        results = Results(**{name: values[name] for name in Results.__dataclass_fields__ if name in values})
        if not (isinstance(results.model, str) and isinstance(results.set, str) and isinstance(results.strategy, str)):
            raise TypeError("model, set and strategy are names")
        return results
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        raise ConfigError(f"{path} holds no results of gkd evaluate: model, set, n, scores and questions") from None


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no score")
    return float(value)
