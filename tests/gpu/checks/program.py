"""A run of gkd.main as a user starts it, watched from outside."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.gpu.checks.context import Context, require

ROOT = Path(__file__).parents[3]
MAIN = ("gkd.main",)
LIMIT_S = 900.0  # the acceptance run's own deadlines are shorter
KEPT = ("timing_s/", "memory/", "mismatch/", "perf/", "actor/", "distill/", "reward/mean")
SMALL_TASK = (
    "data.sort_digits.digits=4",
    "data.sort_digits.teacher_steps=150",
    "data.sort_digits.student_steps=60",
    "data.val_limit=64",
)
SMALLER_TASK = (
    "data.sort_digits.digits=3",
    "data.sort_digits.teacher_steps=60",
    "data.sort_digits.student_steps=40",
    "data.val_limit=16",
)


@dataclass(frozen=True)
class Run:
    """A run that ended well."""

    output: Path
    text: str
    """All that was printed."""
    steps: list[dict[str, Any]]
    """Lines of metrics.jsonl but the first validation's."""
    first_step_s: float
    """From the command to the first step's end."""
    device_peak_gib: float | None
    """The largest use of the first GPU, by whomever, every 0.2 s; None without one."""

    def median(self, name: str, but_last: int = 0) -> float:
        """Of a metric over the steps after the first two, without the last ``but_last``."""
        rows = self.steps[: len(self.steps) - but_last]
        return statistics.median(row[name] for row in rows if row["step"] > 2 and name in row)

    def largest(self, name: str) -> float:
        """Of a metric over all steps."""
        return float(max(row[name] for row in self.steps if name in row))

    def medians(self) -> dict[str, float]:
        """Of everything worth keeping, over the steps after the first two where there are more that have it."""
        values: dict[str, list[float]] = defaultdict(list)
        for row in self.steps:
            for name in filter(_is_kept, row):
                values[name].append(row[name])
        return {name: float(f"{statistics.median(its[2:] or its):.4g}") for name, its in sorted(values.items())}

    def summary(self) -> dict[str, Any]:
        """The run's own summary."""
        result: dict[str, Any] = json.loads((self.output / "summary.json").read_text())
        return result


def run(
    context: Context,
    name: str,
    *overrides: str,
    recipe: str = "on_policy_distill",
    program: Sequence[str] = MAIN,
) -> Run:
    """Run the recipe with overrides to its end; what it prints and its figures are there as they come.

    Without a model named it is the built-in task, made smaller. ``program``: a module, and arguments before the
    recipe; in a rehearsal gkd.main has simulated GPUs. Raises AssertionError where it fails.
    """
    program = ("tests.gpu.simulated",) if context.rehearsal and program == MAIN else program
    output, log = context.scratch / name, context.scratch / f"{name}.txt"
    command = [sys.executable, "-m", *program, f"+recipe={recipe}", f"trainer.output_dir={output}"]
    if not any(override.startswith("model.path=") for override in overrides):
        command += [f"data.cache_dir={context.scratch / 'cache'}"]
    command += overrides
    print("$", " ".join(command), flush=True)
    began, shown, result = time.monotonic(), 0, Run(output, "", [], 0.0, None if context.rehearsal else 0.0)
    start_s: dict[str, float] = {}
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        while True:
            ended = process.poll() is not None  # before what it has left is read
            require(ended or time.monotonic() - began < LIMIT_S, f"{name} took more than {LIMIT_S:.0f} s")
            shown, lines = _show(log, shown)
            result = _look(context, name, result, time.monotonic() - began)
            if lines and not result.steps:  # where the time before the first step goes
                start_s |= {line[:32]: round(time.monotonic() - began, 1) for line in lines}
                context.note({f"{name}_start_s": start_s})
            if ended:
                break
            time.sleep(0.2)
    text = log.read_text(errors="replace")
    lines = text.strip().splitlines() or ["it printed nothing"]
    require(process.returncode == 0, f"{name}: exit code {process.returncode}: {lines[-1][:400]}")
    context.note({f"{name}_seconds": time.monotonic() - began, f"{name}_device_peak_gib": result.device_peak_gib})
    return replace(result, text=text)


def require_room(n_gpus: int, *overrides: str, recipe: str = "on_policy_distill") -> None:
    """Raise ConfigError or AssertionError where a run could not begin on a machine with so many GPUs of 80 GB."""
    from gkd.cli.plan import make

    plan = make([f"+recipe={recipe}", *overrides, f"plan.nodes=[{n_gpus}]", "plan.gpu_type=h100-80gb"])
    require(plan.layout.nodes == (n_gpus,), f"there is no room on {n_gpus} GPUs for {overrides}")
    require(all(group.fits for group in plan.memory), f"{plan.all_groups} would make room for {overrides}")


def _is_kept(metric: str) -> bool:
    return metric.startswith(KEPT)


def _show(log: Path, start: int) -> tuple[int, list[str]]:
    """Print what a log has from ``start`` on, as it comes: what ends the check would take the rest.

    Returns its end, and these lines.
    """
    with log.open("rb") as file:
        file.seek(start)
        new = file.read()
    text = new.decode(errors="replace")
    print(text, end="", flush=True)
    return start + len(new), text.splitlines()


def _look(context: Context, name: str, before: Run, seconds: float) -> Run:
    """Return a run as it is after ``seconds``; a new step is noted, with what the run took until then."""
    peak = None if before.device_peak_gib is None else max(before.device_peak_gib, _used_bytes() / (1 << 30))
    run = replace(before, steps=read_steps(before.output), device_peak_gib=peak)
    if len(run.steps) == len(before.steps):
        return run
    if not before.steps:
        run = replace(run, first_step_s=seconds)
    context.note({f"{name}_first_step_s": run.first_step_s, f"{name}_steps": len(run.steps)})
    context.note({f"{name}_device_peak_gib": peak, name: run.medians()})
    return run


def read_steps(output: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's metrics.jsonl so far but the first validation's."""
    file = output / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [row for row in map(json.loads, lines) if row["step"]]


def _used_bytes() -> int:
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
