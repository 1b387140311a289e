"""Kills workers of a real run at random moments and says whether anything was lost, trained twice or too stale.

    python tests/benchmarks/kills.py [--kills 20] [--before STEP] [--staleness 1] [--seed 0]
                                     [--in-flight [--keep-cache]] [SETTING ...]

The built-in task with two engines and two replicas of the teacher (on_policy_distill), or with two engines, a
reference and a reward model where one of these is among ``--groups`` (grpo). Every kill is a SIGKILL of a worker of
``--groups``, at a moment drawn at random; the run goes on after each and ends by itself. ``actor`` and ``ray`` (the
control service of the run's own Ray) are those after which the program begins again from its newest checkpoint.
With ``--in-flight`` engines are vLLM's and load weights while they sample, up to two updates behind; with
``--keep-cache`` responses then go on with what older weights cached.
Prints

- samples trained against steps x batch x n, each once,
- the largest age of a sample against schedule.max_staleness,
- how long each worker was away,
- the time from the kill of an engine until it samples again,
- the longest that a batch waited for its last score after a replica's death,
- the exit code.

Ends with exit code 1 where one of them is not what it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.data.models import save_reward_model

BATCH, N = 8, 4
SMALL = [
    "data.sort_digits.digits=3", "data.sort_digits.teacher_steps=60", "data.sort_digits.student_steps=40",
    "data.val_limit=16", f"trainer.batch_size={BATCH}", f"rollout.n={N}", f"trainer.n_logged_samples={BATCH * N}",
    "trainer.n_logged_tokens=0", "trainer.val_every=100000", "cluster.cpu_threads=1",
    "rollout.n_gpus_per_node=2", "cluster.simulate_gpus=5", "cluster.worker_restarts=1000", "trainer.restarts=1000",
    "trainer.save_every=10", "trainer.n_timeline_steps=100000",
]  # fmt: skip
MOST_ENGINE_S, MOST_REPLICA_S = 60.0, 5.0
"""The longest from an engine's death until it samples again, and until scores come where another replica is there."""
ENOUGH_REPLICAS = 6
"""Of so many that are killed some had another replica beside them, unless nothing is recognised here any more."""
FATAL = ("actor", "ray")
"""What the run begins again without."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: of whom, when (``time.time``), and the newest step that was logged then."""

    group: str
    rank: int
    time: float
    step: int


def recipe(groups: list[str], directory: Path) -> list[str]:
    """The arguments for a run that has these groups."""
    if not {"reference", "reward_model"} & set(groups):
        return ["+recipe=on_policy_distill", *SMALL, "teacher.n_gpus_per_node=2"]
    save_reward_model(directory / "reward_model")
    own = ["algorithm.kl.coef=0.01", "reward.functions=[accuracy,reward_model]", "reward.weights=[1.0,0.01]"]
    return ["+recipe=grpo", *SMALL, *own, f"reward_model.model.path={directory / 'reward_model'}"]


def schedule(options: argparse.Namespace) -> list[str]:
    """Return the settings of how far sampling is ahead, and of the engines that can do that."""
    settings = [f"schedule.max_staleness={options.staleness}"]
    settings.append(f"rollout.engine={'vllm' if options.in_flight else 'hf'}")
    if options.in_flight:
        settings.append("schedule.in_flight=true")
    if options.keep_cache:
        settings.append("schedule.recompute_cache=false")
    return settings


def begun(output: Path) -> int:
    """How often the run has begun."""
    return sum(row["kind"] in ("start", "resume") for row in rows(output / "events.jsonl"))


