"""Settings that change nothing, which a run begins by naming."""

from __future__ import annotations

from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from gkd.config import Config, load, settings
from gkd.config.compose import compose, groups
from gkd.config.idle import find_idle
from gkd.config.loading import dump_run
from gkd.errors import ConfigError

FILES = {"train_files": ["x"], "val_files": ["x"]}
RUNS: dict[str, dict[str, Any]] = {
    "rewards": {"algorithm": {"name": "grpo"}, "rollout": {"n": 2}, "reward": {"functions": ["length"]}},
    "external": {"model": {"path": "m"}, "data": FILES, "teacher": {"server_ip": "127.0.0.1", "model": {"path": "t"}}},
    "supervised": {"algorithm": {"name": "sft"}},
}
TREES = {run: load(tree).model_dump() for run, tree in RUNS.items()}
SECTIONS = {
    "rewards": ("teacher", "reference", "reward_model"),
    "external": ("teacher", "reference", "reward_model", "reward"),
    "supervised": ("teacher", "reference", "reward_model", "reward"),
}
IDLE = [
    (run, name)
    for run, sections in SECTIONS.items()
    for name in settings()
    if name.partition(".")[0] in sections and not (name.startswith("reward.") and name.count(".") > 1)
]
"""Every setting of the groups that a run does not start; those of single rewards have a test of their own."""
OTHERS = (True, 3, 0.5, 20000, "fp8", "vllm", "actor", [0.5], [[0]], {"x": "y"}, "8b", ["length"])
"""Values of which at least one is another one than the default, whatever the setting."""
REFUSED = {
    *((run, f"teacher.{name}") for run in ("rewards", "supervised") for name in ("server_ip", "model.path",
      "model.size", "models", "chat_template")),
    *((run, name) for run in RUNS for name in ("reference.model.path", "reward.functions", "reward.weights",
      "reward_model.engine")),
    *(("external", f"teacher.{name}") for name in ("models", "gpus", "gpus_by_node", "model.size")),
}  # fmt: skip
"""What ends the run before it begins, or takes a class or rewards of one's own."""
USED = {
    *(("external", f"teacher.{name}") for name in ("server_ip", "server_port", "key_file", "chat_template", "max_top_k",
      "request_timeout_s", "max_attempts", "heartbeat_s", "model.path")),
    *((run, "reward.set_functions") for run in RUNS),  # filled in, whatever is written
}  # fmt: skip
"""What has an effect without the group: a client of an external teacher reads it."""


def _with(run: str, setting: str, value: Any) -> Config | None:
    """Return a run with one more setting, and what that takes; None for one that is refused."""
    *sections, last = setting.split(".")
    tree = part = dict(TREES[run])
    for name in sections:
        part[name] = part = dict(part[name])
    part[last] = value
    if last == "tensor_parallel_size":
        part["n_gpus_per_node"] = value
    if last in ("gpus", "gpus_by_node"):
        part["n_gpus_per_node"] = part["nnodes"] = None
    try:
        return load(tree)
    except ConfigError:
        return None


@pytest.mark.parametrize(("run", "setting"), IDLE)
def test_every_setting_of_a_group_that_a_run_does_not_start_is_named_or_refused_or_used(run: str, setting: str) -> None:
    default, section = reduce(getitem, setting.split("."), TREES[run]), setting.partition(".")[0]
    taken = filter(None, (_with(run, setting, value) for value in OTHERS))
    config = next((one for one in taken if one.read_setting(setting)[0] not in (default, [])), None)
    assert (config is None) is ((run, setting) in REFUSED) or (run, setting) in USED
    if config is None or (run, setting) in USED:
        assert config is None or list(find_idle(config)) == []
        return
    (line,), now = find_idle(config), config.read_setting(setting)[0]
    shown = str(now).lower() if isinstance(now, bool) else str(now)
    assert f"{setting}={shown}" in line and " nothing: " in line
    assert line.partition(" nothing: ")[0].count(f"{section}.") == 1 or setting.endswith("tensor_parallel_size")


def test_settings_of_one_group_are_one_line_that_names_why() -> None:
    outside = ["teacher.server_ip=127.0.0.1", "model.path=m", "data.train_files=[x]", "data.val_files=[x]"]
    named = ["teacher.max_num_seqs=4", "teacher.quantization=fp8", "teacher.n_gpus_per_node=4"]
    (line,) = find_idle(compose([*outside, *named]))
    assert all(setting in line for setting in (*named, *outside[:1]))
    named = ["reference.max_num_seqs=4", "reference.engine=vllm"]
    for run, why in (([], "algorithm.kl.coef=0"), (["algorithm.kl.coef=0.1", "actor.lora.r=4"], "actor.lora.r=4")):
        (line,) = find_idle(compose(["+recipe=grpo", *run, *named]))
        assert all(setting in line for setting in (*named, why))


@pytest.mark.parametrize(
    ("run", "setting"),
    [
        (["+recipe=on_policy_distill"], "teacher.server_port=1"),
        (["+recipe=grpo"], "watch.distill_kl=[0,1]"),
        (["+recipe=grpo"], "watch.reference_kl=[0,1]"),
        (["+recipe=on_policy_distill"], "watch.no_advantage_steps=3"),
        (["+recipe=sft"], "watch.mismatch_kl=0.5"),
        (["+recipe=grpo", "algorithm.kl.coef=0.1"], "reference.max_top_k=5"),
    ],
)
def test_a_setting_beside_those_that_have_an_effect_is_warned_of(run: list[str], setting: str) -> None:
    (line,) = find_idle(compose([*run, setting]))
    assert line.startswith(f"{setting.partition('=')[0]}=")


