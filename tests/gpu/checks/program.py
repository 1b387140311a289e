"""A run of gkd.main as a user starts it, watched from outside."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.checks.context import Context, require

ROOT = Path(__file__).parents[3]
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

    def median(self, name: str, leave_out: int = 2) -> float:
        """Of a metric over the steps after the first ``leave_out``."""
        return statistics.median(row[name] for row in self.steps if row["step"] > leave_out and name in row)

    def largest(self, name: str) -> float:
        """Of a metric over all steps."""
        return float(max(row[name] for row in self.steps if name in row))

    def medians(self) -> dict[str, float]:
        """Of everything worth keeping."""
        names = sorted({name for row in self.steps for name in row if name.startswith(KEPT)})
        return {name: float(f"{self.median(name, min(2, len(self.steps) - 1)):.4g}") for name in names}

    def summary(self) -> dict[str, Any]:
        """The run's own summary."""
        result: dict[str, Any] = json.loads((self.output / "summary.json").read_text())
        return result


def run(
    context: Context,
    name: str,
    *overrides: str,
    recipe: str = "on_policy_distill",
    program: Sequence[str] = ("gkd.main",),
) -> Run:
    """Run the recipe with overrides to its end and note what it took.

    Without a model named it is the built-in task, made smaller. ``program``: a module, and arguments before the
    recipe. Raises AssertionError where it fails.
    """
    output, log = context.scratch / name, context.scratch / f"{name}.txt"
    command = [sys.executable, "-m", *program, f"+recipe={recipe}", f"trainer.output_dir={output}"]
    if not any(override.startswith("model.path=") for override in overrides):
        command += [f"data.cache_dir={context.scratch / 'cache'}"]
    command += overrides
    print("$", " ".join(command), flush=True)
    began, first, peak, metrics = time.monotonic(), 0.0, 0, output / "metrics.jsonl"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        while process.poll() is None:
            require(time.monotonic() - began < LIMIT_S, f"{name} took more than {LIMIT_S:.0f} s")
            peak = max(peak, _used_bytes(context))
            if not first and metrics.exists() and len(metrics.read_text().splitlines()) > 1:
                first = time.monotonic() - began
            time.sleep(0.2)
    text = log.read_text(errors="replace")
    print(text)
    lines = text.strip().splitlines() or ["it printed nothing"]
    require(process.returncode == 0, f"{name}: exit code {process.returncode}: {lines[-1][:400]}")
    steps = [row for row in map(json.loads, metrics.read_text().splitlines()) if row["step"]]
    result = Run(output, text, steps, first, None if context.rehearsal else peak / (1 << 30))
    context.note({f"{name}_seconds": time.monotonic() - began, f"{name}_first_step_s": first})
    context.note({f"{name}_device_peak_gib": result.device_peak_gib, name: result.medians()})
    return result


def _used_bytes(context: Context) -> int:
    if context.rehearsal:
        return 0
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
