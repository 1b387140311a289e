"""Warnings of a run: when they are given, and that each names the setting to change."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from gkd.config import Config, load
from gkd.config.device import Device
from gkd.data.model_info import ModelInfo
from gkd.observability.watch import AGAIN_AFTER, Watcher, warnings
from tests.error_text import contains_in_order

KEEPS_CACHE = {"max_staleness": 1, "in_flight": True, "recompute_cache": False}
UNWEIGHTED = {"name": "grpo", "importance_sampling": {"level": None}}


@pytest.mark.parametrize(
    ("metrics", "parts"),
    [
        ({"response/clip_ratio": 0.06}, ["6% of the responses", "rollout.max_response_length=256"]),
        ({"distill/reverse_kl": 5.1}, ["watch.distill_kl=[0, 5]", "actor.lr"]),
        ({"actor/kl_reference": 0.6}, ["watch.reference_kl", "algorithm.kl.coef"]),
        ({"reward/judge/kl": 0.3}, ["outside watch.reward_kl.judge=[0, 0.2]", "weight of judge", "algorithm.kl.coef"]),
        ({"mismatch/kl": 0.1}, ["mismatch/kl 0.1", "algorithm.importance_sampling.level=token"]),
        ({"reward/judge/seconds": 7.0}, ["7.0 s a sample", "reward.judge.slow_s=6", "reward.judge.max_tokens"]),
    ],
)
def test_what_is_wrong_is_said_with_the_setting_to_change(metrics: dict[str, float], parts: list[str]) -> None:
    judge = {"url": "http://host/v1", "model": "m"}
    reward = {"functions": ["judge"], "judge": judge}
    watch = {"reward_kl": {"judge": [0, 0.2]}}
    config = load(
        {"algorithm": {"name": "grpo", "kl": {"coef": 0.1}}, "rollout": {"n": 2}, "reward": reward, "watch": watch}
    )
    ((name, text),) = warnings(config, "cpu", metrics)
    assert name in metrics
    assert all(part in text for part in parts)


@pytest.mark.parametrize(
    ("settings", "device", "named"),
    [
        ({}, "cuda", {"model.dtype"}),  # auto is level=token there
        ({}, "cpu", {"algorithm.importance_sampling.level", "rollout.engine"}),
        ({"model": {"dtype": "float32"}}, "cuda", {"algorithm.importance_sampling.level", "rollout.engine"}),
        ({"schedule": {"max_staleness": 1}}, "cpu", {"rollout.engine"}),
        ({"schedule": KEEPS_CACHE}, "cpu", {"schedule.recompute_cache"}),
        ({"actor": {"lora": {"r": 4, "quantize": "nf4"}}}, "cuda", {"actor.lora.quantize", "model.dtype"}),
        ({"algorithm": {"name": "on_policy_distill"}}, "cpu", {"rollout.engine"}),
        ({"algorithm": UNWEIGHTED}, "cuda", {"algorithm.importance_sampling.level", "model.dtype"}),
    ],
)
def test_what_makes_sampler_and_trainer_differ_is_named_and_nothing_else(
    settings: dict[str, Any], device: Device, named: set[str]
) -> None:
    config = load({"algorithm": {"name": "grpo"}, "rollout": {"n": 2}, **settings})
    ((_, text),) = warnings(config, device, {"mismatch/kl": 0.1})
    assert set(re.findall(r"[a-z_]+(?:\.[a-z_]+)+", text)) - {"watch.mismatch_kl"} == named


def test_rows_that_are_never_sampled_are_named_where_no_setting_makes_sampler_and_trainer_differ() -> None:
    for device, expected in (("cpu", True), ("cuda", False)):  # where the dtype makes them
        config = load({"algorithm": UNWEIGHTED, "rollout": {"n": 2}})
        ((_, text),) = warnings(config, device, {"mismatch/kl": 0.1}, n_unsampled=16)
        assert ("(16)" in text) is expected
        assert ModelInfo(64, None, [], 48).n_unsampled == 16 and ModelInfo(64, None, [], 0).n_unsampled == 0


def test_masking_is_advised_where_it_is_possible_and_not_done() -> None:
    advice = "algorithm.overlong.action=mask"
    masked = {"algorithm": {"overlong": {"action": "mask"}}}
    early = {"rollout": {"horizon": {"start": 8}}}  # a run with that refuses to mask
    for settings, expected in (({}, True), (masked, False), (early, False)):
        ((_, text),) = warnings(load(settings), "cpu", {"response/clip_ratio": 1.0})
        assert (advice in text) is expected and "rollout.max_response_length=256" in text


def test_a_student_that_is_the_teacher_is_not_outside_the_band() -> None:
    # The mean of log q(y) - log p(y) over sampled tokens is about 0 then, on either side of it.
    assert list(warnings(Config(), "cpu", {"distill/reverse_kl": -0.0002})) == []
    ((name, _),) = warnings(Config(), "cpu", {"distill/reverse_kl": -0.5})
    assert name == "distill/reverse_kl"


def test_what_is_right_is_not_mentioned() -> None:
    fine = {"response/clip_ratio": 0.05, "distill/reverse_kl": 4.9, "actor/kl_reference": 0.1, "mismatch/kl": 1e-5}
    assert list(warnings(Config(), "cpu", fine)) == []
    early = {"response/clip_ratio": 1.0, "response/limit": 8.0}  # as rollout.horizon has it for the time being
    assert list(warnings(Config(), "cpu", early)) == []
    assert list(warnings(load({"watch": {"truncation_rate": 0.5}}), "cpu", {"response/clip_ratio": 0.4})) == []


def test_a_warning_is_not_repeated_at_every_step(caplog: pytest.LogCaptureFixture) -> None:
    watcher = Watcher(Config(), "cpu")
    with caplog.at_level(logging.WARNING, logger="gkd"):
        for step in range(1, AGAIN_AFTER + 2):
            watcher.check(step, {"response/clip_ratio": 1.0})
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["step 1", f"step {AGAIN_AFTER + 1}"]


def test_rewards_that_teach_nothing_for_many_steps_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = load({"algorithm": {"name": "grpo"}, "rollout": {"n": 4}, "watch": {"no_advantage_steps": 3}})
    watcher, nothing = Watcher(config, "cpu"), {"advantage/mean": 0.0, "advantage/std": 0.0, "reward/mean": 0.0}
    same_for_all = {**nothing, "advantage/mean": 0.5}  # without a baseline there is something to learn
    with caplog.at_level(logging.WARNING, logger="gkd"):
        for step, metrics in enumerate((nothing, nothing, same_for_all, nothing, nothing, nothing, nothing), start=1):
            watcher.check(step, metrics)
        Watcher(config, "cpu").check(1, {"distill/reverse_kl": 0.1})
    (text,) = (record.getMessage() for record in caplog.records)
    parts = ("step 6: ", "3 steps", "watch.no_advantage_steps=3", "reward/mean 0", "samples.jsonl", "rollout.n=4")
    assert contains_in_order(text, *parts, "algorithm.dynamic_sampling.max_rounds")
