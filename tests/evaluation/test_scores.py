"""Scores of a question, and the split by difficulty."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gkd.config.eval_set import EvalSet
from gkd.evaluation.answers import RecordedAnswer
from gkd.evaluation.questions import Question
from gkd.evaluation.scores import RatedAnswer, accuracy, final_answer, group_by_difficulty, scores_of_question
from gkd.types import Prompt

SETTINGS = EvalSet(files=["x"], answer_key="answer", samples=4, temperature=1.0, pass_k=[1, 2, 4])


def question(answer: str | None, key: str = "q", difficulty: str | None = None) -> Question:
    return Question(key, Prompt(0, np.array([1], np.int32), "?", answer), {}, difficulty)


def sampled(*texts: str) -> list[RatedAnswer]:
    answers = [RecordedAnswer(text, 4.0, 1, 4, i == 0, 0.0) for i, text in enumerate(texts)]
    return [RatedAnswer(question("72"), own, 8, rewards={"format": float(i)}) for i, own in enumerate(answers)]


def test_one_of_four_is_right() -> None:
    scores = scores_of_question(question("72"), SETTINGS, sampled("#### 72", "so 71 clips", "it is 71", "70"))
    expected = {"accuracy": 0.25, "avg@4": 0.25, "pass@1": 0.25, "pass@2": 0.5, "pass@4": 1.0, "maj@4": 0.0}
    expected |= {"reward/format": 1.5, "cost": 4.0, "iterations": 1.0, "length": 4.0, "truncated": 0.25}
    assert scores == pytest.approx(expected)


def test_a_reward_that_failed_on_some_answers_is_the_mean_of_the_others() -> None:
    answers = sampled("72", "71", "70", "69")
    answers[0] = replace(answers[0], rewards={})
    assert scores_of_question(question("72"), SETTINGS, answers)["reward/format"] == pytest.approx(2.0)


def test_a_single_sample_has_accuracy_and_the_pass_k_that_is_named_and_without_answers_there_is_none() -> None:
    one = EvalSet(files=["x"], answer_key="answer")
    assert set(scores_of_question(question("72"), one, sampled("72"))) >= {"accuracy"}
    assert not any("@" in name for name in scores_of_question(question("72"), one, sampled("72")))
    assert "accuracy" not in scores_of_question(question(None), one, sampled("72"))
    named = one.model_copy(update={"pass_k": [1]})
    scores = [scores_of_question(question(right), named, sampled("72")) for right in ("72", "7")]
    assert [{name: value for name, value in own.items() if "@" in name} for own in scores] == [
        {"pass@1": 1.0},
        {"pass@1": 0.0},
    ]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so she has 72 clips.", "72"),
        ("first 3\n2 6 7", "2 6 7"),  # a list, and not its last number
        ("we get \\boxed{4}", "4"),
        ("", None),
        ("<answer>", None),
    ],
)
def test_what_a_response_answers(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_a_sample_that_ends_in_reasoning_which_its_prompt_began_answers_nothing() -> None:
    asked = Question("q", Prompt(0, np.array([1], np.int32), "2 + 2 =<think>\n", "4"), {})
    texts = ("so 4", "5</think>4", "so \\boxed{4}", "so 5</think>5")
    cut = [replace(own.answered, truncated="</think>" not in own.answered.text) for own in sampled(*texts)]
    replies = [replace(own, answered=answered) for own, answered in zip(sampled(*texts), cut, strict=True)]
    scores = scores_of_question(asked, SETTINGS, replies)
    assert (scores["accuracy"], scores["maj@4"]) == (0.25, 0.5)
    ended = sampled("", "The answer is 4.")[1:]  # within its reasoning, by itself
    assert (
        scores_of_question(asked, SETTINGS, ended)["accuracy"] == accuracy(ended[0].answered.text, asked.prompt) == 0.0
    )
    made = [replace(answer, is_reply=False) for answer in ended]
    assert scores_of_question(asked, SETTINGS, made)["accuracy"] == 1.0


def test_questions_are_split_by_difficulty() -> None:
    questions = [question("1", "a", "hard"), question("1", "b", "easy"), question("1", "c", "hard")]
    values = {"a": {"accuracy": 0.0}, "b": {"accuracy": 1.0}, "c": {"accuracy": 1.0}}
    groups = group_by_difficulty(questions, values)
    assert list(groups) == ["easy", "hard"]
    assert (groups["hard"]["n"], groups["hard"]["scores"]["accuracy"]["value"]) == (2, 0.5)
    assert groups["easy"]["scores"]["accuracy"]["stderr"] is None
