"""The time of a wait, in which neither work that goes on nor a stop of this process counts."""

from __future__ import annotations

import math

import pytest

from gkd.cluster.workers import deadline as module
from gkd.cluster.workers.deadline import LONGEST_TURN_S, Deadline
from tests.error_text import contains_in_order


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def pass_s(deadline: Deadline, now: list[float], seconds: int) -> bool:
    """Look every second; returns whether it is over at the end."""
    for _ in range(seconds):
        now[0] += 1.0
        over = deadline.is_over()
    return over


def test_it_is_over_after_its_time(now: list[float]) -> None:
    deadline = Deadline(10.0)
    assert not pass_s(deadline, now, 9)
    assert pass_s(deadline, now, 1)
    assert contains_in_order(str(Deadline(9.99997, setting="a.b")), "after", " 10 s (a.b)")
    assert contains_in_order(str(Deadline(86_400.0)), "after", " 86400 s")
    assert not pass_s(Deadline(math.inf), now, 9)


def test_it_begins_again_with_whatever_is_done(now: list[float]) -> None:
    done = now[0] + 7.0
    deadline = Deadline(10.0, lambda: now[0] - done)
    assert not pass_s(deadline, now, 16)
    assert pass_s(deadline, now, 1)


@pytest.mark.parametrize("measures", [False, True])
def test_a_stop_of_the_process_itself_does_not_count(now: list[float], measures: bool) -> None:
    """As by a scheduler that suspends the whole run, or a container that is paused."""
    done = now[0]
    deadline = Deadline(20.0, (lambda: now[0] - done) if measures else None)
    assert not pass_s(deadline, now, 8)
    now[0] += 10_000.0
    assert not deadline.is_over()
    left = 12 - int(LONGEST_TURN_S)  # of which so much counts
    assert not pass_s(deadline, now, left - 1)
    assert pass_s(deadline, now, int(LONGEST_TURN_S) + 1)


def test_a_stop_after_something_was_done_does_not_count_either(now: list[float]) -> None:
    done = now[0] + 8.0
    deadline = Deadline(10.0, lambda: now[0] - done)
    assert not pass_s(deadline, now, 9)
    now[0] += 10_000.0
    assert not deadline.is_over()
    assert not pass_s(deadline, now, 3)
    assert pass_s(deadline, now, 12)


def test_a_stop_before_the_last_thing_done_counts_no_more(now: list[float]) -> None:
    """What hangs after a stop of hours is noticed in its time."""
    done = [now[0]]
    deadline = Deadline(10.0, lambda: now[0] - done[0])
    assert not pass_s(deadline, now, 3)
    now[0] += 10_000.0
    assert not deadline.is_over()
    done[0] = now[0] + 1.0
    assert not pass_s(deadline, now, 10)
    assert pass_s(deadline, now, 1)


def test_a_look_in_between_is_no_stop(now: list[float]) -> None:
    deadline = Deadline(10.0)
    for _ in range(3):
        now[0] += 3.0
        deadline.look()
    now[0] += 2.0
    assert deadline.is_over()
