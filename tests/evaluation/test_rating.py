"""Rewards of sets: whose settings they take, and what is said of wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gkd.cli.evaluate import compose_evaluation
from gkd.config import Config, load
from gkd.config.overrides import overrides_of
from gkd.data.task import TaskInputs
from gkd.driver.checkpoints import run_models
from gkd.driver.checkpoints.run_models import RunModels
from gkd.errors import ConfigError
from gkd.evaluation.answers import RecordedAnswer
from gkd.evaluation.questions import load_questions
from gkd.evaluation.rating import _completion as completion_of
from gkd.evaluation.rating import reward_settings
from gkd.evaluation.scores import RatedAnswer
from tests.data.models import word_tokenizer

HERE = "tests.rewards.functions:"


def with_rewards(tmp_path: Path, rewards: list[str], answer_key: str | None = "answer", **reward: Any) -> Config:
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    own = {"files": [str(file)], "answer_key": answer_key, "rewards": rewards, "every": 25}
    return load(
        {"algorithm": {"name": "grpo"}, "rollout": {"n": 2}, "data": {"val_sets": {"own": own}}, "reward": reward}
    )


def settings_of(config: Config) -> dict[str, Any]:
    questions = load_questions("own", config.data.val_sets["own"], word_tokenizer(), 8, section="data.val_sets")
    settings = reward_settings(config, questions)
    assert settings is not None
    return settings.model_dump()


def test_a_reward_of_a_set_alone_has_its_settings_in_the_section_of_rewards(tmp_path: Path) -> None:
    """Its defaults too; what training learns from is another matter, and its settings are not in the way."""
    training = {"functions": [HERE + "ranked"], "ranked": {"best": 2.0}, "optional": {"level": 3}, "weights": [0.5]}
    config = with_rewards(tmp_path, [HERE + "optional", HERE + "trl"], **training)
    own = settings_of(config)
    assert own["functions"] == [HERE + "optional", HERE + "trl"] and own["weights"] is None
    assert (own["optional"], own["trl"], own.get("ranked")) == ({"level": 3}, {"bonus": 0.0}, None)
    assert config.reward.functions == [HERE + "ranked"] and config.reward.model_dump()["ranked"] == {"best": 2.0}
    assert load(config.model_dump()) == config  # as config.yaml has it


def test_an_evaluation_of_a_run_rates_as_the_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its settings of rewards, and from another directory; not as often, as an evaluation has no steps."""
    (tmp_path / "mine.py").write_text("def own(completion, factor=1.0):\n    return factor\n")
    monkeypatch.chdir(tmp_path)
    config = with_rewards(
        tmp_path,
        ["mine.py:own", "format"],
        own={"factor": 0.5},
        functions=["length"],
        timeout_s=3.0,
        length={"target_length": 7},
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(run_models, "find_files", lambda *_: TaskInputs("", None, [], ["x.jsonl"]))
    settings = run_models.settings_of(config, RunModels("base", ()), tmp_path, True)
    again = compose_evaluation(overrides_of({"models.student": "m", **settings}))
    assert again.evaluate.sets["own"].rewards == [f"{tmp_path}/mine.py:own", "format"]
    assert again.evaluate.sets["own"].every is None
    assert again.evaluate.sets["val"].rewards == ["length"]
    kept = again.reward.model_dump()
    assert kept["length"]["target_length"] == 7
    assert (kept["own"], kept["timeout_s"], kept["functions"]) == ({"factor": 0.5}, 3.0, [])


@pytest.mark.parametrize(
    ("n_tokens", "iterations", "token_ids", "seen"),
    [
        (8, 1, (1, 2), 8),  # with an end token
        (30, 5, (1, 2), 2),
        (30, 5, None, 10),
        (30, 1, (1, 2), 10),  # a strategy of one's own need not count
    ],
)
def test_a_reward_sees_the_length_of_the_answer_and_not_of_all_that_a_strategy_sampled(
    n_tokens: int, iterations: int, token_ids: tuple[int, ...] | None, seen: int, tmp_path: Path
) -> None:
    config = with_rewards(tmp_path, ["length"])
    question = load_questions("own", config.data.val_sets["own"], word_tokenizer(), 8).questions[0]
    answer = RecordedAnswer("b", 30.0, iterations, n_tokens, False, 0.0)
    assert completion_of(RatedAnswer(question, answer, 10, token_ids)).n_tokens == seen


@pytest.mark.parametrize(
    ("rewards", "further", "message"),
    [
        (["nosuch"], {}, "data.val_sets.own.rewards=nosuch: "),
        ([HERE + "nosuch"], {}, f"data.val_sets.own.rewards: {HERE}nosuch: "),
        (["format", "format"], {}, "data.val_sets.own.rewards .*twice"),
        (["reward_model"], {}, "data.val_sets.own.rewards: .*reward model"),
        (["accuracy"], {"answer_key": None}, "data.val_sets.own.rewards: accuracy .*answers"),
        ([HERE + "optional"], {"optional": {"levle": 3}}, "reward.optional.levle"),
        (["judge"], {}, "reward.judge"),
    ],
)
def test_a_wrong_reward_is_refused_by_the_setting_that_names_it(
    rewards: list[str], further: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        settings_of(with_rewards(tmp_path, rewards, functions=["length"], **further))
    assert "reward.functions" not in str(refused.value)
