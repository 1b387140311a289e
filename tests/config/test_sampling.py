"""The limit that rises."""

from __future__ import annotations

from gkd.config import load
from gkd.driver.loop.collect import sampling_of
from gkd.observability.watch import warnings


def test_a_horizon_rises_to_the_limit_and_stays() -> None:
    rollout = load({"rollout": {"horizon": {"start": 32, "end": 232, "steps": 100}}}).rollout
    assert [rollout.limit_at(step) for step in (1, 2, 51, 101, 5000)] == [32, 34, 132, 232, 232]
    assert sampling_of(rollout, 51).max_tokens == 132
    assert load({}).rollout.limit_at(1) == load({}).rollout.max_response_length
    assert load({"rollout": {"horizon": {"start": 32}}}).rollout.limit_at(1000) == 256


def test_wanted_cuts_are_not_warned_of() -> None:
    config, cut = load({}), {"response/clip_ratio": 0.9}
    for limit, warned in (({"response/limit": 100.0}, False), ({"response/limit": 256.0}, True), ({}, True)):
        assert any(name == "response/clip_ratio" for name, _ in warnings(config, "cpu", cut | limit)) is warned
