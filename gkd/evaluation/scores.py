"""From answers to scores: each question's values, and their means with errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gkd.config.eval_set import EvalSet
from gkd.evaluation.questions import Question
from gkd.evaluation.statistics import Estimate, estimate, majority_score, pass_at_k
from gkd.rewards.accuracy import any_agreement
from gkd.rewards.answers import last_line, last_number, stated_answer, with_opened_reasoning
from gkd.rewards.comparison import is_same_answer
from gkd.types import Prompt

_WORD = re.compile(r"[^\W\d_]{2,}")


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """One answer to a question as scores need it.

    ``text`` is :func:`gkd.rewards.completion.without_stop`. ``rewards``: by name, those of the set that did not fail.
    ``is_reply``: whether it is what the model wrote, and not what a strategy made of that.
    """

    text: str
    n_tokens: float | None
    truncated: bool
    cost: float | None
    iterations: int
    rewards: Mapping[str, float]
    is_reply: bool = True


def accuracy(response: str, prompt: Prompt, continues: bool = True) -> float:
    """Return 1.0 for a response that gives one of the prompt's answers, else 0.0: here and in a run's validation.

    ``continues``: whether it goes on where the prompt ends, perhaps in reasoning.
    """
    response = with_opened_reasoning(prompt.text, response) if continues else response
    return any_agreement(response, prompt.answers)


def scores_of_question(question: Question, settings: EvalSet, answers: Sequence[SampledAnswer]) -> dict[str, float]:
    """Return the values of one question, by score: means over its answers, and what takes all of them together.

    A reward's mean is over the answers that it rated; one that rated none of them is left out, as are cost and length
    where they are not known of all.
    """
    n = len(answers)
    values: dict[str, float] = {}
    if question.prompt.answers:
        # What a strategy has made of replies is whole; a reply goes on where the prompt ends.
        right = [accuracy(answer.text, question.prompt, answer.is_reply) for answer in answers]
        values["accuracy"] = sum(right) / n
        if n > 1:
            values[f"avg@{n}"] = values["accuracy"]
        for k in settings.pass_k or ([n] if n > 1 else []):
            if k <= n:
                values[f"pass@{k}"] = pass_at_k(n, round(sum(right)), k)
        if n > 1:
            text = question.prompt.text
            texts = [with_opened_reasoning(text, own.text) if own.is_reply else own.text for own in answers]
            stated = [final_answer(own) for own in texts]
            values[f"maj@{n}"] = majority_score(right, stated, is_same_answer)
    for name in dict.fromkeys(name for answer in answers for name in answer.rewards):
        rewards = [answer.rewards[name] for answer in answers if name in answer.rewards]
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
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def final_answer(text: str) -> str | None:
    """Return what a response answers, without knowing what would be right; None for nothing.

    That is what it states; otherwise the last number of prose, or the last line where that is no prose.
    """
    stated = stated_answer(text)
    if stated is not None:
        return stated or None
    line = last_line(text)
    number = last_number(text) if _WORD.search(line) else None
    return (line if number is None else number.text) or None


def means(values: Sequence[Mapping[str, float]]) -> dict[str, Estimate]:
    """Return the mean of every score over the questions that have it, with its error."""
    names = dict.fromkeys(name for own in values for name in own)
    return {name: estimate([own[name] for own in values if name in own]) for name in names}


def group_by_difficulty(
    questions: Sequence[Question], values: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, Any]]:
    """Return, by difficulty in alphabetical order, the number of its questions and their scores; nothing without."""
    groups: dict[str, list[Mapping[str, float]]] = {}
    for question in questions:
        if question.difficulty is not None:
            groups.setdefault(question.difficulty, []).append(values[question.key])
    return {
        name: {"n": len(own), "scores": {score: asdict(mean) for score, mean in means(own).items()}}
        for name, own in sorted(groups.items())
    }
