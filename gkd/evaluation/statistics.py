"""Scores of one model on one set of questions, each with its standard error over questions.

Samples of one question are not independent measurements of the model, questions are: every score is a mean over
questions of one value a question, and its standard error is that of this mean ("Adding Error Bars to Evals",
arXiv:2411.00640, section 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gkd.observability.metrics import Z_95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over questions, its standard error and the ends of its 95 % interval; None where one question gives none.

    The interval is ``value`` plus and minus 1.96 standard errors; of shares it may reach beyond 0 and 1, and it has no
    width where all questions agree, which few questions do by chance.
    """

    value: float
    stderr: float | None
    low: float | None
    high: float | None

    def text(self) -> str:
        """Format as ``0.712 ± 0.031``, half the interval's width after the value."""
        return f"{self.value:z.3f}" if self.stderr is None else f"{self.value:z.3f} ± {Z_95 * self.stderr:.3f}"


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of one value a question, with standard error and 95 % interval. Raises ValueError for none."""
    if not values:
        raise ValueError("a mean needs at least one question")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Estimate(mean, None, None, None)
    stderr = float(np.std(np.asarray(values, dtype=np.float64), ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, stderr, mean - Z_95 * stderr, mean + Z_95 * stderr)


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of ``k`` samples is right, from ``right`` of ``n`` samples.

    1 - C(n - right, k) / C(n, k), equation 1 of "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374).
    Raises ValueError unless 1 <= k <= n and 0 <= right <= n.
    """
    if not (1 <= k <= n and 0 <= right <= n):
        raise ValueError(f"pass@{k} of {right} right ones among {n} samples: k has to be 1 to {n}")
    if n - right < k:
        return 1.0
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def classes_of(answers: Sequence[str | None], same: Callable[[str, str], bool]) -> list[list[int]]:
    """Return which answers agree, as lists of positions in the order of their first; None agrees with nothing.

    An answer belongs to the first class whose first answer is the ``same``; an equal text is compared once.
    """
    classes: dict[str, list[int]] = {}  # by their first answers
    class_of: dict[str, list[int]] = {}  # by every text
    for place, answer in enumerate(answers):
        if answer is None:
            continue
        if answer not in class_of:
            first = next((first for first in classes if same(first, answer)), answer)
            class_of[answer] = classes.setdefault(first, [])
        class_of[answer].append(place)
    return list(classes.values())


def majority(answers: Sequence[str | None], same: Callable[[str, str], bool]) -> list[int]:
    """Return the position of the answer that most agree on, one for each of those that tie; empty without answers."""
    classes = classes_of(answers, same)
    most = max((len(members) for members in classes), default=0)
    return [members[0] for members in classes if len(members) == most]


def majority_score(scores: Sequence[float], answers: Sequence[str | None], same: Callable[[str, str], bool]) -> float:
    """Return the score of the majority's answer (maj@k, arXiv:2203.11171), averaged over answers that tie.

    0 where no sample states an answer.
    """
    winners = majority(answers, same)
    return math.fsum(scores[place] for place in winners) / len(winners) if winners else 0.0
