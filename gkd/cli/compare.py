"""``gkd compare A.json B.json``: is the second model better than the first on the same questions, or was it chance?

Takes files of results, directories of them, runs and sweeps. Every model is compared with the
first one on each set that both answered: the mean difference a question with its 95 % interval, the p-value of a
paired sign-flip permutation test, the same corrected for all comparisons (Holm), and how many questions would show
such a difference.
Exit code 2: these cannot be compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gkd.errors import ConfigError, Parser, end_with_reader, entry_point  # imports nothing that may be missing

if TYPE_CHECKING:
    from rich.console import Console

    from gkd.evaluation.comparison import Comparison
    from gkd.evaluation.results import Results


@entry_point
def main(arguments: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    parser = Parser("gkd compare", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results/MODEL_SET_N.json, or a directory")
    parser.add_argument("--score", default="accuracy", metavar="NAME", help="what is compared (accuracy)")
    parser.add_argument("--baseline", metavar="MODEL", help="compare with this one instead of the first")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write what the table shows")
    options = parser.parse_args(arguments)
    from gkd.evaluation.comparison import compare_all, read_all
    from gkd.observability.progress import console

    out = console()
    report = partial(out.print, soft_wrap=True)
    rows = compare_all(read_all(options.files, report), options.score, options.baseline, report)
    if options.json is not None:
        try:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {options.json}: {error.strerror}") from None
    with end_with_reader():
        show(rows, out)
    return 0


def show_each_score(results: Sequence[Results], out: Console) -> None:
    """Compare what was measured just now with the first model, each set by what it has, and print a table for each.

    What cannot be compared is reported: it is measured and written all the same.
    """
    from gkd.evaluation.comparison import compare_all, group_by_score

    report = partial(out.print, soft_wrap=True)
    for score, measured in group_by_score(results).items():
        out.print()
        try:
            show(compare_all(measured, score, report=report), out)
        except ConfigError as error:
            report(f"not compared: {error}")


def show(rows: Sequence[Comparison], out: Console) -> None:
    """Print a table, and below it what one may conclude."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    numbers = {one: {row.paired.n for row in rows if row.set == one} for one in {row.set for row in rows}}
    counted = any(len(sizes) > 1 for sizes in numbers.values())  # where a table without them would mislead
    for heading in ("set", "model"):
        table.add_column(heading, overflow="fold")
    for heading in (*["n"] * counted, rows[0].score, "difference", "p", "p (Holm)", "needed"):
        table.add_column(heading, justify="right", no_wrap=True)
    shown = None
    for row in rows:
        n = [f"{row.paired.n:,}"] * counted
        baseline = [row.set, row.first, *n, f"{row.values[0]:z.3f}"]
        if baseline != shown:  # by the questions in common with the model below, which may be others for the next one
            table.add_row(*baseline)
            shown = baseline
        needed = "" if row.paired.needed is None else f"{row.paired.needed:,}"
        p, corrected = (_p(value) for value in (row.paired.p, row.holm_p))
        table.add_row(row.set, row.second, *n, f"{row.values[1]:z.3f}", _format_difference(row), p, corrected, needed)
    out.print(table)
    for row in rows:
        out.print(_verdict(row), soft_wrap=True)


def _format_difference(row: Comparison) -> str:
    low, high = row.paired.difference.low, row.paired.difference.high
    assert low is not None and high is not None, "two questions or more are compared"
    return f"{row.paired.difference.value:+z.3f} ({low:+z.3f} to {high:+z.3f})"


def _verdict(row: Comparison) -> str:
    """Describe in a line what the comparison shows."""
    difference, n = row.paired.difference.value, row.paired.n
    are = "question that lacks {} of one model is" if row.n_left_out == 1 else "questions that lack {} of one model are"
    left_out = f"; {row.n_left_out:,} {are.format(row.score)} left out" if row.n_left_out else ""
    name = f"{row.set}: {row.second}"
    if row.holm_p < 0.05:
        word = "higher" if difference > 0 else "lower"
        return (
            f"{name} has a {word} {row.score} than {row.first} (p {_format_p(row.holm_p)}, {n:,} questions){left_out}"
        )
    needed = row.paired.needed
    more = "" if needed is None or needed <= n else f"; about {needed:,} questions would show such a difference"
    return (
        f"{name} and {row.first} cannot be told apart with {n:,} questions (p {_format_p(row.holm_p)}){more}{left_out}"
    )


def _p(value: float) -> str:
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def _format_p(p: float) -> str:
    return _p(p) if p < 0.0001 else f"= {_p(p)}"
