"""The same command on a laptop, one GPU, two and eight: placement=auto shares what there is."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache

import pytest

from gkd.cluster.layout.fit import require_fit, share_gpus
from gkd.cluster.layout.nodes import Node, group_requests, make_idle_nodes, solve
from gkd.cluster.session import connect as session
from gkd.cluster.session.connect import _plan_private
from gkd.config import Config
from gkd.config.checks import require_schedule
from gkd.config.compose import compose, groups
from gkd.errors import ConfigError
from gkd.planning.advice.advise import requires_offload, settings_with_offload
from gkd.planning.layout import models_of

DISTIL = "+recipe=on_policy_distill"
FIVE_GROUPS = [
    "+recipe=distill_and_reward", "algorithm.kl.coef=0.1", "reward.functions=[accuracy,reward_model]",
    "reward_model.model.path=DIR",
]  # fmt: skip
WIDE = [DISTIL, "trainer.n_gpus_per_node=2", "rollout.n_gpus_per_node=2", "rollout.tensor_parallel_size=2"]


def placed(config: Config) -> dict[str, int]:
    """GPUs of each group."""
    return {section: pool.n_gpus_per_node for section, pool in config.pools()}


@pytest.mark.parametrize(
    ("overrides", "n_gpus", "name"),
    [
        ([DISTIL], 1, "single_gpu"),
        ([DISTIL], 2, "2gpu"),
        ([DISTIL], 3, None),
        ([DISTIL], 8, None),
        (["+recipe=grpo"], 1, "single_gpu"),
        (["+recipe=grpo"], 2, None),
        (FIVE_GROUPS, 1, "single_gpu"),
        (FIVE_GROUPS, 2, "2gpu"),
        (FIVE_GROUPS, 3, "3gpu"),
        (FIVE_GROUPS, 4, "4gpu"),
        (FIVE_GROUPS, 5, None),
        ([DISTIL], 0, None),  # simulated ones are handed out instead
    ],
)
def test_fewer_gpus_than_groups_are_shared(overrides: list[str], n_gpus: int, name: str | None) -> None:
    config, nodes = compose(overrides), make_idle_nodes([n_gpus])
    result = share_gpus(config, nodes)
    if name is None:
        assert result is config
        return
    layout = compose([*overrides, f"placement={name}"])
    assert placed(result) == placed(layout)
    assert result.hosts() == layout.hosts()
    assert result.rollout.gpu_memory_utilization == layout.rollout.gpu_memory_utilization
    assert solve(group_requests(result), nodes, 0.0) is not None
    assert share_gpus(result, nodes) is result  # a run that is resumed from its own config.yaml


@pytest.mark.parametrize(
    "own",
    ["rollout.n_gpus_per_node=2", "teacher.gpus=0", "rollout.colocate_with=actor", "placement=cpu", "placement=8gpu"],
)
def test_who_says_where_groups_go_is_not_overruled(own: str) -> None:
    config = compose([DISTIL, own])
    assert share_gpus(config, make_idle_nodes([1])) is config


def test_what_the_user_set_stays() -> None:
    config = compose([DISTIL, "rollout.gpu_memory_utilization=0.4", "rollout.max_num_seqs=7", "trainer.total_steps=3"])
    result = share_gpus(config, make_idle_nodes([1]))
    assert (result.rollout.gpu_memory_utilization, result.teacher.gpu_memory_utilization) == (0.4, 0.25)
    assert (result.rollout.max_num_seqs, result.trainer.total_steps) == (7, 3)


def test_gpus_are_those_that_the_machine_lets_be_seen() -> None:
    result = share_gpus(compose([DISTIL]), [Node("", "here", (2, 5), 0.0)])
    assert (result.trainer.gpus, result.rollout.gpus, result.teacher.gpus) == ([2, 5], [2, 5], [5])


@pytest.mark.parametrize(
    ("placement", "visible", "own"),
    [
        ("2gpu", (6, 7), ([6, 7], [6, 7], [7])),
        ("3gpu", (1, 2, 3), ([1, 2], [1, 2], [3])),
        ("8gpu_two_actors", (0, 1, 2, 4, 5, 6, 7, 9), ([2, 4], [0, 1], [5, 6, 7, 9])),
    ],
)
def test_a_placement_counts_the_gpus_that_the_machine_lets_be_seen(
    placement: str, visible: tuple[int, ...], own: tuple[list[int], ...]
) -> None:
    nodes = [Node("", "here", visible, 16.0)]
    result = share_gpus(compose([DISTIL, f"placement={placement}"]), nodes)
    assert (result.trainer.gpus, result.rollout.gpus, result.teacher.gpus) == own
    require_fit(group_requests(result), nodes, 1.0)


@pytest.mark.parametrize("placement", [["placement=2gpu"], []])
def test_ranges_of_a_user_are_indices(placement: list[str]) -> None:
    """Also beside a placement, and where they are such as one has."""
    first = 2 if placement else 0
    ranges = [f"trainer.gpus={first}-{first + 1}", f"rollout.gpus={first}-{first + 1}", f"teacher.gpus={first + 1}"]
    config = compose([DISTIL, *placement, *ranges, "rollout.colocate_with=actor", "teacher.colocate_with=actor"])
    nodes = [Node("", "here", (4, 5, 6, 7), 16.0)]
    assert share_gpus(config, nodes) is config
    with pytest.raises(ConfigError, match=r"trainer\.gpus=\S+ is beyond"):
        require_fit(group_requests(config), nodes, 1.0)


@pytest.mark.parametrize("recipe", [[DISTIL], FIVE_GROUPS, WIDE])
@pytest.mark.parametrize("placement", groups()["placement"])
def test_what_is_named_as_the_nearest_fits_when_it_is_pasted(placement: str, recipe: list[str]) -> None:
    overrides, answers = [*recipe, f"placement={placement}"], list[str]()
    for sizes in ([1], [2], [3], [4], [7], [2, 2], [1, 3], [4, 4, 4]):
        nodes = [replace(node, cpus=64.0) for node in make_idle_nodes(sizes)]
        if (named := refused_on(nodes, overrides)) is not None:
            answers.append(named)
            assert named.startswith("no layout") or refused_on(nodes, [*overrides, *named.split()]) is None
    assert answers or placement in ("auto", "single_gpu")  # which fit on any machine


@cache
def composed(*overrides: str) -> Config:
    """Compose once what is tried on many machines."""
    return compose(overrides)


def refused_on(nodes: list[Node], overrides: list[str]) -> str | None:
    """What the message of a refused layout names to be pasted, or that none fits; None where it is not refused."""
    config = composed(*overrides)
    try:
        require_fit(group_requests(share_gpus(config, nodes)), nodes, config.cluster.cpus_per_worker)
    except ConfigError as error:
        *_, answer = str(error).split("; ")
        answer = answer.removeprefix("nearest that fits: ").removesuffix(" lets them share")
        return answer.partition(" in place of ")[0]  # a placement's own ranges, which another placement replaces
    return None


def test_two_machines_of_one_gpu_run_what_one_of_them_could() -> None:
    assert share_gpus(compose([DISTIL]), make_idle_nodes([1, 1])).hosts() == {"rollout": "actor", "teacher": "actor"}


@pytest.mark.parametrize(("n_gpus", "workers"), [(0, 3), (1, 3), (2, 5), (3, 3), (8, 3)])
def test_a_private_ray_starts_on_any_machine(n_gpus: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two cores, too."""
    monkeypatch.setattr(session.gpu, "nvml_uuids", lambda: [f"GPU-{i}" for i in range(n_gpus)])
    monkeypatch.setattr(session, "installed_device", lambda: "cuda")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _plan_private(compose([DISTIL])) == ((n_gpus, workers, False) if n_gpus else (3, 3, True))
    if n_gpus > 1:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(n_gpus - 1))
        assert _plan_private(compose([DISTIL])) == (1, 3, False)
    if n_gpus:
        with pytest.raises(ConfigError, match="asked for"):
            _plan_private(compose([DISTIL, f"rollout.n_gpus_per_node={n_gpus + 1}"]))
        monkeypatch.setattr(session, "installed_device", lambda: "cpu")  # the GPUs cannot be computed on
        assert _plan_private(compose([DISTIL])) == (3, 3, True)