def test_what_has_an_effect_all_the_same_is_not_warned_of() -> None:
    """The key is that of all scorers' sockets; a group that is not there passes on whose GPUs others share."""
    assert not list(find_idle(compose(["+recipe=on_policy_distill", "teacher.key_file=k", "watch.distill_kl=[0,1]"])))
    reference = ["+recipe=grpo", "algorithm.kl.coef=0.1", "teacher.key_file=k"]
    passed_on = ["reference.colocate_with=teacher", "teacher.colocate_with=actor"]
    assert not list(find_idle(compose([*reference, *passed_on, "watch.reference_kl=[0,1]"])))
    sets = ["data.val_sets.a.files=[x]", "data.val_sets.a.rewards=[length]", "data.val_sets.a.answer_key=answer"]
    assert not list(find_idle(compose([*sets, "reward.workers=3", "reward.timeout_s=5"])))
    assert list(find_idle(compose([*sets, "reward.weights=[]"])))


@pytest.mark.parametrize("recipe", groups()["recipe"])
def test_nobody_is_warned_of_what_a_recipe_a_placement_or_a_runs_file_has(recipe: str, tmp_path: Path) -> None:
    for placement in groups()["placement"]:
        config = compose([f"+recipe={recipe}", f"placement={placement}"])
        lines = list(find_idle(config))
        assert all(line.startswith(f"placement={placement} has ") for line in lines)
    (tmp_path / "config.yaml").write_text(dump_run(config, config))
    assert list(find_idle(compose([str(tmp_path / "config.yaml")]))) == lines


def test_gpus_of_a_placement_for_a_group_that_the_run_does_not_have_are_named() -> None:
    (warning,) = find_idle(compose(["+recipe=grpo", "placement=8gpu"]))
    assert warning.startswith("placement=8gpu has 4 GPUs for teacher") and "algorithm.name=grpo" in warning
    assert not list(find_idle(compose(["+recipe=on_policy_distill", "placement=8gpu"])))
    for placement in ("auto", "cpu", "4gpu", "single_gpu"):  # one GPU, or that of another group
        assert not list(find_idle(compose(["+recipe=grpo", f"placement={placement}"])))
    (warning,) = find_idle(compose(["+recipe=grpo", "placement=3gpu"]))
    assert warning.startswith("placement=3gpu has 1 GPU for teacher")
    assert not list(find_idle(compose(["+recipe=grpo", "placement=3gpu", "algorithm.kl.coef=0.1"])))  # the reference's


def test_settings_of_classes_that_are_not_named_are_warned_of() -> None:
    own = {"reward": {"functions": ["format"], "length": {"target_length": 3}}, "trainer": {"wandb": {"project": "x"}}}
    one, other = find_idle(load({"algorithm": {"name": "grpo"}, "rollout": {"n": 2}, **own}))
    assert "reward.length.*" in one and "reward.functions" in one
    assert "trainer.wandb.*" in other and "trainer.trackers" in other


def test_a_runs_file_may_hold_defaults_of_what_is_named_no_more() -> None:
    run = {"algorithm": {"name": "grpo"}, "rollout": {"n": 2}, "reward": {"functions": ["format", "length"]}}
    again = load(run).model_dump()
    assert again["reward"]["length"] and again["reward"]["format"]
    again["reward"]["functions"] = ["format"]
    assert not list(find_idle(load(again)))


@pytest.mark.parametrize(
    ("idle", "needed"),
    [
        ("algorithm.overlong.buffer=8", "algorithm.overlong.action=penalty"),
        ("algorithm.kl.estimator=k1", "algorithm.kl.coef=0.1"),
        ("algorithm.importance_sampling.cap=5", "algorithm.importance_sampling.level=token"),
        ("algorithm.importance_sampling.mask=true", "algorithm.importance_sampling.level=token"),
        ("rollout.horizon.steps=5", "rollout.horizon.start=4"),
        ("schedule.recompute_cache=false", "schedule.in_flight=true"),
        ("reward_model.model.path=/m", "reward.functions=[reward_model]"),
    ],
)
def test_a_setting_without_effect_is_warned_of(idle: str, needed: str) -> None:
    run = ["+recipe=grpo", "algorithm.importance_sampling.level=null", "schedule.max_staleness=1"]
    (warning,) = find_idle(compose([*run, idle]))
    setting, _, value = idle.partition("=")
    assert warning.startswith(f"{setting}={value}") and needed.partition("=")[0] in warning
    assert not list(find_idle(compose([*run, idle, needed])))


def test_a_loss_over_the_full_vocabulary_has_no_tail() -> None:
    (warning,) = find_idle(load({"algorithm": {"loss": {"tail": False}}}))
    assert warning.startswith("algorithm.loss.tail=false") and "algorithm.loss.top_k" in warning
    assert not list(find_idle(load({"algorithm": {"loss": {"tail": False, "top_k": 4}}})))
