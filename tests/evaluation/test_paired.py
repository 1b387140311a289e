"""The paired test against all signs, against chance, and against its closed forms."""

from __future__ import annotations

import tracemalloc
from itertools import product

import numpy as np
import pytest

from gkd.evaluation.paired import (
    EXACT,
    FLIPS,
    MOST_SIGNS,
    SEED,
    compare_paired,
    count_needed_questions,
    holm,
    sign_flip_p,
)


def brute_force(differences: list[float]) -> float:
    observed = abs(sum(differences))
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in product((-1, 1), repeat=len(differences))
    ]
    return sum(s >= observed - 1e-12 for s in sums) / len(sums)


@pytest.mark.parametrize("seed", range(4))
def test_small_sets_try_every_sign(seed: int) -> None:
    differences = np.random.default_rng(seed).choice([-1, -0.25, 0, 0.25, 0.5], 9).tolist()
    assert sign_flip_p(differences) == pytest.approx(brute_force(differences), abs=1e-12)


def test_random_signs_come_near_all_signs() -> None:
    differences = [1.0] * 13 + [-1.0] * (EXACT + 1 - 13 + 3)  # 18 that differ: a binomial tail
    n, up = len(differences), 13
    from math import comb

    tail = 2 * sum(comb(n, i) for i in range(up, n + 1)) / 2**n
    p_value = sign_flip_p(differences)
    assert p_value == pytest.approx(tail, abs=0.01)
    assert p_value == sign_flip_p(differences)  # a fixed seed


def test_many_questions_take_no_more_memory_and_the_same_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against all signs of a seed drawn at once, also where one row of them is more than is held at a time."""
    values = np.random.default_rng(3).normal(0.02, 1.0, 151)
    signs = 2.0 * np.random.default_rng(SEED).integers(0, 2, size=(FLIPS, len(values))) - 1.0
    hits = int(np.sum(np.abs(signs @ values) >= abs(values.sum())))
    for most in (MOST_SIGNS, 7 * 151 + 1, 1):
        monkeypatch.setattr("gkd.evaluation.paired.MOST_SIGNS", most)
        assert sign_flip_p(values.tolist()) == (1 + hits) / (1 + FLIPS)
    monkeypatch.undo()
    monkeypatch.setattr("gkd.evaluation.paired.FLIPS", 1_000)
    tracemalloc.start()
    try:
        sign_flip_p(np.random.default_rng(4).normal(0.0, 1.0, 20_000).tolist())
        assert tracemalloc.get_traced_memory()[1] < 40 * MOST_SIGNS
    finally:
        tracemalloc.stop()


def test_questions_on_which_both_agree_change_nothing() -> None:
    assert sign_flip_p([0.0] * 50) == 1.0
    assert sign_flip_p([1.0, 1.0, 1.0, 1.0, 1.0]) == sign_flip_p([1.0] * 5 + [0.0] * 500) == 2 / 32


def test_alike_models_are_told_apart_in_one_of_twenty_cases() -> None:
    random = np.random.default_rng(1)
    p_values = [compare_paired(*random.integers(0, 2, (2, 40)).tolist()).p for _ in range(200)]
    assert np.mean(np.array(p_values) <= 0.05) <= 0.09


def test_the_difference_is_the_second_less_the_first_and_pairs_cancel_difficulty() -> None:
    comparison = compare_paired([0.0, 0.5, 1.0], [0.25, 0.75, 1.25])
    assert comparison.difference.value == pytest.approx(0.25)
    assert comparison.difference.stderr == pytest.approx(0.0)
    with pytest.raises(ValueError, match="zip"):
        compare_paired([0.0], [1.0, 1.0])


def test_as_many_questions_as_needed_find_the_difference_in_four_of_five_cases() -> None:
    random = np.random.default_rng(2)
    pilot = random.normal(0.3, 1.0, 4000).tolist()
    needed = count_needed_questions(pilot)
    assert needed is not None
    assert needed == pytest.approx((2.8015 / 0.3) ** 2, rel=0.15)
    detections = [sign_flip_p(random.normal(0.3, 1.0, needed).tolist()) < 0.05 for _ in range(100)]
    assert 0.7 <= np.mean(detections) <= 0.9
    assert count_needed_questions([0.0, 1.0, -1.0]) is None
    assert count_needed_questions([1.0] * 3 + [0.0] * 7) == 21  # (2.8016 / 0.3)^2 * 0.21 * 10 / 9 is 20.3
    assert sign_flip_p([1.0] * 5) > 0.05 > sign_flip_p([1.0] * 6)
    assert count_needed_questions([1.0] * 5) == 6  # no test of fewer can say it


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_rounding_is_no_difference_that_more_questions_would_show() -> None:
    """As of shares of three samples."""
    paired = compare_paired([2 / 3, 1 / 3, 0.0], [1.0, 0.0, 0.0])
    assert paired.difference.value != 0.0 and (paired.p, paired.needed) == (1.0, None)
    tenths = [-3, -2, 2, 1, 3, 1]
    assert sign_flip_p([number / 10 for number in tenths]) == sign_flip_p(tenths)
