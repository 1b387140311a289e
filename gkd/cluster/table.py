"""The assignment for people: a table, and one line of ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from rich.box import SIMPLE
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from gkd.cluster.report import Report


def print_table(reports: Sequence[Report], file: IO[str] | None = None) -> None:
    """Print one row a worker; rows are never wrapped, so that they can be read and grepped in a log file too."""
    table = Table(box=SIMPLE, pad_edge=False)
    for title in ("group", "rank", "node", "pid", "CUDA_VISIBLE_DEVICES", "ray ids", "UUID"):
        table.add_column(title, no_wrap=True, overflow="ignore")
    for r in reports:
        ids, uuids = ",".join(r.ray_gpu_ids), ",".join(r.gpu_uuids)
        table.add_row(r.group, str(r.rank), r.node, str(r.pid), r.cuda_visible_devices, ids, uuids)
    console = Console(file=file, highlight=False, markup=False)
    wanted = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    console.width = max(console.width, wanted)
    console.print(table)


def assignment_line(reports: Sequence[Report]) -> str:
    """``GPU Assignments: ['0', '1', ...]`` in the order of the reports."""
    return f"GPU Assignments: {[gpu for report in reports for gpu in report.ray_gpu_ids]}"
