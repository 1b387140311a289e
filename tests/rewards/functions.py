"""Rewards as a user would write them, good and bad."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from pathlib import Path

from pydantic import BaseModel

from gkd.rewards.completion import Completion, RewardFunction

CONSTANT = 3
PLACE = re.compile(rf"\({re.escape(__file__)}, line \d+\)")
"""Where one of these raised, as it is shown."""


def words(completion: Completion) -> float:
    return len(completion.response.split())


def accuracy(completion: Completion) -> float:
    return 0.0


def raises(completion: Completion) -> float:
    if completion.n_tokens % 2:
        raise KeyError("odd")
    return 1.0


def hangs(completion: Completion) -> float:
    if completion.n_tokens == 1:
        time.sleep(600)
    return 0.5


def not_a_number(completion: Completion) -> float:
    return float("nan")


def forks(completion: Completion) -> float:
    return 0.5 if os.fork() else 1.0


async def forks_later(completion: Completion) -> float:
    """Makes a copy of its process while others are under way there."""
    await asyncio.sleep(0.05 * completion.n_tokens)
    return 0.5 if os.fork() else 1.0


async def longer(completion: Completion) -> float:
    """Takes as many seconds as the response has tokens."""
    await asyncio.sleep(completion.n_tokens)
    return completion.n_tokens


async def blocks_or_ends(completion: Completion) -> float:
    """Blocks its process for a response of 2 tokens, ends it for one of 3, and waits for any other."""
    if completion.n_tokens == 2:
        time.sleep(600)
    if completion.n_tokens == 3:
        os._exit(7)
    await asyncio.sleep(0.1)
    return completion.n_tokens


def takes_nothing() -> float:
    return 1.0


class TakesSettings:
    def __init__(self, config: object) -> None:
        self.config = config

    def __call__(self, completion: Completion) -> float:
        return 1.0


class Unpicklable(Exception):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


def kills_itself(completion: Completion) -> float:
    if completion.n_tokens == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if completion.n_tokens == 2:
        os._exit(7)
    if completion.n_tokens == 3:
        raise Unpicklable("one", "other")
    return 0.25


def pid(completion: Completion) -> float:
    return float(os.getpid())


def named(completion: Completion, group: str = "none") -> float:
    return len(group)


async def slow(completion: Completion) -> float:
    """Waits, as for an answer of another machine; for one of them too long."""
    await asyncio.sleep(60.0 if completion.n_tokens == 3 else 0.01)
    return completion.n_tokens


class _Asking:
    async def __call__(self, completion: Completion) -> float:
        await asyncio.sleep(0.1)
        return completion.n_tokens


asking = _Asking()


def hidden(completion: Completion):  # type: ignore[no-untyped-def]
    return slow(completion)


async def noted(completion: Completion) -> float:
    """Notes in the file that is its answer when it begins (+) and ends (-)."""
    assert completion.answer is not None
    for sign in "+-":
        with Path(completion.answer).open("a", encoding="utf-8") as file:
            file.write(sign)
        await asyncio.sleep(0.5)
    return completion.n_tokens


def compute_score(data_source, solution_str, ground_truth, extra_info=None, factor=1.0):  # type: ignore[no-untyped-def]
    """verl's kind."""
    assert (data_source, extra_info) == ("sums", {"split": "train"})
    return {"score": factor * (solution_str == ground_truth), "acc": True}


def compute_score_of_info(solution_str, extra_info):  # type: ignore[no-untyped-def]
    """verl's kind, of the further information."""
    return extra_info.get("level", 0.0)


def compute_scores_of_info(solution_strs, extra_infos):  # type: ignore[no-untyped-def]
    """verl's kind, batched, of the further information."""
    return [info.get("level", 0.0) for info in extra_infos]


def trl(completions, level, bonus=0.0, **kwargs):  # type: ignore[no-untyped-def]
    """TRL's kind, of a conversation."""
    assert kwargs["prompts"] == [[{"role": "user", "content": "2 + 2 ="}]] * len(completions)
    return [len(c[0]["content"]) + n + bonus for c, n in zip(completions, level, strict=True)]


