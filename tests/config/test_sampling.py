"""The limit that rises, and temperatures."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from gkd.config import load
from gkd.driver.loop.collect import sampling_of
from gkd.errors import ConfigError
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


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({}, False),
        ({"temperature": 3}, True),
        ({"temperature": 0.001}, True),
        ({"temperature": 2}, False),
    ],
)
def test_a_set_is_sampled_at_a_temperature_that_its_engine_has(settings: dict[str, float], is_refused: bool) -> None:
    """Without one it is greedy; another engine, or a model behind an endpoint, may sample at any."""
    sets = {"s": {"files": ["a"], **settings}}
    endpoint = {"m": {"url": "http://127.0.0.1/v1", "model": "a"}}
    training = {"data": {"val_sets": sets}}
    evaluation = {"models": {"m": "/m"}, "evaluate": {"sets": sets}}
    for section, config in (("data.val_sets", training), ("evaluate.sets", evaluation)):
        expected = rf"{section}\.s\.temperature=.*rollout\.engine"
        with pytest.raises(ConfigError, match=expected) if is_refused else nullcontext():
            assert load(config)
        assert load({**config, "rollout": {"engine": "hf"}})
    assert load({"evaluate": {"sets": sets, "endpoints": endpoint}})
