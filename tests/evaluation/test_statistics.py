"""Scores against sums over all subsets, and errors that count questions, not samples."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from gkd.evaluation.statistics import classes_of, estimate, majority, majority_score, pass_at_k


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int) -> None:
    for right in range(n + 1):
        marks = [1] * right + [0] * (n - right)
        for k in range(1, n + 1):
            subsets = list(combinations(marks, k))
            assert pass_at_k(n, right, k) == pytest.approx(sum(map(max, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(("n", "right", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1)])
def test_pass_at_k_of_more_than_there_is(n: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="1 to 4"):
        pass_at_k(n, right, k)


def test_pass_at_k_is_exact_for_many_samples() -> None:
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5, abs=1e-12)


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        difficulty = random.uniform(0, 1, 200)  # of each question; 8 samples of one are alike in it
        values = random.binomial(8, difficulty) / 8
        mean = estimate(values.tolist())
        assert mean.low is not None and mean.high is not None
        covered += mean.low <= 0.5 <= mean.high
    assert 0.92 <= covered / 400 <= 0.98


def test_standard_error_is_of_questions_not_of_samples() -> None:
    once = estimate([0.0, 1.0, 1.0, 0.0])
    assert once.value == 0.5
    assert once.stderr == pytest.approx(math.sqrt(1 / 3) / 2)  # sample deviation sqrt(4 * 0.25 / 3) over sqrt(4)
    assert once.high == pytest.approx(0.5 + 1.96 * math.sqrt(1 / 3) / 2, abs=1e-4)


def test_one_question_has_no_error() -> None:
    mean = estimate([1.0])
    assert (mean.value, mean.stderr, mean.low, mean.high) == (1.0, None, None, None)
    with pytest.raises(ValueError, match="at least"):
        estimate([])


def same(first: str, second: str) -> bool:
    return float(first) == float(second)


def test_majority_counts_answers_that_mean_the_same() -> None:
    assert classes_of(["2", None, "2.0", "3", None], same) == [[0, 2], [3]]
    assert majority(["3", "2", "2.0"], same) == [1]
    assert majority_score([0.0, 1.0, 1.0], ["3", "2", "2.0"], same) == 1.0


def test_each_pair_of_different_answers_is_compared_once() -> None:
    """A comparison of two formulas takes tens of milliseconds."""
    pairs: list[tuple[str, str]] = []

    def record(first: str, second: str) -> bool:
        pairs.append((first, second))
        return same(first, second)

    answers = ["1", "2", "2.0", "3"] * 16
    assert classes_of(answers, record) == [
        list(range(0, 64, 4)),
        sorted([*range(1, 64, 4), *range(2, 64, 4)]),
        list(range(3, 64, 4)),
    ]
    assert len(pairs) == len(set(pairs)) == 1 + 2 + 2


def test_majority_of_ties_is_their_mean_and_of_nothing_zero() -> None:
    assert majority_score([1.0, 0.0, 0.0], ["2", "3", None], same) == 0.5
    assert majority_score([1.0, 1.0], [None, None], same) == 0.0
