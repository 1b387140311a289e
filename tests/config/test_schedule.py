"""What staleness asks of other settings, and what it decides."""

from __future__ import annotations

from typing import Any

import pytest

from gkd.config import load
from gkd.config.compose import compose
from gkd.config.doubts import doubts
from gkd.errors import ConfigError


@pytest.mark.parametrize(
    ("algorithm", "level"),
    [
        ({"name": "grpo"}, "token"),
        ({"name": "gspo"}, "token"),
        ({"loss": {"name": "sampled_reverse_kl"}}, "token"),
        ({"loss": {"name": "jsd"}}, None),  # summed over the vocabulary: nothing to weigh
        ({"name": "grpo", "importance_sampling": {"level": "sequence"}}, "sequence"),
    ],
)
def test_samples_of_older_weights_are_weighted_by_themselves(algorithm: dict[str, Any], level: str | None) -> None:
    rewards = {"reward": {"functions": ["accuracy"]}, "rollout": {"n": 2}} if "name" in algorithm else {}
    for staleness, expected in ((0, level if "importance_sampling" in algorithm else None), (1, level)):
        config = load({"algorithm": algorithm, **rewards, "schedule": {"max_staleness": staleness}})
        assert config.algorithm_on("cpu").importance_sampling.level == expected


def test_reverse_kl_on_old_samples_is_warned_of() -> None:
    def warnings(staleness: int, loss: str, **settings: float) -> list[str]:
        schedule = {"max_staleness": staleness}
        return list(doubts(load({"algorithm": {"loss": {"name": loss, **settings}}, "schedule": schedule})))

    (warning,) = warnings(3, "reverse_kl")
    assert "schedule.max_staleness=3 with algorithm.loss.name=reverse_kl" in warning
    assert not warnings(2, "reverse_kl") and not warnings(3, "forward_kl")
    assert warnings(3, "sampled_reverse_kl") and not warnings(2, "sampled_reverse_kl")
    assert warnings(3, "jsd", beta=1.0) and not warnings(2, "jsd", beta=1.0)  # that is reverse KL
    assert not warnings(3, "jsd", beta=0.5)


def test_no_weights_can_be_newer_than_those_that_learn() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.max_staleness=-1"):
        load({"schedule": {"max_staleness": -1}})


def test_a_mini_batch_larger_than_a_batch_is_named() -> None:
    def warnings(size: int) -> list[str]:
        return list(
            doubts(load({"actor": {"mini_batch_size": size}, "trainer": {"batch_size": 8}, "rollout": {"n": 4}}))
        )

    (warning,) = warnings(33)
    assert warning.startswith("actor.mini_batch_size=33: ") and "32" in warning and warnings(32) == []


def test_a_reference_that_knows_of_more_tokens_than_are_sampled_from_is_named() -> None:
    """The actor without its adapter leaves out what the student does."""
    settings = {"algorithm": {"name": "grpo", "kl": {"coef": 0.1}}, "reward": {"functions": ["length"]},
                "model": {"path": "x"}, "data": {"train_files": ["x"], "val_files": ["x"]}}  # fmt: skip
    for truncation in ({"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}):
        config = load({**settings, "rollout": {"n": 2, **truncation}})
        ((name, value),) = truncation.items()
        (warning,) = doubts(config)
        assert warning.startswith(f"rollout.{name}={value}: ") and "actor/kl_reference" in warning
        assert not list(doubts(load({**settings, "rollout": {"n": 2}})))
        assert not list(doubts(load({**settings, "rollout": {"n": 2, **truncation}, "actor": {"lora": {"r": 4}}})))


def test_a_learning_rate_that_never_gets_there_is_named() -> None:
    def warnings(warmup_steps: int) -> list[str]:
        return list(doubts(load({"actor": {"warmup_steps": warmup_steps}, "trainer": {"total_steps": 10}})))

    (warning,) = warnings(11)
    assert warning.startswith("actor.warmup_steps=11: ") and warnings(10) == []


def test_a_text_in_which_a_line_does_not_end_is_warned_of() -> None:
    """Neither a shell nor Hydra makes a line's end of it, so that such a text to stop at never came."""
    backslash_n = "\\n"

    def warnings(end: str, answer: str = "Answer") -> list[str]:
        texts = [f'data.prompt_template="{{q}}{end}{answer}:"', f'rollout.stop=["{end}{end}"]']
        latex = r"Is x \\neq y, or \\nu \\ne 2 \\nabla_x?"
        return list(doubts(compose(["+recipe=grpo", *texts, f'data.system_prompt="{latex}"'])))

    for answer in ("Answer", "answer", "Now", "now"):
        named = [warning.partition(" ")[0] for warning in warnings(backslash_n, answer)]
        assert named == ["data.prompt_template", "rollout.stop"]
    assert warnings("\n") == []