async def trl_later(prompts, completions):  # type: ignore[no-untyped-def]
    """TRL's kind, async and of plain text."""
    return [None if text == "none" else float(set(prompts) == {"2 + 2 ="}) for text in completions]


def trl_of_ids(completion_ids, trainer_state, log_metric, log_extra=None, **kwargs):  # type: ignore[no-untyped-def]
    """TRL's kind, of token ids and of how far the run is; shows what it does."""
    log_metric("longest", max(map(len, completion_ids)))
    if log_extra:
        log_extra("level", kwargs["level"])
    share = trainer_state.global_step / trainer_state.max_steps
    return [len(ids) * share if isinstance(ids, list) else None for ids in completion_ids]


def trl_of_some(completions, **kwargs):  # type: ignore[no-untyped-def]
    """TRL's kind, of a task that not all samples are of."""
    return [None if text == "b" else 1.0 for text in completions]


def trl_of_prompts(prompts, **kwargs):  # type: ignore[no-untyped-def]
    """TRL's kind, which finds the rest among its keyword arguments."""
    return [len(p) + len(c) for p, c in zip(prompts, kwargs["completions"], strict=True)]


def optional(completion: Completion, level: int = 4) -> float:
    return float(completion.columns["level"] == level)


def compute_scores(data_sources, solution_strs, ground_truths, extra_infos, factor=1.0):  # type: ignore[no-untyped-def]
    """verl's kind for many at once."""
    assert set(data_sources) == {"sums"} and extra_infos == [{"split": "train"}] * len(solution_strs)
    return [{"score": factor * (a == b)} for a, b in zip(solution_strs, ground_truths, strict=True)]


def ranked(group: list[Completion], best: float = 1.0) -> list[float]:
    """The longer of a group, the better: ``best`` for the longest."""
    lengths = [len(completion.response) for completion in group]
    return [best * sum(other < own for other in lengths) / max(1, len(group) - 1) for own in lengths]


async def ranked_later(group: list[Completion]) -> list[float]:
    await asyncio.sleep(0.2)
    return ranked(group)


class Ranked(RewardFunction):
    """As :func:`ranked`, of a class."""

    class Config(BaseModel):
        best: float = 1.0

    def __call__(self, group: list[Completion]) -> list[float]:  # type: ignore[override]
        return ranked(group, self.config.best)


def sizes(group: list[Completion]) -> list[float]:
    """Each one's share of the group's tokens."""
    total = sum(completion.n_tokens for completion in group)
    return [completion.n_tokens / total for completion in group]


def half_a_second_each(group: list[Completion]) -> list[float]:
    time.sleep(0.5 * len(group))
    return [len(group)] * len(group)


def too_few(group: list[Completion]) -> list[float]:
    return [0.0] * (len(group) - 1)


def some_of_none(group: list[Completion]) -> list[float | None]:
    return [0.0, None, float("nan")]


def no_list(group: list[Completion]) -> float:
    return 1.0


def raises_for_a_group(group: list[Completion]) -> list[float]:
    raise KeyError("group")


def of_two(response: str, answer: str) -> float:
    return float(answer in response)


def compute_score_with(solution_str: str, ground_truth: str, tokenizer: object) -> float:
    return float(ground_truth in solution_str)


class OfTwo:
    def __call__(self, completion: Completion, answer: str) -> float:
        return float(answer in completion.response)


def annotated(
    completion: Completion,
    weight: float = 1.0,
    n: int = 2,
    words: list[str] | None = None,
    none: str = None,  # type: ignore[assignment]  # noqa: RUF013 - as many write it
    loose: int = 0.5,  # type: ignore[assignment]
    path: Path | None = None,
) -> float:
    return weight * n + len(words or []) + (none is not None) + loose + (path is not None)
