"""``results/RUN_SET_N.json``: what the trained student scored on each question, so that runs can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gkd.evaluation.questions import number_repeated
from gkd.evaluation.results import Results
from gkd.evaluation.scores import means
from gkd.types import Prompt

Scores = Mapping[str, float]


def key_by_question(prompts: Sequence[Prompt], scores: Mapping[int, Scores]) -> dict[str, Scores]:
    """Return scores by what is asked, the same in every run, instead of by the number of the prompt."""
    scored = [prompt for prompt in prompts if prompt.id in scores]
    return {key: scores[prompt.id] for key, prompt in zip(number_repeated(scored), scored, strict=True)}


def write_scores(sets: Iterable[tuple[str, int, Mapping[str, Scores]]], output: Path) -> None:
    """Write a file for each set: its name, samples of a question, and every question's scores. Raises OSError.

    A question has the scores that could be measured of it; a set without any has no file.
    """
    for name, n_samples, questions in sets:
        values = {key: dict(own) for key, own in questions.items() if own}
        if not values:
            continue
        directory = output / "results"
        directory.mkdir(exist_ok=True)
        mean = means(list(values.values()))
        Results(output.absolute().name, name, len(values), n_samples, mean, values).write(directory)
