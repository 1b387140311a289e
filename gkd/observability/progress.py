"""What a run shows while it runs: one live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Self, TextIO, cast

from rich.console import Console
from rich.measure import Measurement
from rich.segment import Segments
from rich.status import Status
from rich.table import Table
from rich.text import Text

LINE_EVERY_S = 10.0
STAYS_EVERY_S = 60.0
"""On a terminal, between lines of steps that stay above the live one."""
MOST_COLUMNS = 10_000
"""Characters of a line of a table that nothing is cut of."""


class _PatientOutput:
    """Output of a console; what a disk that is full does not take is written later, or lost: a run goes on."""

    def __init__(self, plain: Console) -> None:
        self._plain = plain  # whose file is standard output as it is by then, which a program may replace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain.file, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._plain.file.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._plain.file.flush)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BrokenPipeError:  # nobody reads any more, which ends a run
            raise
        except OSError:
            pass  # there is no other place to state it, and metrics.jsonl has what the lines have


def console(patient: bool = False) -> Console:
    """Return standard output; as wide as a line needs where it is not a terminal, so that nothing is wrapped.

    ``patient``: it raises nothing where its disk is full, as a run's log may be for a moment.
    """
    plain = Console(highlight=False, markup=False, emoji=False)
    if plain.file.isatty():
        return plain
    file = cast("TextIO", _PatientOutput(plain)) if patient else None
    return Console(file=file, highlight=False, markup=False, emoji=False, width=200, soft_wrap=True)


def print_table(out: Console, table: Table) -> None:
    """Print a table of figures as wide as it has to be: a narrower terminal breaks its lines, and no figure is cut."""
    needed = Measurement.get(out, out.options.update(width=MOST_COLUMNS), table).maximum
    lines = out.render(table, out.options.update(width=max(out.width, needed)))
    out.print(Segments(lines), crop=False, soft_wrap=True, end="")


def log_to(out: Console) -> None:
    """Send the project's own log records to the console, one line each."""
    logger = logging.getLogger("gkd")
    logger.handlers[:] = [_LineHandler(out)]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _LineHandler(logging.Handler):
    """Prints records on a console, above its live line where it has one."""

    def __init__(self, out: Console) -> None:
        super().__init__()
        self.out = out

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record, a warning in a colour where there are any."""
        self.out.print(record.getMessage(), style="yellow" if record.levelno >= logging.WARNING else None)


def clock(seconds: float) -> str:
    """Return ``1:02:03`` or ``2:03``."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def changes(values: Mapping[str, float], before: Mapping[str, float] | None = None) -> str:
    """Return ``val/accuracy 0.6797 (+0.1758)  val/loss 0.5678``, the change where ``before`` has the figure too."""
    before = before or {}
    return "  ".join(
        f"{name} {value:z.4f}" + (f" ({value - before[name]:+z.4f})" if name in before else "")
        for name, value in values.items()
    )


def rewrites(out: Console) -> bool:
    """Return whether lines can be rewritten in place: colours may be forced upon a file, and terminals may be dumb."""
    return out.is_interactive and out.file.isatty()


class Progress:
    """Step, loss, KL, tokens per second and time left, and every validation with what changed since its figures' last.

    On a terminal the line is rewritten in place. Lines that stay are printed at the first and last step and between
    them at most every ten seconds, on a terminal every minute. ``validated``: each figure of validation as it was
    measured last.
    """

    def __init__(self, out: Console, total_steps: int) -> None:
        self.out, self.total = out, total_steps
        self._status: Status | None = out.status("") if rewrites(out) else None
        self._first: tuple[int, float] | None = None  # the first step logged, and when
        self._every = LINE_EVERY_S if self._status is None else STAYS_EVERY_S
        self._printed = -math.inf
        self.validated: Mapping[str, float] = {}

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def print_line(self, text: str) -> None:
        """Print a line that stays."""
        self.out.print(text)

    def show_status(self, activity: str) -> None:
        """Show activity goes on before or between steps."""
        if self._status is not None:
            self._status.update(Text(activity))  # of a text it would take [brackets] for styles
        else:
            self.out.print(activity)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one finished step."""
        if self._first is None:
            self._first = (step, time.monotonic())
        line, now = self.line(step, metrics), time.monotonic()
        if self._status is not None:
            self._status.update(Text(line))
        if step in (1, self.total) or now - self._printed >= self._every:
            self._printed = now
            self.out.print(line)
        if values := {name: value for name, value in metrics.items() if name.startswith("val/")}:
            self.out.print(f"validation after step {step}  {changes(values, self.validated)}")
            self.validated = {**self.validated, **values}  # a set may be due at other steps than this one

    def line(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return the line of a step, without what was not measured."""
        parts = [f"step {step}/{self.total}"]
        for label, name, form in (
            ("reward", "reward/mean", "z.3f"),
            ("loss", "distill/loss", "z.4f"),
            ("kl", "distill/reverse_kl", "z.4f"),
            ("cross-entropy", "actor/cross_entropy", ".4f"),
            ("length", "response/length_mean", ".1f"),
            ("tok/s", "perf/tokens_per_second", ",.0f"),
            ("s/step", "timing_s/step", ".2f"),
        ):
            if name in metrics:
                parts.append(f"{label} {metrics[name]:{form}}")
        # The first step warms caches up and is no measure of the others.
        if self._first is not None and step > self._first[0]:
            each = (time.monotonic() - self._first[1]) / (step - self._first[0])
            parts.append(f"{clock(each * (self.total - step))} left")
        return "  ".join(parts)
