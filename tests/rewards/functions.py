"""Rewards as a user would write them, good and bad."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from gkd.rewards.completion import Completion

CONSTANT = 3


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


async def slow(completion: Completion) -> float:
    """Waits, as for an answer of another machine; for one of them too long."""
    await asyncio.sleep(60.0 if completion.n_tokens == 3 else 0.5)
    return completion.n_tokens


def compute_score(data_source, solution_str, ground_truth, extra_info=None, factor=1.0):  # type: ignore[no-untyped-def]
    """verl's kind."""
    assert (data_source, extra_info) == ("sums", {"split": "train"})
    return {"score": factor * (solution_str == ground_truth), "acc": True}


def trl(completions, level, bonus=0.0, **kwargs):  # type: ignore[no-untyped-def]
    """TRL's kind, of a conversation."""
    assert kwargs["prompts"] == [[{"role": "user", "content": "2 + 2 ="}]]
    return [len(c[0]["content"]) + n + bonus for c, n in zip(completions, level, strict=True)]


async def trl_later(prompts, completions):  # type: ignore[no-untyped-def]
    """TRL's kind, async and of plain text."""
    return [None if text == "none" else float(prompts == ["2 + 2 ="]) for text in completions]


def optional(completion: Completion, wanted: int = 4) -> float:
    return float(completion.columns["level"] == wanted)
