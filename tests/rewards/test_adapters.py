"""Reward functions of gkd's, verl's and TRL's kind, their settings, and async ones."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from gkd.config import Reward, load
from gkd.config.rewards import REWARDS
from gkd.errors import ConfigError
from gkd.rewards.adapters import resolve
from gkd.rewards.completion import DOES_NOT_APPLY, Completion
from gkd.rewards.process import _evaluate, _evaluate_async
from tests.rewards.functions import PLACE

HERE = "tests.rewards.functions:"
ROW = {
    "prompt": "2 + 2 =",
    "data_source": "sums",
    "reward_model": {"ground_truth": "4"},
    "extra_info": {"split": "train"},
    "level": 3,
}
MESSAGES = ({"role": "user", "content": "2 + 2 ="},)


def make_completion(response: str, messages: Any = None, n: int = 1) -> Completion:
    return Completion("2 + 2 =", response, "5", n, 10, False, columns=ROW, messages=messages)


def settings_of(name: str, **options: Any) -> Reward:
    return Reward.model_validate({"functions": [HERE + name], **({name: options} if options else {})})


def value(name: str, marked: Completion | list[Completion], **options: Any) -> Any:
    return resolve(HERE + name, settings_of(name, **options))(marked)


def test_verl() -> None:
    """The ground truth is the row's, whatever the answer; a mapping has its score."""
    assert [value("compute_score", make_completion(text)) for text in ("4", "5")] == [1.0, 0.0]
    assert value("compute_score", make_completion("4"), factor=2.5) == 2.5


def test_verls_extra_info_of_a_row_without_is_empty() -> None:
    """Functions look into it without asking whether it is there."""
    for columns in ({}, {"extra_info": None}):
        completion = Completion("2 + 2 =", "4", "4", 1, 8, False, columns=columns)
        assert value("compute_score_of_info", completion) == 0.0
        assert value("compute_scores_of_info", [completion]) == [0.0]


def test_trl() -> None:
    """It is given all samples of a prompt at once, with the columns repeated."""
    assert value("trl", [make_completion("four", MESSAGES), make_completion("2 + 2", MESSAGES)]) == [7.0, 8.0]
    assert value("trl", [make_completion("four", MESSAGES)], bonus=0.5) == [7.5]
    assert asyncio.run(value("trl_later", [make_completion("four"), make_completion("none")])) == [1.0, DOES_NOT_APPLY]


def test_trl_of_token_ids_and_the_trainers_state() -> None:
    """The first example of TRL's documentation has no other parameter; what it would log is dropped."""
    group = [replace(make_completion(""), token_ids=ids, step=5, total_steps=10) for ids in ((7, 8, 9), (7,))]
    assert value("trl_of_ids", group) == [1.5, 0.5]
    settings = settings_of("trl_of_ids")
    assert settings.group_functions() == [HERE + "trl_of_ids"] and "trl_of_ids" not in settings.model_dump()
    assert value("trl_of_prompts", [make_completion("a"), make_completion("ab")]) == [8, 9]
    assert settings_of("trl_of_prompts").group_functions() == [HERE + "trl_of_prompts"]
    with pytest.raises(TypeError, match="completion_ids"):  # of an endpoint's answer, which is a text alone
        value("trl_of_ids", [make_completion("")])


def test_verl_batched() -> None:
    assert value("compute_scores", [make_completion("4"), make_completion("5"), make_completion("4")], factor=2) == [
        2.0,
        0.0,
        2.0,
    ]


