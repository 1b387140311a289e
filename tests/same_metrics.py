"""Whether two runs of equal seeds computed the same: their metrics.jsonl, figure by figure.

python -m tests.same_metrics RUN RUN

Prints what they have in common, and every name that differs with the first step at which it does; ends with 1 where
any does. What depends on the clock is left out: timing_s/*, perf/*, memory/* and the rewards' seconds.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from gkd.config.output_files import METRICS, read_whole_lines
from gkd.errors import ConfigError, catch_errors

OF_THE_CLOCK = re.compile(r"(?:timing_s|perf|memory)/.*|reward/.*/seconds")


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """Return what a row has that equal seeds make equal."""
    return {name: value for name, value in row.items() if not OF_THE_CLOCK.fullmatch(name)}


def compare(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> tuple[int, dict[str, str]]:
    """Return how many figures are equal, and of each name that differs where it first does and both its values."""
    n_equal, differing = 0, dict[str, str]()
    for place, (row, other) in enumerate(zip_longest(map(figures, rows), map(figures, others), fillvalue={})):
        for name in row | other:
            if name in row and name in other and repr(row[name]) == repr(other[name]):  # nan is equal to itself
                n_equal += 1
            else:
                differing.setdefault(name, f"row {place}: {row.get(name, 'none')} and {other.get(name, 'none')}")
    return n_equal, differing


def main(arguments: Sequence[str]) -> int:
    """Run the program; returns its exit code. Raises ConfigError for what are not two runs with metrics."""
    if len(arguments) != 2:
        raise ConfigError("expected the directories of two runs")
    rows, others = (read_whole_lines(Path(run) / METRICS) for run in arguments)
    for run, its in zip(arguments, (rows, others), strict=True):
        if not its:
            raise ConfigError(f"{run}: it has no {METRICS} with any row")
    n_equal, differing = compare(rows, others)
    print(f"{n_equal:,} figures of {len(rows)} and {len(others)} rows are equal, {len(differing)} names differ")
    for name, first in differing.items():
        print(f"{name}  {first}")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(catch_errors(lambda: main(sys.argv[1:])))
