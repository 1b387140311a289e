"""Code of the user's own, in a folder outside of the project, in a whole run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT


def test_a_divergence_and_an_advantage_of_the_users_own_train_the_student(start: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("divergence.py", "advantage.py"):
        shutil.copy(ROOT / "recipes" / "your_own" / name, tmp_path / "mine")
    run = start(
        "algorithm.loss.name=mine/divergence.py:SkewKL", "algorithm.loss.alpha=0.2",
        "algorithm.advantage.name=mine/advantage.py:FixedBaseline", "algorithm.advantage.baseline=0.25",
        "rollout.engine=hf", "trainer.total_steps=1", "trainer.batch_size=8",
        recipe="distill_and_reward",
    )  # fmt: skip
    assert run.end(240) == 0, run.text()
    row = run.metrics()[1]
    assert row["advantage/mean"] == pytest.approx(row["reward/mean"] - 0.25)  # of built-in ones it is 0
    # KL is convex: mixing a share of the teacher into the student takes at least that share off forward KL.
    assert 0 < row["distill/loss"] <= 0.8 * row["distill/forward_kl"]
    assert row["actor/grad_norm"] > 0
    assert f"name: {tmp_path}/mine/divergence.py:SkewKL" in (run.output / "config.yaml").read_text()