def rows(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file of JSON objects."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def newest(output: Path) -> int:
    """The newest step that was logged; -1 before there is one."""
    return max((row["step"] for row in rows(output / "metrics.jsonl")), default=-1)


def away_s(events: list[dict[str, Any]]) -> list[float]:
    """Seconds from each worker's death until its new process was there, by events.jsonl."""
    died: dict[str, float] = {}
    away = []
    for event in events:
        if event["kind"] in ("start", "resume"):  # with other processes
            died.clear()
        who = re.match(r"\w+ rank \d+", event["text"])
        if who and event["kind"] == "death":
            died.setdefault(who[0], event["time"])
        elif who and event["kind"] == "restart":
            away.append(event["time"] - died.pop(who[0]))
    return away


def samples_again_s(kills: Sequence[Kill], timeline: Path) -> list[float]:
    """Seconds from each kill of an engine until its new process samples; without those killed again before."""
    events = json.loads(timeline.read_text())["traceEvents"]
    lanes = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    delays = []
    for kill in (kill for kill in kills if kill.group == "rollout"):
        began = [
            event["ts"] / 1e6
            for event in events
            if event["ph"] == "X" and event["name"] == "sample" and lanes[event["pid"]] == f"rollout {kill.rank}"
        ]
        again = min((at for at in began if at > kill.time), default=None)
        later = [other.time for other in kills if (other.group, other.rank) == ("rollout", kill.rank)]
        if again is not None and not any(kill.time < at < again for at in later):
            delays.append(again - kill.time)
    return delays


def late_scores_s(kills: Sequence[Kill], output: Path, staleness: int) -> list[float]:
    """Seconds from a batch's last sample to its last score, of the batches that a replica's death may concern.

    Without deaths that left no other replica, or after which another one did before those batches were scored.
    """
    delays, metrics = [], rows(output / "metrics.jsonl")
    deaths = [event for event in rows(output / "events.jsonl") if event["kind"] == "death"]
    alone = [kill.step for kill in kills if kill.group == "teacher" and not _left_another(kill, deaths)]
    for kill in (kill for kill in kills if kill.group == "teacher" and _left_another(kill, deaths)):
        if any(kill.step <= step <= kill.step + 3 + staleness for step in alone):
            continue
        concerned = range(kill.step + 1, kill.step + 4 + staleness)
        delays.append(max((row.get("timing_s/score", 0.0) for row in metrics if row["step"] in concerned), default=0.0))
    return delays


def _left_another(kill: Kill, deaths: Sequence[dict[str, Any]]) -> bool:
    """Say whether another replica was there when this one was killed."""
    own_deaths = (death for death in deaths if death["text"].startswith(f"teacher rank {kill.rank} "))
    death = next((death for death in own_deaths if death["time"] > kill.time), None)
    return death is not None and " goes to " in death["text"]


def victims(run: subprocess.Popen[bytes], output: Path, groups: list[str]) -> dict[tuple[str, int], int]:
    """Process ids by group and rank, of the workers of ``groups`` whose process is there, and of Ray's service."""
    workers = json.loads((output / "placement.json").read_text())
    pids = {(worker["group"], worker["rank"]): worker["pid"] for worker in workers if worker["group"] in groups}
    if "ray" in groups:
        services = [p.pid for p in psutil.Process(run.pid).children(recursive=True) if p.name() == "gcs_server"]
        pids |= {("ray", rank): pid for rank, pid in enumerate(services)}
    return {who: pid for who, pid in pids.items() if Path(f"/proc/{pid}").exists()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--before", type=int, help="the step before which all kills are; none: the last but five")
    parser.add_argument("--staleness", type=int, help="schedule.max_staleness; none: 1, in flight 2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", default="rollout,teacher")
    parser.add_argument("--minutes", type=float, default=30.0, help="the longest that the run may take")
    parser.add_argument("--in-flight", action="store_true", help="schedule.in_flight=true, with rollout.engine=vllm")
    parser.add_argument("--keep-cache", action="store_true", help="schedule.recompute_cache=false")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    if options.staleness is None:
        options.staleness = 2 if options.in_flight else 1
    with tempfile.TemporaryDirectory(prefix="gkd-kills-") as directory:
        output = Path(directory, "run")
        arguments = recipe(options.groups.split(","), Path(directory))
        command = [sys.executable, "-m", "gkd.main", *arguments, f"trainer.output_dir={output}"]
        command += [f"trainer.total_steps={options.steps}", *schedule(options)]
        run = subprocess.Popen([*command, *options.settings], stdout=sys.stderr)
        try:
            killed = kill(run, output, options, random.Random(options.seed))
            return count(output, options, killed, run.wait(60 * options.minutes))
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGTERM)
                run.wait(60)


def kill(run: subprocess.Popen[bytes], output: Path, options: argparse.Namespace, draw: random.Random) -> list[Kill]:
    """Kill a worker up to a second after each of some steps."""
    killed: list[Kill] = []
    for step in sorted(draw.choices(range(1, options.before or options.steps - 5), k=options.kills)):
        while run.poll() is None and newest(output) < step:
            time.sleep(0.1)
        time.sleep(draw.uniform(0, 1))
        while run.poll() is None and not (there := victims(run, output, options.groups.split(","))):
            time.sleep(0.1)
        if run.poll() is not None:
            break
        who = draw.choice(sorted(there))
        killed.append(Kill(*who, time.time(), newest(output)))
        os.kill(there[who], signal.SIGKILL)
        print(f"kill {len(killed):3} after step {killed[-1].step:4}: {who[0]} rank {who[1]}", flush=True)
        # Its other workers are ended with it: killing them would show nothing. It may be killed again while it loads.
        placed = output / "placement.json"
        while who[0] in FATAL and run.poll() is None and placed.stat().st_mtime < killed[-1].time:
            time.sleep(0.1)
    return killed


def seconds(values: Sequence[float]) -> str:
    """Return them for a line of text."""
    return ", ".join(f"{each:.1f}" for each in sorted(values)) + " s" if values else "never"


def count(output: Path, options: argparse.Namespace, killed: list[Kill], code: int) -> int:
    """Print what came of it; returns the exit code."""
    metrics = rows(output / "metrics.jsonl")
    steps = [row["step"] for row in metrics]
    trained = Counter((row["step"], row["prompt_id"], row["index"]) for row in rows(output / "samples.jsonl"))
    expected, times = options.steps * BATCH * N, sum(trained.values())
    stale = max(row.get("staleness/max", 0.0) for row in metrics)
    away = away_s(rows(output / "events.jsonl"))
    groups = dict(Counter(kill.group for kill in killed))
    print(f"killed {len(killed)}: {groups}, in {steps[-1]} of {options.steps} steps")
    print(f"samples trained {times}, steps x batch x n {expected}, more than once {times - len(trained)}")
    print(f"largest staleness {stale:g}, schedule.max_staleness={options.staleness}")
    print(f"the run began again {begun(output) - 1} times")
    print(f"came back: {len(away)} times, after {min(away):.1f} to {max(away):.1f} s" if away else "came back: never")
    again = samples_again_s(killed, output / "timeline.json")
    print(f"from an engine's death until it samples again: {seconds(again)}")
    waits = late_scores_s(killed, output, options.staleness)
    print(f"with another replica there, the last score of a batch came {seconds(waits)} after its last sample")
    n_replicas = groups.get("teacher", 0)
    print(f"({len(waits)} of {n_replicas} kills of a replica: others left none, or were followed by one that did)")
    print(f"exit code {code}")
    right = (
        len(killed) == options.kills
        and len(trained) == times == expected
        and steps == list(range(options.steps + 1))
        and stale <= options.staleness
        and max(waits, default=0.0) <= MOST_REPLICA_S
        and (waits or n_replicas < ENOUGH_REPLICAS)
        and max(again, default=0.0) <= MOST_ENGINE_S
        and code == 0
    )
    print("all as it must be" if right else "NOT as it must be")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
