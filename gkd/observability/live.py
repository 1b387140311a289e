"""What the monitor shows of a run: curves of a few characters, stages, the last warnings, a sample."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gkd.cluster.health.queues import Queues
from gkd.config.output_files import SAMPLES, parse
from gkd.errors import clean
from gkd.observability.run_files import RunFiles

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.measure import Measurement
    from rich.table import Table

BARS = "▁▂▃▄▅▆▇█"
CURVE = 40
"""Characters of a curve."""
CURVES = (
    "val/accuracy", "val/reverse_kl", "reward/mean", "distill/loss", "actor/cross_entropy",
    "actor/kl_reference", "actor/entropy", "response/length_mean", "actor/grad_norm", "perf/tokens_per_second",
)  # fmt: skip
"""Metrics that have a curve, where they are measured; and each other val/* one."""
STAGES = ("generate", "score", "reward", "update", "sync")
WARNINGS = 3
ENGINES = 8
OLD_S = 5.0
"""Age of the engines' queues that is shown: nobody waits for samples then."""
TAIL, LONGEST_TAIL = 1 << 18, 1 << 28
"""Bytes at the end of samples.jsonl in which the last sample is looked for: at first, and at most."""


def view(run: RunFiles) -> list[RenderableType]:
    """Lay out what a run's files hold; nothing of what is not there yet."""
    rows = run.rows
    parts: list[RenderableType] = []
    if len(rows) > 1:
        parts += ["", curves(rows)]
        if text := stages(rows[-1]):
            parts += ["", text]
    if not run.is_finished and (queues := run.queues()) is not None:
        parts += ["", engines(queues)]
    if text := warnings(run.events):
        parts += ["", text]
    if text := last_sample(run.path / SAMPLES):
        parts += ["", text]
    return parts


def sparkline(values: Sequence[float], width: int = CURVE) -> str:
    """Return the curve of values in at most ``width`` characters, each the mean of as many neighbours."""
    n = min(width, len(values))
    edges = [i * len(values) // n for i in range(n + 1)]
    unit = max(map(abs, values)) or 1.0  # sums of what has diverged may be beyond floats
    means = [sum(value / unit for value in values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


class Curve:
    """The curve of values in as many characters as its column has, at most :data:`CURVE`."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[str]:
        """Draw it."""
        yield sparkline(self.values, min(CURVE, options.max_width))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the least and the most characters that it takes."""
        from rich.measure import Measurement

        return Measurement(1, min(CURVE, len(self.values), options.max_width))


def curves(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of metrics: name, curve, first and newest value."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("metric", "", "first", "newest"):
        table.add_column(title, justify="right" if title in ("first", "newest") else "left", no_wrap=bool(title))
    measured = dict.fromkeys(name for row in rows for name in row)
    for name in [*CURVES, *(name for name in measured if name.startswith("val/") and name not in CURVES)]:
        values = [float(row[name]) for row in rows if name in row]
        if values:
            table.add_row(name, Curve(values), _format(values[0]), _format(values[-1]))
    return table


def _format(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:,.4g}"


def stages(row: Mapping[str, Any], width: int = CURVE) -> str:
    """Return what the last step's seconds went to, as shares of a bar: ``generate 1.20 s ████``; empty where unknown.

    Stages that overlap with others have bars of their own length.
    """
    total = row.get("timing_s/step", 0.0)
    timed = [(stage, row[f"timing_s/{stage}"]) for stage in STAGES if f"timing_s/{stage}" in row]
    if not total or not timed:
        return ""
    return "\n".join(
        f"{stage:8}  {seconds:7.2f} s  {'█' * round(max(0, min(width, width * seconds / total)))}"
        for stage, seconds in timed
    )


def engines(queues: Queues) -> str:
    """Return what each engine samples and scores, one a line, of many the fullest, and what waits for one of them."""
    ranked = sorted(queues.engines, key=lambda engine: (engine.health == "healthy", -engine.sampling))
    lines = [
        f"engine {engine.rank:<4} {engine.sampling:>5,} of {queues.slots:,} slots sampling"
        f"  {engine.scoring:>5,} being scored" + ("" if engine.health == "healthy" else f"  {engine.health}")
        for engine in ranked[:ENGINES]
    ]
    others = len(ranked) - len(lines)
    lines += [f"and {others:,} more engines"] * (others > 0)
    age = time.time() - queues.time
    ago = f", {age:.0f} s ago" if age > OLD_S else ""
    return "\n".join([*lines, f"requests that wait for an engine: {queues.waiting:,}{ago}"])


def warnings(events: Sequence[Mapping[str, Any]]) -> str:
    """Return the newest warnings, deaths and restarts, one a line, with how long ago they were."""
    from gkd.observability.progress import clock

    latest = [event for event in events if event["kind"] in ("warning", "death", "restart")][-WARNINGS:]
    return "\n".join(
        f"{event['kind']} {clock(max(0, time.time() - event['time']))} ago: {clean(event['text'])}" for event in latest
    )


def last_sample(file: Path) -> str:
    """Return prompt and response of the newest sample; empty before there is one."""
    if not file.exists():
        return ""
    length = TAIL
    with file.open("rb") as lines:
        end = lines.seek(0, os.SEEK_END)
        while True:
            lines.seek(max(0, end - length))
            for line in reversed(lines.read().split(b"\n")[:-1]):
                try:
                    row = parse(line)
                    return f"step {row['step']}: {_show(row['prompt'])}\n-> {_show(row['response'])}"
                except (ValueError, KeyError, TypeError, AttributeError):  # the first of those read may not be whole
                    continue
            if length >= min(end, LONGEST_TAIL):
                return ""
            length *= 8  # of long responses, one sample with its tokens has megabytes


def _show(text: str, most: int = 240) -> str:
    """Return a text in one line, cut."""
    line = clean(text)
    return line if len(line) <= most else f"{line[:most]}..."
