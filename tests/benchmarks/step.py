"""Wall time and CPU time of a step of the built-in task, by process; two checkouts in turn with ``--against``.

    python tests/benchmarks/step.py [--against DIRECTORY] [--rounds 3] [--steps 100] [SETTING=VALUE ...]

One actor, one engine, one teacher, 64 prompts a step, responses of up to 12 tokens: what a step costs beside its
arithmetic. CPU time, of all threads of a process from ``/proc``, depends little on what else the machine does; it is
counted from step ``WARM`` to the last but one, what is logged included. Stages are medians of ``timing_s/*`` over those
steps. SETTINGs are given to all runs. DIRECTORY is another checkout of this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

WARM, STEPS, LIMIT_S = 20, 100, 600
STAGES = ("step", "generate", "score", "update", "sync")
HERE = Path(__file__).parents[2]


def command(output: Path, cache: Path, steps: int, settings: list[str]) -> list[str]:
    """Return the command of a run that neither validates nor saves between its first and its last step."""
    return [
        sys.executable, "-m", "gkd.main", "+recipe=on_policy_distill", f"data.cache_dir={cache}",
        f"trainer.output_dir={output}", f"trainer.total_steps={steps}", "trainer.val_every=100000",
        "trainer.save_minutes=null", "trainer.batch_size=64", "rollout.max_response_length=12", "actor.lr=1e-3",
        *settings,
    ]  # fmt: skip


def cpu_s(process: psutil.Process) -> float:
    """Return seconds that all threads of a process have computed."""
    times = process.cpu_times()
    return float(times.user + times.system)


def processes(run: psutil.Process, output: Path) -> dict[str, list[psutil.Process]]:
    """Return the processes of a run by what they are: the driver, each group's workers, and all others, Ray's own."""
    groups = {int(row["pid"]): row["group"] for row in json.loads((output / "placement.json").read_text())}
    by_group: dict[str, list[psutil.Process]] = {"driver": [run]}
    for process in run.children(recursive=True):
        by_group.setdefault(groups.get(process.pid, "ray"), []).append(process)
    return by_group


def rows_of(output: Path) -> list[dict[str, float]]:
    """Return the metrics of the steps that are done."""
    file = output / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for(step: int, output: Path, run: subprocess.Popen[bytes]) -> float:
    """Return when ``step`` is seen to be done (``time.monotonic``). Raises RuntimeError where the run ends or hangs."""
    end = time.monotonic() + LIMIT_S
    while not any(row["step"] >= step for row in rows_of(output)):
        if run.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the run in {output} came to no step {step} (exit code {run.poll()})")
        time.sleep(0.05)
    return time.monotonic()


def measure(tree: Path, cache: Path, steps: int, settings: list[str]) -> dict[str, float]:
    """Return milliseconds a step of one run of the checkout ``tree``."""
    output = Path(tempfile.mkdtemp(prefix="run-", dir=cache)) / "run"
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    run = subprocess.Popen(
        command(output, cache, steps, settings), env=environment, cwd=tree, stdout=subprocess.DEVNULL
    )
    began = wait_for(WARM, output, run)
    first = rows_of(output)[-1]["step"]
    groups = processes(psutil.Process(run.pid), output)
    before = {name: sum(map(cpu_s, own)) for name, own in groups.items()}
    ended = wait_for(steps - 1, output, run)
    last = rows_of(output)[-1]["step"]
    after = {name: sum(map(cpu_s, own)) for name, own in groups.items()}
    if run.wait(LIMIT_S):
        raise RuntimeError(f"the run in {output} ended with {run.returncode}")
    n = last - first
    figures = {f"cpu {name}": (after[name] - before[name]) / n for name in sorted(groups)}
    figures["cpu in all"] = sum(figures.values())
    figures["wall"] = (ended - began) / n
    rows = [row for row in rows_of(output) if first < row["step"] <= last]
    for stage in STAGES:
        figures[stage] = statistics.median(row[f"timing_s/{stage}"] for row in rows)
    return {name: 1000 * value for name, value in figures.items()}


def table(rounds: dict[str, list[dict[str, float]]]) -> list[str]:
    """Return lines: medians over the rounds, and the median of the rounds' ratios."""
    names = list(rounds)
    lines = [f"{'ms a step':14}" + "".join(f"{name:>12}" for name in names) + ("       ratio" if names[1:] else "")]
    for figure in rounds[names[0]][0]:
        made = [statistics.median(one[figure] for one in rounds[name]) for name in names]
        line = f"{figure:14}" + "".join(f"{value:12.1f}" for value in made)
        if names[1:]:
            pairs = zip(rounds["here"], rounds["against"], strict=True)
            ratios = [own[figure] / other[figure] for own, other in pairs if other[figure]]
            line += f"{statistics.median(ratios):8.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        lines.append(line)
    return lines


def main() -> None:
    """Alternate, and print a table after each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--cache", type=Path, help="where the task's models are kept, or made")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE")
    options = parser.parse_args()
    trees = {"here": HERE, **({"against": options.against.resolve()} if options.against else {})}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as scratch:
        cache = options.cache or Path(scratch)
        for number in range(options.rounds):
            for name in trees if number % 2 == 0 else reversed(trees):
                rounds[name].append(measure(trees[name], cache, options.steps, options.settings))
            print(f"after round {number + 1}, load {os.getloadavg()[0]:.1f}", *table(rounds), sep="\n", flush=True)


if __name__ == "__main__":
    main()
