"""Rewards as a user would write them, good and bad."""

from __future__ import annotations

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
