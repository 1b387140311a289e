"""What the teacher is asked for, in training and at validation."""

from __future__ import annotations

from typing import Any

import pytest

from gkd.config import Config, load
from gkd.config.top_k import required_top_k, top_k_for_validation
from gkd.errors import ConfigError


def algorithm(**settings: Any) -> Config:
    n = 1 if settings.get("name", "on_policy_distill") == "on_policy_distill" else 2
    rewards = {"functions": ["accuracy"]} if n > 1 else {}
    return load({"algorithm": settings, "rollout": {"n": n}, "reward": rewards})


@pytest.mark.parametrize(
    ("settings", "training"),
    [
        ({"loss": {"top_k": 4}}, 4),
        ({"loss": {"top_k": 2_000}}, 2_000),
        ({"loss": {"name": "sampled_reverse_kl"}}, 0),
        ({"name": "grpo", "advantage": {"teacher_kl": 0.1}}, 0),
        ({"name": "gspo", "advantage": {"teacher_kl": 0.1}}, 0),
    ],
)
def test_validation_asks_for_the_same_in_every_run(settings: dict[str, Any], training: int) -> None:
    config = algorithm(**settings)
    assert required_top_k(config, 151_936) == training
    assert top_k_for_validation(config, 151_936) == 512
    assert top_k_for_validation(config, 20) == 20  # exact


def test_what_the_teacher_may_not_be_asked_for_is_named() -> None:
    config = load({"data": {"val_top_k": 100}, "teacher": {"max_top_k": 64}, "algorithm": {"loss": {"top_k": 64}}})
    assert top_k_for_validation(config, 64) == 64
    with pytest.raises(ConfigError, match=r"data\.val_top_k=100 needs 100 .*teacher\.max_top_k=64"):
        top_k_for_validation(config, 1000)
    for top_k, setting in ((None, r"top_k=null \(full vocabulary\)"), (65, "top_k=65")):
        config = load({"teacher": {"max_top_k": 64}, "algorithm": {"loss": {"top_k": top_k}}})
        assert required_top_k(config, 64) == 64
        with pytest.raises(ConfigError, match=rf"algorithm\.loss\.{setting} needs .*teacher\.max_top_k=64"):
            required_top_k(config, 1000)
