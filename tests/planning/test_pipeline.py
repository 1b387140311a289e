"""A step's time from its stages."""

from __future__ import annotations

import pytest

from gkd.planning.pipeline import step_of
from gkd.planning.stages import Stages

STAGES = Stages(generate=5.0, score=3.0, reference=0.0, update=4.0, sync=1.0, tail=0.5)


def test_without_staleness_the_update_waits_for_the_samples() -> None:
    step = step_of(STAGES, 0)
    assert step.seconds == 5.0 + 0.5 + 4.0 + 1.0
    assert step.waits == {"actor": 5.5, "rollout": 4.5, "teacher": 7.5}


def test_one_step_off_lasts_as_long_as_the_longer_side() -> None:
    assert step_of(STAGES, 1).seconds == 5.0 + 0.5 + 1.0
    slow_update = Stages(5.0, 3.0, 0.0, 20.0, 1.0, 0.5)
    step = step_of(slow_update, 1)
    assert step.seconds == 21.0
    assert step.bound == "actor"
    assert step.waits["actor"] == 0
    assert step.waits["rollout"] == 15.0


def test_further_ahead_nobody_waits_for_the_last_scores() -> None:
    step = step_of(STAGES, 2)
    assert step.seconds == 6.0
    assert step.bound == "rollout"
    assert step.waits["rollout"] == 0


def test_a_slow_teacher_sets_the_pace() -> None:
    stages = Stages(5.0, 30.0, 0.0, 4.0, 1.0, 0.5)
    assert [step_of(stages, k).seconds for k in (0, 1, 2)] == [35.5, 31.5, 30.0]
    assert step_of(stages, 1).bound == "teacher"


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_on_shared_cores_nothing_overlaps(staleness: int) -> None:
    everyone = dict.fromkeys(("actor", "rollout", "teacher"), "actor")
    assert step_of(STAGES, staleness, everyone).seconds == 5.0 + 3.0 + 4.0 + 1.0


def test_groups_on_the_same_gpus_take_turns() -> None:
    """Actor and rollout on some, teacher, reference and reward model on others."""
    stages = Stages(generate=5.0, score=3.0, reference=2.0, update=4.0, sync=1.0, tail=0.5, reward=1.5)
    hosts = {"rollout": "actor", "reference": "teacher", "reward_model": "teacher"}
    assert step_of(stages, 0, hosts).seconds == (3.0 + 2.0 + 1.5) + 0.5 + 4.0 + 1.0
    assert step_of(stages, 1, hosts).seconds == 5.0 + 4.0 + 1.0
    assert step_of(stages, 2, hosts).seconds == 5.0 + 4.0 + 1.0
    assert step_of(stages, 2).seconds == 6.0
    assert step_of(stages, 0, hosts).waits["reward_model"] == 12.0 - 1.5
