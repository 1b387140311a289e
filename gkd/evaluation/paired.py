"""Is one model better than another on the same questions, or was it chance? How many questions would show it?

What a question has in common for both models, above all how hard it is, cancels in the difference of their scores on
it; so differences show more than two intervals side by side (arXiv:2411.00640, section 4.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gkd.evaluation.statistics import Estimate, estimate

EXACT = 14
"""Questions that differ up to which all 2 ** n signs are tried."""
FLIPS = 20_000
MOST_SIGNS = 1 << 20
"""Random signs that are held at a time, 24 bytes each; in however many parts they are drawn, they are the same."""
FEWEST = 6
"""Questions below which no difference has a p-value under 5 %: 2 / 2 ** 5 is 0.0625."""
SEED = 0
ROUNDING = 1e-9
"""Part of the differences, without their signs, below which a sum of them is none."""
Z_POWER = 1.959963984540054 + 0.8416212335729143
"""Sum of the normal quantiles of a two-sided level of 5 % and a power of 80 %."""


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The difference of two models on ``n`` questions that both answered: the second's mean less the first's.

    ``p``: chance of a mean difference at least as large, either way, if both were alike. ``needed``: questions with
    which a difference of this size is found at the 5 % level in 80 % of cases; None for no difference.
    """

    n: int
    difference: Estimate
    p: float
    needed: int | None


def compare_paired(first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    """Compare one value a question of each model, in the same order. Raises ValueError for none or unequal numbers."""
    differences = [b - a for a, b in zip(first, second, strict=True)]
    difference = estimate(differences)
    return PairedDifference(len(differences), difference, sign_flip_p(differences), count_needed_questions(differences))


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of a mean difference by the paired permutation test.

    If both models are alike, every difference could as well have the other sign. All signs are tried where at most
    :data:`EXACT` questions differ, otherwise :data:`FLIPS` random ones of a fixed seed, with (1 + hits) / (1 + flips),
    which is never 0 (Phipson and Smyth 2010).
    """
    values = np.array([d for d in differences if d != 0.0], dtype=np.float64)
    if not len(values):
        return 1.0
    observed = abs(float(values.sum()))
    least = observed - ROUNDING * float(np.abs(values).sum())  # sums in another order are other sums
    if len(values) <= EXACT:
        codes = np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1
        return float(np.mean(np.abs((2.0 * codes - 1.0) @ values) >= least))
    random, hits = np.random.default_rng(SEED), 0
    n_rows = max(1, MOST_SIGNS // len(values))
    for done in range(0, FLIPS, n_rows):
        signs = 2.0 * random.integers(0, 2, size=(min(n_rows, FLIPS - done), len(values))) - 1.0
        hits += int(np.sum(np.abs(signs @ values) >= least))
    return (1 + hits) / (1 + FLIPS)


def count_needed_questions(differences: Sequence[float]) -> int | None:
    """Return how many questions would show a mean difference of this size; None where there is none to show.

    ((1.96 + 0.84) * standard deviation / mean) ** 2, equation 9 of arXiv:2411.00640 for the questions' differences as
    they were measured.
    """
    mean = math.fsum(differences) / len(differences)
    rounding = ROUNDING * math.fsum(map(abs, differences)) / len(differences)  # 1 - 2/3 - 1/3 is not 0
    if abs(mean) <= rounding or len(differences) < 2:
        return None
    deviation = float(np.std(np.asarray(differences, dtype=np.float64), ddof=1))
    return max(FEWEST, math.ceil((Z_POWER * deviation / mean) ** 2))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm 1979): each may be compared with 5 % by itself."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected
