"""The best split of N GPUs: against trying every one, that it fits, and that it can be placed; and that of a run."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gkd.cluster.layout.nodes import Node, group_requests, solve
from gkd.config import Config
from gkd.config.compose import compose
from gkd.config.loading import dump_yaml
from gkd.errors import ConfigError
from gkd.planning.advice import splits as advice
from gkd.planning.advice.splits import best_splits, find_faster_split
from gkd.planning.memory.colocation import all_memory
from gkd.planning.simulation.steps import simulate_layout
from tests.planning.layouts import DATA, layout_of

TINY = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 300
}  # fmt: skip
SMALL = ("+recipe=on_policy_distill", "model.size=1.5b", "teacher.model.size=3b", "trainer.batch_size=256")
LARGE = ("+recipe=on_policy_distill", "model.size=7b", "teacher.model.size=72b", "trainer.batch_size=16384")


def test_no_split_of_eight_is_faster() -> None:
    s = layout_of(*SMALL)
    every = []
    for a, r, t in itertools.product(range(1, 7), repeat=3):
        if a + r + t <= 8:
            settings = {"trainer.n_gpus_per_node": a, "rollout.n_gpus_per_node": r, "teacher.n_gpus_per_node": t}
            tried = replace(s, config=s.config.with_settings(settings))
            if all(group.fits for group in all_memory(tried)):
                every.append(simulate_layout(tried, 0).seconds)
    splits = best_splits(s, 8)
    assert [split.step.seconds for split in splits] == pytest.approx(sorted(every)[:3])


@pytest.mark.parametrize("n_gpus", [8, 24])
def test_what_is_offered_fits_and_can_be_placed_as_it_is_pasted(n_gpus: int) -> None:
    overrides = SMALL if n_gpus == 8 else LARGE
    for split in best_splits(layout_of(*overrides), n_gpus):
        pasted = compose([*DATA, *overrides, *split.overrides().split()])
        assert sum(pool.n_workers for _, pool in pasted.pools()) == sum(split.gpus.values()) <= n_gpus
        again = layout_of(*overrides, *split.overrides().split())
        assert all(group.fits for group in all_memory(again))
        assert simulate_layout(again, 0).seconds == pytest.approx(split.step.seconds)
        nodes = [Node(str(i), str(i), tuple(range(8)), 0.0).as_idle() for i in range(n_gpus // 8)]
        assert solve(group_requests(pasted), nodes, 0.0) is not None


RATED = ("+recipe=grpo", "model.size=0.5b", "reward.functions=[reward_model]", "algorithm.kl.coef=0.1")


@pytest.mark.parametrize(
    ("placement", "rated"),
    [("single_gpu", False), ("3gpu", False), ("2gpu", True), ("8gpu", True)],
)
def test_a_split_gives_every_group_gpus_of_its_own(placement: str, rated: bool, tmp_path: Path) -> None:
    """Also where the command shares them, or names them; and beside a reward model."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    own = (*RATED, f"reward_model.model.path={tmp_path}") if rated else SMALL
    overrides = (*own, f"placement={placement}", "plan.gpu_type=h200")
    for split in best_splits(layout_of(*overrides), 16):
        again = layout_of(*overrides, *split.overrides().split())
        assert again.config.hosts() == {}
        assert set(split.gpus) >= {"reference", "reward_model"} if rated else {"teacher"}
        assert all(group.fits for group in all_memory(again))
        assert simulate_layout(again, 0).seconds == pytest.approx(split.step.seconds)


def test_engines_that_do_not_divide_a_node_are_offered_no_whole_ones() -> None:
    wide = ("+recipe=grpo", "model.size=7b", "plan.gpu_type=h100-80gb", "plan.gpus_per_node=6",
            "rollout.n_gpus_per_node=4")  # fmt: skip
    long = ("rollout.max_response_length=2048", "plan.response_length=2048", "actor.gradient_checkpointing=true")
    overrides = (*wide, *long, "rollout.tensor_parallel_size=4")
    for split in best_splits(layout_of(*overrides), 36):
        assert layout_of(*overrides, *split.overrides().split()).config.rollout.n_gpus_per_node == 4


def test_a_teacher_too_large_for_one_gpu_gets_several() -> None:
    split = best_splits(layout_of(*LARGE), 16)[0]
    assert split.settings["teacher.tensor_parallel_size"] > 1
    assert split.settings["teacher.n_gpus_per_node"] % split.settings["teacher.tensor_parallel_size"] == 0


def test_no_split_is_another_one_with_gpus_that_do_not_help() -> None:
    """A batch of eight on forty GPUs: more engines than samples help nobody."""
    splits = best_splits(layout_of(*SMALL, "trainer.batch_size=8", "plan.gpu_type=h200"), 40)
    for one, other in itertools.permutations(splits, 2):
        faster = one.step.seconds < other.step.seconds - 1e-9
        assert faster or any(one.gpus[group] < n for group, n in other.gpus.items())


def test_an_engine_spans_nodes_only_where_it_may() -> None:
    """A teacher of 405 billion parameters on nodes of four cards of 141 GB."""
    wide = (*SMALL, "teacher.model.size=405b", "plan.gpu_type=h200", "plan.gpus_per_node=4")
    with pytest.raises(ConfigError, match="teacher fits"):
        best_splits(layout_of(*wide), 24)
    split = best_splits(layout_of(*wide, "teacher.across_nodes=true"), 24)[0]
    assert split.settings["teacher.n_gpus_per_node"] == 4
    assert split.settings["teacher.tensor_parallel_size"] == 8
    assert split.gpus["teacher"] % 8 == 0
    again = layout_of(*wide, "teacher.across_nodes=true", *split.overrides().split())
    assert all(group.fits for group in all_memory(again))


