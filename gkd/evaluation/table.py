"""The scores of an evaluation as a table: a row for each model, set, strategy and difficulty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from gkd.evaluation.results import Results
from gkd.evaluation.statistics import Estimate
from gkd.observability.progress import print_table

COUNTED = ("cost", "iterations")
PLAIN_NUMBERS = (*COUNTED, "length")
LEFT_OUT = ("avg@",)
"""What another column shows as well."""


def show(results: Sequence[Results], out: Console) -> None:
    """Print the table: means over questions, and after ± half of the 95 % interval.

    Cost and iterations are what several strategies differ in; of a single one that counts tokens, as the plain
    one does, the length shows it all.
    """
    names = list(dict.fromkeys(name for result in results for name in result.scores if not name.startswith(LEFT_OUT)))
    several = len({result.strategy for result in results}) > 1
    if not several and all(result.scores.get("cost") == result.scores.get("length") for result in results):
        names = [name for name in names if name not in COUNTED]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("set", "model", "questions"):
        table.add_column(heading, justify="right" if heading == "questions" else "left")
    for name in (*names, "tok/s"):
        table.add_column(name, justify="right")
    for result in results:
        speed = "" if result.tokens_per_second is None else f"{result.tokens_per_second:,.0f}"
        n = f"{result.n:,}" + (f" x {result.samples}" if result.samples > 1 else "")
        table.add_row(result.set, result.name, n, *_cells(result.scores, names), speed)
        for difficulty, group in result.groups.items():
            table.add_row("", f"  {difficulty}", f"{group['n']:,}", *_cells(_estimates(group["scores"]), names), "")
    print_table(out, table)


def _estimates(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Estimate]:
    return {name: Estimate(**parts) for name, parts in scores.items()}


def _cells(scores: Mapping[str, Estimate], names: Sequence[str]) -> list[str]:
    return [_cell(name, scores[name]) if name in scores else "" for name in names]


def _cell(name: str, score: Estimate) -> str:
    return f"{score.value:.1f}" if name in PLAIN_NUMBERS else score.text()