@pytest.mark.parametrize(("size", "turns"), [(None, False), ("1.5b", True)])
def test_memory_decides_whether_they_take_turns(size: str | None, turns: bool) -> None:
    """The built-in task's models beside each other on one card of 24 GB, larger ones by turns on one of 40."""
    named = [f"model.size={size}", f"teacher.model.size={size}"] if size else []
    files = ["data.train_files=[x]", "data.val_files=[x]"] if size else []
    config = share_gpus(compose([DISTIL, *named, *files, "actor.gradient_checkpointing=true"]), make_idle_nodes([1]))
    assert config.cluster.offload == "auto"
    card = dict.fromkeys(("actor", "rollout", "teacher"), 40e9 if size else 24e9)
    assert requires_offload(config, models_of(config), card) == turns


def test_where_they_take_turns_nothing_is_sampled_ahead() -> None:
    """Also where that was requested, of a layout that memory was not known of."""
    schedule = ["schedule.max_staleness=2", "schedule.in_flight=true"]
    config = share_gpus(compose([DISTIL, *schedule]), make_idle_nodes([1]))
    for offload, max_staleness in ((False, 2), (True, 0)):
        decided = config.with_settings(settings_with_offload(config, offload))
        require_schedule(decided)
        assert (decided.cluster.offload, decided.schedule.max_staleness) == (offload, max_staleness)
        assert decided.schedule.in_flight is not offload
    assert config.own_gpus() == "rollout.colocate_with=null teacher.colocate_with=null"
    with pytest.raises(ConfigError, match=r"schedule\.max_staleness=2"):  # where both are requested
        compose([DISTIL, "placement=single_gpu", *schedule, "cluster.offload=true"])
