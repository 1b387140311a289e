"""What a run says at its end of other splits of its GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from gkd.config import Config
from gkd.config.compose import compose
from gkd.planning.splits import faster_split
from tests.planning.layouts import DATA, layout_of

RUN = ("+recipe=on_policy_distill", "model.size=1.5b", "teacher.model.size=7b", "plan.gpu_type=h200",
       "trainer.n_gpus_per_node=2", "rollout.n_gpus_per_node=3", "teacher.n_gpus_per_node=3")  # fmt: skip


def written(directory: Path, update: float) -> Config:
    """A run whose sampling took 10 s a step, its scoring little more, and its update so long."""
    config = compose([*DATA, *RUN])
    (directory / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config.model_dump())))
    row = {"timing_s/generate": 10.0, "timing_s/score": 0.5, "timing_s/update": update, "timing_s/sync": 0.1,
           "response/length_mean": 100.0, "response/length_max": 250.0}  # fmt: skip
    lines = [json.dumps({"step": step, **row}) for step in (1, 2, 3)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return config


def test_a_group_that_sets_the_pace_would_get_gpus_of_the_others(tmp_path: Path) -> None:
    config = written(tmp_path, update=60.0)
    text = faster_split(config, tmp_path)
    assert text.startswith("with what was measured, by gkd plan's simulation (")
    overrides = text.partition(" s: ")[2].split()
    pasted = layout_of(*RUN, *overrides).config
    assert pasted.trainer.n_workers > 2
    assert sum(pool.n_workers for _, pool in pasted.pools()) <= 8
    again = faster_split(pasted.model_copy(), tmp_path)
    assert "no other split of" in again


def test_what_cannot_be_known_is_said_and_shared_gpus_are_left_as_they_are(tmp_path: Path) -> None:
    config = written(tmp_path, update=6.0)
    (tmp_path / "metrics.jsonl").write_text("")
    assert faster_split(config, tmp_path).endswith("metrics.jsonl has no step with timings yet")
    assert faster_split(compose([*DATA, *RUN[:4], "placement=single_gpu"]), tmp_path) == ""


@pytest.mark.parametrize("update", [4.0, 60.0])
def test_the_present_step_is_the_measured_one(tmp_path: Path, update: float) -> None:
    """Streaming hides some of both, so it is between the longer and the sum."""
    text = faster_split(written(tmp_path, update), tmp_path)
    now = float(text.partition("(")[2].partition(" s a step")[0])
    assert max(10.0, update) < now < 10.0 + update + 2
