"""Runs thousands of small steps and says what grew: seconds of a step and memory of each group, from metrics.jsonl.

    python tests/benchmarks/soak.py [--steps 1500] [--only NAME ...] [SETTING ...]

The built-in task, made small, once for each way in which weights reach vLLM's engines. What is done once a step, and
leaves something behind each time, shows after hundreds of them: Python nests calls 1,000 deep, and a GPU's hours are
thousands of steps. Prints a line a run: its exit code, and medians of its second and of its last tenth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SMALL = ["trainer.batch_size=4", "rollout.n=2", "data.val_limit=16", "trainer.val_every=500", "trainer.save_every=500"]
WAYS = {
    "pushed": ["+recipe=distill_and_reward"],
    "drained": ["+recipe=on_policy_distill", "schedule.max_staleness=1", "teacher.engine=vllm"],
    "in flight": ["+recipe=distill_and_reward", "schedule.max_staleness=2", "schedule.in_flight=true"],
    "adapter": ["+recipe=grpo", "actor.lora.r=4", "weights.adapter_only=true"],
    "offloaded": ["+recipe=on_policy_distill", "placement=single_gpu", "cluster.offload=true"],
    "transformers": ["+recipe=grpo", "rollout.engine=hf"],
    "merged": ["+recipe=grpo", "actor.lora.r=4"],
    "supervised": ["+recipe=sft", "rollout.n=1"],
    "several": [
        "+recipe=on_policy_distill",
        "rollout.n_gpus_per_node=2",
        "teacher.n_gpus_per_node=2",
        "trainer.n_gpus_per_node=2",
        "schedule.max_staleness=1",
    ],
}
GROUPS = ("actor", "rollout", "teacher")


def run(way: str, steps: int, settings: Sequence[str]) -> tuple[int, list[dict[str, float]]]:
    """Do a run; returns its exit code and the rows of its steps."""
    with tempfile.TemporaryDirectory(prefix="gkd-soak-") as directory:
        own = [*SMALL, *WAYS[way], f"trainer.total_steps={steps}", f"trainer.output_dir={directory}/run", *settings]
        done = subprocess.run([sys.executable, "-m", "gkd", "train", *own], capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
        file = Path(directory, "run", "metrics.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return done.returncode, [row for row in rows if "timing_s/step" in row]


def compare(rows: Sequence[dict[str, float]], name: str) -> str:
    """Return the medians of a metric in the second tenth of the rows, the first warms up, and in the last one."""
    tenth = len(rows) // 10
    parts = [[row[name] for row in part if name in row] for part in (rows[tenth : 2 * tenth], rows[-tenth:])]
    return " -> ".join(f"{statistics.median(part):.3f}" if part else "-" for part in parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="NAME")
    options, settings = parser.parse_known_args()
    print(f"{'run':14}{'code':>5}{'steps':>7}  {'s/step':18}{'sync s':18}" + "".join(f"{g + ' GB':18}" for g in GROUPS))
    codes = []
    for way in options.only:
        code, rows = run(way, options.steps, settings)
        names = ["timing_s/step", "timing_s/sync", *(f"memory/{group}/process_gb" for group in GROUPS)]
        figures = "".join(f"{compare(rows, name):18}" for name in names)
        print(f"{way:14}{code:5}{len(rows):7}  {figures}", flush=True)
        codes.append(code)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
