"""Code of one's own in a run, each in one file, from a folder outside the project."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import yaml

OWN = Path(__file__).parents[1] / "own"


def test_a_reward_with_settings_and_a_tracker(start: Any, tmp_path: Path) -> None:
    for name in ("brevity.py", "csv_tracker.py"):
        assert len((OWN / name).read_text().splitlines()) <= 40
        shutil.copy(OWN / name, tmp_path)
    own = ["reward.functions=[accuracy,brevity.py:Brevity]", "reward.Brevity.bonus=2.0"]
    own += ["trainer.trackers=[csv_tracker.py:Csv]", "trainer.Csv.file=own.csv"]
    small = ["rollout.engine=hf", "trainer.total_steps=2", "trainer.batch_size=4", "data.val_limit=8"]
    run = start(*own, *small, recipe="grpo")
    assert run.end(240) == 0, run.text()
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1]["reward/Brevity/failed"] == 0.0
    samples = [json.loads(line) for line in (run.output / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        right, brevity = (sample["rewards"][name] for name in ("accuracy", f"{tmp_path}/brevity.py:Brevity"))
        n_tokens = len(sample["response"].split()) + 1  # and the end token
        assert brevity == (2.0 * (1 - n_tokens / 100) if right else 0.0)
    with (run.output / "own.csv").open(newline="") as file:
        tracked = {(int(step), name): float(value) for step, name, value in csv.reader(file)}
    assert tracked == {(row["step"], name): value for row in rows for name, value in row.items() if name != "step"}
    config = yaml.safe_load((run.output / "config.yaml").read_text())
    assert config["reward"]["Brevity"] == {"bonus": 2.0, "limit": 100}  # complete, to be repeated from
