"""Which columns the table of an evaluation has."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from gkd.evaluation.results import Results
from gkd.evaluation.statistics import Estimate
from gkd.evaluation.table import show


def result(strategy: str, cost: float, iterations: float, length: float) -> Results:
    """Make the scores of a strategy."""
    values = {"accuracy": 0.5, "cost": cost, "iterations": iterations, "length": length}
    scores = {name: Estimate(value, 0.0, value, value) for name, value in values.items()}
    return Results("student", "sums", 4, 1, scores, {}, strategy)


def table(*results: Results) -> list[list[str]]:
    """Return the cells of the printed table, row by row."""
    out = StringIO()
    show(results, Console(file=out, width=200))
    return [line.split() for line in out.getvalue().splitlines()]


def test_several_strategies_have_their_cost_and_iterations_side_by_side() -> None:
    """Also where both cost the tokens that were sampled, as those that come with gkd do."""
    head, first, second = table(result("adaptive", 12.0, 2.5, 12.0), result("fixed_k", 30.0, 4.0, 30.0))
    assert head[:6] == ["set", "model", "questions", "accuracy", "cost", "iterations"]
    assert (first[1:3], first[-3:-1]) == (["student", "adaptive"], ["12.0", "2.5"])
    assert (second[1:3], second[-3:-1]) == (["student", "fixed_k"], ["30.0", "4.0"])


@pytest.mark.parametrize(("cost", "shown"), [(7.0, False), (8.0, True)])
def test_one_strategy_has_them_where_its_cost_is_not_its_length(cost: float, shown: bool) -> None:
    head, _ = table(result("plain", cost, 1.0, 7.0))
    assert ("cost" in head) == ("iterations" in head) == shown