def test_gkd_of_a_group() -> None:
    """By the name of the parameter, functions and classes alike."""
    group = [make_completion("a b"), make_completion("a"), make_completion("a b c")]
    assert value("ranked", group) == [0.5, 0.0, 1.0]
    assert value("Ranked", group, best=4.0) == [2.0, 0.0, 4.0]
    assert asyncio.run(value("ranked_later", group)) == [0.5, 0.0, 1.0]
    names = ("ranked", "Ranked", "ranked_later", "trl", "trl_later", "compute_scores")
    assert all(settings_of(name).group_functions() == [HERE + name] for name in names)
    assert not any(settings_of(name).group_functions() for name in ("words", "compute_score", "slow", "named"))
    assert value("named", make_completion("a"), group="four") == 4.0  # with a default it is a setting
    built_in = [name for name in REWARDS.names() if name != "judge"]  # which needs an address
    assert Reward(functions=built_in).group_functions() == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("too_few", ["ValueError: 2 rewards for 3 completions"] * 3),
        ("some_of_none", [0.0, "ValueError: the reward is None", "ValueError: the reward is nan"]),
        ("trl_of_some", [1.0, None, 1.0]),
        ("no_list", ["TypeError: 'float' object is not iterable"] * 3),
        ("raises_for_a_group", ["KeyError: 'group' (HERE)"] * 3),
    ],
)
def test_groups_that_are_rated_wrong(name: str, expected: list[Any]) -> None:
    group = [make_completion(text) for text in ("a", "b", "c")]
    answers = _evaluate(resolve(HERE + name, settings_of(name)), group, True, asyncio.run)
    texts = [PLACE.sub("(HERE)", answer) if isinstance(answer, str) else answer[0] for answer in answers]
    assert texts == expected


def test_a_function_of_a_completion_sees_columns_and_takes_settings() -> None:
    assert [value("optional", make_completion("")), value("optional", make_completion(""), level=3)] == [0.0, 1.0]
    assert settings_of("optional").model_dump()["optional"] == {"level": 4}
    with pytest.raises(ConfigError, match=r"reward\.optional\.levle \(.*reward\.optional\.level"):
        load(
            {
                "algorithm": {"name": "grpo"},
                "rollout": {"n": 2},
                "reward": {"functions": [HERE + "optional"], "optional": {"levle": 3}},
            }
        )


@pytest.mark.parametrize(
    ("name", "parameter"), [("of_two", "answer"), ("compute_score_with", "tokenizer"), ("OfTwo", "answer")]
)
def test_one_that_requires_what_no_reward_is_given_is_refused(name: str, parameter: str) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.functions.*{HERE}{name}.* {parameter} "):
        load({"reward": {"functions": [HERE + name]}})


@pytest.mark.parametrize(
    ("parameter", "given"), [("weight", "abc"), ("n", 2.5), ("words", 3), ("words", [1]), ("none", 1)]
)
def test_a_setting_of_a_function_is_of_the_type_of_its_parameter(parameter: str, given: Any) -> None:
    section = {"functions": [HERE + "annotated"], "annotated": {parameter: given}}
    with pytest.raises(ConfigError, match=rf"^reward\.annotated\.{parameter}\b"):
        load({"algorithm": {"name": "grpo"}, "rollout": {"n": 2}, "reward": section})


def test_a_default_that_is_not_of_its_type_is_taken_as_a_user_wrote_it() -> None:
    completion = make_completion("")
    assert value("annotated", completion) == 2.5
    assert value("annotated", completion, weight=2, n=3.0, words="a", none="b", loose=1, path="/x") == 10.0


def test_columns_are_kept_for_functions_that_may_look_at_them() -> None:
    assert settings_of("words").functions_needing_columns() == [HERE + "words"]
    assert Reward(functions=["accuracy", "length"]).functions_needing_columns() == []


def test_an_async_function_is_asked_about_all_at_once_each_with_a_limit() -> None:
    settings = settings_of("slow")
    assert settings.is_async(HERE + "slow") and not settings_of("words").is_async(HERE + "words")
    slow = resolve(HERE + "slow", settings)
    (first,), (late,), (other,) = (
        asyncio.run(_evaluate_async(slow, [make_completion("", n=n)], 0.8)) for n in (1, 3, 2)
    )
    assert (first[0], other[0]) == (1.0, 2.0)
    assert late.startswith("TimeoutError: ") and late.endswith(" 0.8 s (reward.timeout_s)")


def test_what_is_async_by_its_class_or_behind_a_decorator_is_awaited() -> None:
    assert settings_of("asking").is_async(HERE + "asking")
    for name in ("asking", "hidden"):
        ((reward, _),) = _evaluate(
            resolve(HERE + name, settings_of(name)), [make_completion("", n=2)], False, asyncio.run
        )
        assert reward == 2.0
