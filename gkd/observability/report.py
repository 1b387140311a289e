"""The end of a run: a table on the terminal and summary.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gkd.config.output_files import SUMMARY, find_fault, parse, read_json
from gkd.durable import replace
from gkd.errors import ConfigError
from gkd.version import __version__

ValMetrics = Mapping[str, float]
MEASURED = ("before", "after", "teacher")
"""What summary.json has figures of."""
SUMMARIZED: dict[str, type] = {"steps": int, "wall_s": float, "n_val": int, **dict.fromkeys(MEASURED, dict)}
"""What summary.json has."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Result of a run: val/* metrics of the student before and after and of the teacher, and what training took.

    ``n_val``: questions that ``val/accuracy`` is the share of.
    """

    before: ValMetrics
    after: ValMetrics
    teacher: ValMetrics
    steps: int
    wall_s: float
    n_val: int = 0
    version: str = __version__


def write(summary: Summary, output_dir: Path) -> None:
    """Write summary.json."""
    text = json.dumps(asdict(summary), indent=2, allow_nan=False)
    replace(output_dir / SUMMARY, f"{text}\n".encode())


def read(output_dir: Path) -> Summary:
    """Read summary.json; what only other versions write is left out. Raises ConfigError where it cannot be read."""
    file = output_dir / SUMMARY
    content = {"n_val": 0} | read_json(file, dict)  # which earlier versions did not write
    fault = find_fault(content, SUMMARIZED)
    for when in MEASURED:
        fault = fault or find_fault(content[when], dict.fromkeys(content[when], float))
    if fault:
        raise ConfigError(f"{file} cannot be read: {fault}")
    names = {field.name for field in fields(Summary)}
    return Summary(**{name: value for name, value in content.items() if name in names})


def steps_done(output_dir: Path) -> int | None:
    """Return the steps of a run that has ended, by summary.json; None of one that has not."""
    try:
        return int(parse((output_dir / SUMMARY).read_bytes())["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def show(summary: Summary, output_dir: Path, page: Path | None, following: str, out: Console) -> None:
    """Print figures before and after, and a teacher's, where the run and its ``page`` are, and the next command."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    columns = {"before": summary.before, "after": summary.after}
    if summary.teacher:
        columns["teacher"] = summary.teacher
    for heading in columns:
        table.add_column(heading, justify="right")
    for name in dict.fromkeys(name for values in columns.values() for name in values):
        table.add_row(name, *(f"{values[name]:z.4f}" if name in values else "" for values in columns.values()))
    out.print()
    out.print(table)
    steps = f"{summary.steps} step{'s' * (summary.steps != 1)}"
    out.print(f"\n{steps} in {summary.wall_s:.0f} s; the run is in {output_dir}")
    out.print(f"the trained student is in {output_dir / 'model'}")
    if page is not None:
        out.print(f"its report: {page}")
    out.print(f"next: {following}")