def test_on_four_thousand_gpus_a_pool_is_measured_once_a_size_and_few_splits_are_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of billions of splits over four groups: a pool has at most 7 sizes in a node, 512 in whole ones, 7 in slices."""
    calls: Counter[str] = Counter()

    def count(name: str) -> None:
        function = getattr(advice, name)

        def counted(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        monkeypatch.setattr(advice, name, counted)

    for name in ("_measure", "pool_memory", "simulate_layout", "has_room"):
        count(name)
    splits = best_splits(layout_of(*LARGE, "algorithm.kl.coef=0.1"), 4096)
    assert calls["_measure"] <= 4 * (7 + 512 + 7)
    assert calls["pool_memory"] <= 7 + 512 + 7 + 3 * len(advice.WIDTHS)
    assert calls["simulate_layout"] <= advice.SIMULATED and calls["has_room"] <= advice.TRIED
    assert len(splits) == 3
    assert all(set(split.gpus) == {"actor", "rollout", "teacher", "reference"} for split in splits)
    assert splits[0].step.seconds <= splits[1].step.seconds <= splits[2].step.seconds


def test_a_split_of_a_layout_for_few_gpus_is_over_whole_nodes() -> None:
    """A placement says which machines there are now, and not what is offered."""
    one = layout_of("+recipe=grpo", "model.size=7b", "placement=single_gpu", "cluster.offload=true")
    for split in best_splits(one, 16):
        pasted = layout_of("+recipe=grpo", "model.size=7b", "placement=single_gpu", "cluster.offload=true",
                         *split.overrides().split())  # fmt: skip
        assert sum(pool.n_workers for _, pool in pasted.config.pools()) > 8
        assert all(pool.nnodes <= 2 for _, pool in pasted.config.pools())
        assert all(group.fits for group in all_memory(pasted))


def test_each_of_several_teachers_has_an_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    several = ("+recipe=on_policy_distill", "model.size=1.5b", f"+teacher.models.x={tmp_path}",
               f"+teacher.models.y={tmp_path}", "data.teacher_key=k", "teacher.n_gpus_per_node=2")  # fmt: skip
    for split in best_splits(layout_of(*several), 4):
        assert layout_of(*several, *split.overrides().split()).config.teacher.n_engines >= 2


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--best 2: 3 groups .*\(trainer, rollout, teacher\)"):
        best_splits(layout_of(*SMALL), 2)
    with pytest.raises(ConfigError, match=r"--best: teacher fits"):
        best_splits(layout_of(*SMALL, "teacher.model.size=405b"), 4)


RUN = ("+recipe=on_policy_distill", "model.size=1.5b", "teacher.model.size=7b", "plan.gpu_type=h200",
       "trainer.n_gpus_per_node=2", "rollout.n_gpus_per_node=3", "teacher.n_gpus_per_node=3")  # fmt: skip


def written(directory: Path, update: float) -> Config:
    """A run whose sampling took 10 s a step, its scoring little more, and its update so long."""
    config = compose([*DATA, *RUN])
    (directory / "config.yaml").write_text(dump_yaml(config))
    row = {"timing_s/generate": 10.0, "timing_s/score": 0.5, "timing_s/update": update, "timing_s/sync": 0.1,
           "response/length_mean": 100.0, "response/length_max": 250.0}  # fmt: skip
    lines = [json.dumps({"step": step, **row}) for step in (1, 2, 3)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return config


def test_a_group_that_sets_the_pace_would_get_gpus_of_the_others(tmp_path: Path) -> None:
    config = written(tmp_path, update=60.0)
    text = find_faster_split(config, tmp_path, Config())
    assert "gkd plan" in text
    overrides = text.partition(" s: ")[2].split()
    pasted = layout_of(*RUN, *overrides).config
    assert pasted.trainer.n_workers > 2
    assert sum(pool.n_workers for _, pool in pasted.pools()) <= 8
    again = find_faster_split(pasted.model_copy(), tmp_path, Config())
    assert " s: " not in again and re.search(r"\b8 GPUs\b", again)


def test_what_cannot_be_known_is_said_and_shared_gpus_are_left_as_they_are(tmp_path: Path) -> None:
    config = written(tmp_path, update=6.0)
    (tmp_path / "metrics.jsonl").write_text("")
    text = find_faster_split(config, tmp_path, Config())
    assert text.rpartition(": ")[2].startswith("metrics.jsonl ") and "--from" not in text  # which nobody typed
    assert find_faster_split(compose([*DATA, *RUN[:4], "placement=single_gpu"]), tmp_path, Config()) == ""


@pytest.mark.parametrize("update", [4.0, 60.0])
def test_the_present_step_is_the_measured_one(tmp_path: Path, update: float) -> None:
    """Streaming hides some of both, so it is between the longer and the sum."""
    text = find_faster_split(written(tmp_path, update), tmp_path, Config())
    now = float(text.partition("(")[2].partition(" s a step")[0])
    assert max(10.0, update) < now < 10.0 + update + 2
