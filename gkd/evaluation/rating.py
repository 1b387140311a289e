"""The rewards of a set, computed for its answers in processes of their own."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace

from gkd.algorithms.training_samples import describe_failures
from gkd.config import Config, Reward
from gkd.errors import ConfigError, describe_error
from gkd.evaluation.questions import Question, Questions
from gkd.evaluation.scores import RatedAnswer, scores_of_question
from gkd.rewards.completion import Completion
from gkd.rewards.pool import RewardPool
from gkd.rewards.process import RewardError, Timed

log = logging.getLogger("gkd")
ATTEND_EVERY_S = 0.2


def score(
    config: Config, questions: Questions, rated: Sequence[RatedAnswer], attend: Callable[[], None] | None = None
) -> dict[str, dict[str, float]]:
    """Return the scores of every question by its key, of all of its answers. Raises, and calls, as :func:`rate`."""
    if (settings := reward_settings(config, questions)) is not None:
        rewards = rate(settings, rated, attend)
        rated = [
            replace(rated_answer, rewards=answer_rewards)
            for rated_answer, answer_rewards in zip(rated, rewards, strict=True)
        ]
    answers: dict[str, list[RatedAnswer]] = {question.key: [] for question in questions.questions}
    for rated_answer in rated:
        answers[rated_answer.question.key].append(rated_answer)
    return {q.key: scores_of_question(q, questions.settings, answers[q.key]) for q in questions.questions}


def reward_settings(config: Config, questions: Questions) -> Reward | None:
    """Return the section ``reward`` with the functions of a set; None where it names none.

    Raises ConfigError for one that needs reference answers where there are none, or a model in a group of its own.
    """
    names = questions.settings.rewards
    if not names:
        return None
    setting = f"{questions.section}.rewards"
    if len(set(names)) < len(names):
        raise ConfigError(f"{setting} names one twice: {', '.join(names)}")
    try:
        settings = Reward.model_validate(config.reward.with_functions(names))
    except ValueError as error:
        text = str(error.errors()[0]["msg"]) if hasattr(error, "errors") else str(error)
        raise ConfigError(f"{setting}: {text.removeprefix('Value error, ')}") from None
    if not questions.questions[0].prompt.answers and (needing := settings.functions_needing_answers()):
        raise ConfigError(
            f"{setting}: {needing[0]} needs reference answers, and there are none ({questions.section}.answer_key)"
        )
    if len(settings.functions_scored_by(None)) < len(names):
        raise ConfigError(f"{setting}: a reward model's reward is given in training alone")
    return settings


def rate(
    settings: Reward, rated: Sequence[RatedAnswer], attend: Callable[[], None] | None = None
) -> list[dict[str, float]]:
    """Return the rewards of every answer, by their labels; without those of functions that failed on it.

    ``attend`` is called again and again while they are computed. Raises RunFailed where one failed on more than
    ``settings.max_failed_share`` of the answers.
    """
    rewards = _evaluate(settings, rated, attend)
    for name in settings.functions:
        if failures := describe_failures(settings, name, [answer_rewards.get(name) for answer_rewards in rewards]):
            log.warning(failures)
    labels = settings.labels()
    return [
        {labels[name]: value for name, value in answer_rewards.items() if not isinstance(value, str)}
        for answer_rewards in rewards
    ]


def _evaluate(
    settings: Reward, rated: Sequence[RatedAnswer], attend: Callable[[], None] | None
) -> list[dict[str, float | str]]:
    """Return what every function gave each answer that it applies to, or why it gave nothing."""
    pool = RewardPool(settings)
    try:
        completions = [_completion(rated_answer) for rated_answer in rated]
        futures = [pool.submit(completion) for completion in completions]
        of_question: dict[str, list[int]] = {}
        for place, rated_answer in enumerate(rated):
            of_question.setdefault(rated_answer.question.key, []).append(place)
        for places in of_question.values():
            group_rewards = pool.submit_group([completions[place] for place in places])
            for place, rewards in zip(places, group_rewards, strict=True):
                futures[place] |= rewards
        late = {future for of_one in futures for future in of_one.values()}
        while attend is not None and late:
            late = wait(late, ATTEND_EVERY_S).not_done
            attend()
        return [
            {
                name: value
                for name, future in of_one.items()
                if (value := _result(future, rated_answer.question)) is not None
            }
            for rated_answer, of_one in zip(rated, futures, strict=True)
        ]
    finally:
        pool.close()


def _result(reward: Future[Timed], question: Question) -> float | str | None:
    try:
        return reward.result()[0]
    except Exception as error:  # also of a row that cannot be sent to the process
        why = str(error) if isinstance(error, RewardError) else describe_error(error)
        return f"question {question.prompt.id + 1}: {why}"


def _completion(rated_answer: RatedAnswer) -> Completion:
    """Return what is rated: the text of an answer, and not what a strategy sampled besides."""
    n_tokens = math.nan if rated_answer.answered.n_tokens is None else rated_answer.answered.n_tokens
    if rated_answer.answered.iterations > 1 and rated_answer.token_ids is not None:
        n_tokens = len(rated_answer.token_ids)
    return Completion(
        prompt=rated_answer.question.prompt.text,
        response=rated_answer.answered.text,
        answer=rated_answer.question.prompt.answer,
        n_tokens=min(n_tokens, rated_answer.max_tokens),
        max_tokens=rated_answer.max_tokens,
        truncated=rated_answer.answered.truncated,
        other_answers=rated_answer.question.prompt.other_answers,
        columns=rated_answer.question.row,
        messages=rated_answer.question.prompt.messages,
        token_ids=rated_answer.token_ids,
        step=rated_answer.step,
        total_steps=rated_answer.total_steps,
    )
