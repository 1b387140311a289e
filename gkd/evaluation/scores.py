"""From answers to scores: each question's values, and their means with errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gkd.config.eval_set import EvalSet
from gkd.evaluation.answers import RecordedAnswer
from gkd.evaluation.questions import Question
from gkd.evaluation.statistics import Estimate, estimate, majority_score, pass_at_k
from gkd.rewards.accuracy import any_agreement
from gkd.rewards.answers import find_stated, last_line, last_number, with_opened_reasoning
from gkd.rewards.comparison import is_same_answer
from gkd.types import Prompt

_WORD = re.compile(r"[^\W\d_]{2,}")


@dataclass(frozen=True, slots=True)
class RatedAnswer:
    """One answer to a question as rewards and scores need it: ``max_tokens`` is what it could have had.

    Its text is :func:`gkd.rewards.completion.without_stop`. ``token_ids``, ``step`` and ``total_steps`` as of
    :class:`gkd.rewards.completion.Completion`. ``is_reply``: whether it is what the model wrote, and not what a
    strategy made of that. ``rewards``: by name, those of the set that did not fail.
    """

    question: Question
    answered: RecordedAnswer
    max_tokens: int
    token_ids: tuple[int, ...] | None = None
    step: int = 0
    total_steps: int = 0
    is_reply: bool = True
    rewards: Mapping[str, float] = field(default_factory=dict)


def accuracy(response: str, prompt: Prompt, continues: bool = True) -> float:
    """Return 1.0 for a response that gives one of the prompt's answers, else 0.0: here and in a run's validation.

    ``continues``: whether it goes on where the prompt ends, perhaps in reasoning.
    """
    response = with_opened_reasoning(prompt.text, response) if continues else response
    return any_agreement(response, prompt.answers)


def scores_of_question(question: Question, settings: EvalSet, rated: Sequence[RatedAnswer]) -> dict[str, float]:
    """Return the values of one question, by score: means over its answers, and what takes all of them together.

    A reward's mean is over the answers that it rated; one that rated none of them is left out, as are cost and length
    where they are not known of all.
    """
    answers, n = [sample.answered for sample in rated], len(rated)
    values: dict[str, float] = {}
    if question.prompt.answers:
        # What a strategy has made of replies is whole; a reply goes on where the prompt ends.
        right = [accuracy(sample.answered.text, question.prompt, sample.is_reply) for sample in rated]
        values["accuracy"] = sum(right) / n
        if n > 1:
            values[f"avg@{n}"] = values["accuracy"]
        for k in settings.pass_k or ([n] if n > 1 else []):
            if k <= n:
                values[f"pass@{k}"] = pass_at_k(n, round(sum(right)), k)
        if n > 1:
            text, pairs = question.prompt.text, [(sample.answered.text, sample.is_reply) for sample in rated]
            stated = [
                final_answer(with_opened_reasoning(text, response) if is_reply else response)
                for response, is_reply in pairs
            ]
            values[f"maj@{n}"] = majority_score(right, stated, is_same_answer)
    for name in dict.fromkeys(name for sample in rated for name in sample.rewards):
        rewards = [sample.rewards[name] for sample in rated if name in sample.rewards]
        values[f"reward/{name}"] = sum(rewards) / len(rewards)
    if (cost := add_up([answer.cost for answer in answers])) is not None:
        values["cost"] = cost / n
    values["iterations"] = sum(answer.iterations for answer in answers) / n
    if (n_tokens := add_up([answer.n_tokens for answer in answers])) is not None:
        values["length"] = n_tokens / n
    values["truncated"] = sum(answer.truncated for answer in answers) / n
    return values


def add_up(values: Sequence[float | None]) -> float | None:
    """Return the sum, None where one of the values is not known."""
    measured = [value for value in values if value is not None]
    return sum(measured) if len(measured) == len(values) else None


def final_answer(text: str) -> str | None:
    """Return what a response answers, without knowing what would be right; None for nothing.

    That is what it states; otherwise the last number of prose, or the last line where that is no prose.
    """
    if (stated := find_stated(text)) is not None:
        return stated.content or None
    line = last_line(text)
    number = last_number(text) if _WORD.search(line) else None
    return (line if number is None else number.text) or None


def means(values: Sequence[Mapping[str, float]]) -> dict[str, Estimate]:
    """Return the mean of every score over the questions that have it, with its error."""
    names = dict.fromkeys(name for question_scores in values for name in question_scores)
    return {
        name: estimate([question_scores[name] for question_scores in values if name in question_scores])
        for name in names
    }


def group_by_difficulty(
    questions: Sequence[Question], values: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, Any]]:
    """Return, by difficulty in alphabetical order, the number of its questions and their scores; nothing without."""
    groups: dict[str, list[Mapping[str, float]]] = {}
    for question in questions:
        if question.difficulty is not None:
            groups.setdefault(question.difficulty, []).append(values[question.key])
    return {
        name: {"n": len(group), "scores": {score: asdict(mean) for score, mean in means(group).items()}}
        for name, group in sorted(groups.items())
    }
