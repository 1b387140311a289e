"""Rewards of a set's answers, in processes of their own."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from gkd.errors import RunFailed
from gkd.evaluation.answers import RecordedAnswer
from gkd.evaluation.questions import load_questions
from gkd.evaluation.rating import rate, reward_settings
from gkd.evaluation.scores import RatedAnswer, means, scores_of_question
from tests.data.models import word_tokenizer
from tests.error_text import contains_in_order
from tests.evaluation.test_rating import HERE, with_rewards


def test_a_function_that_does_not_apply_to_an_answer_is_no_failure(tmp_path: Path) -> None:
    config = with_rewards(tmp_path, [HERE + "trl_of_some", HERE + "words"], max_failed_share=0.0)
    questions = load_questions("own", config.data.val_sets["own"], word_tokenizer(), 8, section="data.val_sets")
    settings = reward_settings(config, questions)
    assert settings is not None
    answers = [RecordedAnswer(text, 1, 1, 1, False, 0.0) for text in ("a", "b")]
    calls: list[float] = []
    rated = [RatedAnswer(questions.questions[0], answer, 8) for answer in answers]
    given = rate(settings, rated, lambda: calls.append(time.monotonic()))
    assert calls
    assert given == [{"trl_of_some": 1.0, "words": 1.0}, {"words": 1.0}]


def test_a_reward_that_fails_on_an_answer_costs_that_answer_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in training: it is shown, and ends the run where it is more than ``reward.max_failed_share`` of them."""
    rewards = [HERE + "raises", HERE + "words"]
    config = with_rewards(tmp_path, rewards, max_failed_share=0.5)
    questions = load_questions("own", config.data.val_sets["own"], word_tokenizer(), 8, section="data.val_sets")
    settings = reward_settings(config, questions)
    assert settings is not None
    question = questions.questions[0]
    answers = [RecordedAnswer("a b", n, 1, n, False, 0.0) for n in (1, 2, 3, 4)]
    rated = [RatedAnswer(question, answer, 8) for answer in answers]
    given = rate(settings, rated)
    assert given == [{"words": 2.0}, {"raises": 1.0, "words": 2.0}] * 2
    assert contains_in_order(caplog.text, "raises", "2 of 4 samples", "question 1: KeyError: 'odd'")
    sampled = [replace(own, rewards=rewards) for own, rewards in zip(rated, given, strict=True)]
    values = [scores_of_question(question, questions.settings, part) for part in (sampled[:2], sampled[2:3])]
    assert [own.get("reward/raises") for own in values] == [1.0, None]
    assert means(values)["reward/raises"].value == 1.0 and means(values)["reward/words"].value == 2.0
    caplog.clear()
    unsent = replace(rated[1], question=replace(question, row={"column": lambda: None}))
    assert [len(own) for own in rate(settings, [unsent, rated[1], rated[3]])] == [0, 2, 2]
    assert contains_in_order(caplog.text, "words", "1 of 3 samples", "question 1: ")
    with pytest.raises(RunFailed, match=r"raises .*3 of 5 .*max_failed_share"):
        rate(settings, [rated[0], *rated])
