"""``results/RUN_SET_N.json``: what the trained student scored on each question, so that runs can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gkd.evaluation.questions import number_repeated
from gkd.evaluation.results import Results
from gkd.evaluation.scores import means
from gkd.types import Prompt

Scores = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SetScores:
    """Scores of the set ``name`` with ``samples`` answers to a question, by question; and ``groups`` by difficulty."""

    name: str
    samples: int
    questions: Mapping[str, Scores]
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def key_by_question(prompts: Sequence[Prompt], scores: Mapping[int, Scores]) -> dict[str, Scores]:
    """Return scores by what is asked, the same in every run, instead of by the number of the prompt."""
    scored = [prompt for prompt in prompts if prompt.id in scores]
    return {key: scores[prompt.id] for key, prompt in zip(number_repeated(scored), scored, strict=True)}


def write_scores(sets: Iterable[SetScores], output: Path) -> None:
    """Write a file for each set. Raises OSError.

    A question has the scores that could be measured of it; a set without any has no file.
    """
    for val_set in sets:
        values = {key: dict(scores) for key, scores in val_set.questions.items() if scores}
        if not values:
            continue
        directory = output / "results"
        directory.mkdir(exist_ok=True)
        name, mean = output.absolute().name, means(list(values.values()))
        Results(name, val_set.name, len(values), val_set.samples, mean, values, groups=val_set.groups).write(directory)
