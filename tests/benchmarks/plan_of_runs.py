"""Compares the steps of real runs with what the plan's simulation makes of them.

    python tests/benchmarks/plan_of_runs.py [--only NAME ...] [--keep DIR]

The built-in task under several schedules, with either engine, with chunks and in flight, and two other recipes; all
groups on the same cores, nothing imposed. Every run is planned as ``gkd plan --from RUN`` does, from its own
timeline.json, and the step at the run's own settings stands beside its mean and its median step. Then each schedule is
planned from the first run with the same engine and chunks, which is what a user asks a plan for: ``from the first``.
The first step, and those in which workers died, do not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gkd.cli.plan import make
from gkd.planning.measured.timeline import find_disturbed_steps

DISTILL = ("+recipe=on_policy_distill", "trainer.total_steps=80")
HF, VLLM = (*DISTILL, "rollout.engine=hf"), (*DISTILL, "rollout.engine=vllm")
CHUNKS = ("actor.max_tokens_per_micro_batch=320",)  # four or five a step
AHEAD, FURTHER = ("schedule.max_staleness=1",), ("schedule.max_staleness=2",)
IN_FLIGHT = ("schedule.in_flight=true",)
ALL = ("placement=cpu", "trainer.val_every=100000", "data.val_limit=16")
RUNS: dict[str, tuple[str, ...]] = {
    "hf, 0": HF,
    "hf, 1": (*HF, *AHEAD),
    "hf, 2": (*HF, *FURTHER),
    "hf, 0, chunks": (*HF, *CHUNKS),
    "hf, 1, chunks": (*HF, *CHUNKS, *AHEAD),
    "vllm, 0": VLLM,
    "vllm, 1": (*VLLM, *AHEAD),
    "vllm, 2, in flight": (*VLLM, *FURTHER, *IN_FLIGHT),
    "vllm, 0, chunks": (*VLLM, *CHUNKS),
    "vllm, 1, in flight, chunks": (*VLLM, *CHUNKS, *AHEAD, *IN_FLIGHT),
    "grpo, vllm, 0": ("+recipe=grpo", "trainer.total_steps=60"),
    "sft": ("+recipe=sft", "trainer.total_steps=80"),
}


def main() -> int:
    """Run all, each by itself, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs there, and take those that are there")
    options = parser.parse_args()
    print(f"{'run':28} {'mean s':>7} {'median':>7} {'planned':>8} {'of mean':>8} {'from the first':>15}", flush=True)
    held = nullcontext(options.keep) if options.keep else tempfile.TemporaryDirectory(prefix="gkd-planned-")
    with held as directory:
        for name in options.only:
            output = Path(directory, name.replace(", ", "-").replace(" ", "_"))
            if not (output / "summary.json").exists():
                start(RUNS[name], output)
            report(name, output)
    return 0


def start(overrides: Sequence[str], output: Path) -> None:
    """Have one run to its end."""
    command = [sys.executable, "-m", "gkd.main", *overrides, *ALL, f"trainer.output_dir={output}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=900)


def report(name: str, output: Path) -> None:
    """Print the line of a run."""
    seconds = measured_steps(output)
    mean, planned = statistics.fmean(seconds), planned_step(RUNS[name], output)
    first = first_of(name, output.parent)
    by_first = planned_step(RUNS[name], first) / mean if first not in (None, output) else None
    columns = f"{name:28} {mean:7.3f} {statistics.median(seconds):7.3f} {planned:8.3f} {planned / mean:8.2f}"
    print(f"{columns} {'' if by_first is None else f'{by_first:.2f}':>15}", flush=True)


def measured_steps(output: Path) -> list[float]:
    """Return the seconds of each step of a run that counts."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    disturbed = find_disturbed_steps(output)
    timed = [row for row in rows if "timing_s/step" in row and row["step"] not in disturbed]
    return [row["timing_s/step"] for row in timed[1:]]


def planned_step(overrides: Sequence[str], run: Path) -> float:
    """Return the seconds of a step with these settings, planned with the times of ``run``."""
    planned = make([*overrides, *ALL], str(run))
    staleness = next((int(o.partition("=")[2]) for o in overrides if o.startswith("schedule.max_staleness=")), 0)
    return next(step.seconds for step in planned.steps if step.staleness == staleness)


def first_of(name: str, directory: Path) -> Path | None:
    """Return the run without staleness of the same engine and chunks, where it is there."""
    engine, *rest = name.split(", ")
    first = directory / "-".join([engine, "0", *(["chunks"] if "chunks" in rest else [])])
    return first if (first / "summary.json").exists() else None


if __name__ == "__main__":
    raise SystemExit(main())
