"""Code of the user's own, each in one file, from a folder outside the project, in a whole run."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import ROOT

OWN, RECIPE = ROOT / "tests" / "own", ROOT / "recipes" / "your_own"


def test_a_divergence_an_advantage_a_reward_and_a_tracker(start: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for file in (OWN / "brevity.py", OWN / "csv_tracker.py", RECIPE / "divergence.py", RECIPE / "advantage.py"):
        assert len(file.read_text().splitlines()) <= 40
        shutil.copy(file, tmp_path / "mine")
    run = start(
        "algorithm.loss.name=mine/divergence.py:SkewKL", "algorithm.loss.alpha=0.2",
        "algorithm.advantage.name=mine/advantage.py:FixedBaseline", "algorithm.advantage.baseline=0.25",
        "reward.functions=[accuracy,mine/brevity.py:Brevity]", "reward.Brevity.bonus=2.0",
        "trainer.trackers=[mine/csv_tracker.py:Csv]", "trainer.Csv.file=own.csv",
        "rollout.engine=hf", "trainer.total_steps=3", "trainer.batch_size=8", "data.val_limit=8",
        "schedule.max_staleness=1", "actor.max_tokens_per_micro_batch=200",
        recipe="distill_and_reward",
    )  # fmt: skip
    assert run.end(240) == 0, run.text()
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["staleness/max"] for row in rows[1:]] == [0, 1, 1]
    assert ["mismatch/kl" in row for row in rows[1:]] == [True, False, False]  # of fresh tokens
    for row in rows[1:]:
        assert 0 <= row["timing_s/overlap"] <= row["timing_s/update"]  # gradients were added up in several chunks
        assert row["timing_s/drain"] >= 0
        assert row["advantage/mean"] == pytest.approx(row["reward/mean"] - 0.25)  # of built-in ones it is 0
        # KL is convex: mixing a share of the teacher into the student takes at least that share off forward KL.
        assert 0 < row["distill/loss"] <= 0.8 * row["distill/forward_kl"]
        assert row["actor/grad_norm"] > 0
        assert row["reward/Brevity/failed"] == 0.0
    samples = [json.loads(line) for line in (run.output / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        right, brevity = (sample["rewards"][name] for name in ("accuracy", f"{tmp_path}/mine/brevity.py:Brevity"))
        n_tokens = len(sample["response"].split()) + 1  # and the end token
        assert brevity == (2.0 * (1 - n_tokens / 100) if right else 0.0)
    with (run.output / "own.csv").open(newline="") as file:
        tracked = {(int(step), name): float(value) for step, name, value in csv.reader(file)}
    assert tracked == {(row["step"], name): value for row in rows for name, value in row.items() if name != "step"}
    config = yaml.safe_load((run.output / "config.yaml").read_text())
    assert config["reward"]["Brevity"] == {"bonus": 2.0, "limit": 100}  # complete, to be repeated from
    assert config["algorithm"]["loss"]["name"] == f"{tmp_path}/mine/divergence.py:SkewKL"
