"""What each reward is worth, and that one that raises or hangs costs its own sample only."""

from __future__ import annotations

import math
import os
import signal
import time

import pytest

from gkd.config import Reward
from gkd.errors import ConfigError
from gkd.rewards.completion import Completion
from gkd.rewards.pool import RewardPool
from gkd.rewards.registry import resolve

MODULE = "tests.rewards.functions"


def judged(response: str, answer: str | None = "#### 4", n: int = 5, limit: int = 10) -> Completion:
    return Completion("2 + 2 =", response, answer, n, limit, n == limit)


def value(name: str, completion: Completion, **options: object) -> float:
    settings = Reward.model_validate({"functions": [name], **({name: options} if options else {})})
    return resolve(name, settings)(completion)


def test_accuracy() -> None:
    assert value("accuracy", judged("so it is #### 4")) == 1.0
    assert value("accuracy", judged("so it is #### 5")) == 0.0
    with pytest.raises(ValueError, match="no reference answer"):
        value("accuracy", judged("4", answer=None))


def test_format() -> None:
    assert value("format", judged("<think>a\nb</think> <answer>4</answer>")) == 1.0
    assert value("format", judged("<answer>4</answer>")) == 0.0
    assert value("format", judged("so #### 4"), pattern=r"####\s*\d") == 1.0


def test_reasoning_steps() -> None:
    assert value("reasoning_steps", judged("Step 1: a\nStep 2: b\n3. c\n- d")) == 1.0
    assert value("reasoning_steps", judged("First, a\nso b")) == pytest.approx(1 / 3)
    assert value("reasoning_steps", judged("1. a\n2) b"), wanted=4) == 0.5


@pytest.mark.parametrize(("n", "right", "wrong"), [(0, 1.0, -1.0), (5, 0.75, -0.75), (10, 0.5, -0.5)])
def test_cosine_goes_from_its_first_value_to_its_second(n: int, right: float, wrong: float) -> None:
    assert value("cosine", judged("#### 4", n=n)) == pytest.approx(right)
    assert value("cosine", judged("#### 5", n=n)) == pytest.approx(wrong)
    assert value("cosine", judged("#### 4", n=2)) == pytest.approx(0.5 + 0.5 * (1 + math.cos(math.pi / 5)) / 2)


def test_repetition_penalty() -> None:
    assert value("repetition_penalty", judged("a b c d e")) == 0.0
    assert value("repetition_penalty", judged("a b c a b c")) == pytest.approx(-1 / 4)
    assert value("repetition_penalty", judged("a a a a"), n=1, largest=0.5) == pytest.approx(-0.5 * 3 / 4)
    assert value("repetition_penalty", judged("a b")) == 0.0


def test_length() -> None:
    assert value("length", judged("", n=4)) == pytest.approx(0.6)
    assert [value("length", judged("", n=n), wanted=4) for n in (0, 2, 4, 8, 10)] == [0.0, 0.5, 1.0, 0.0, 0.0]


def test_a_users_function() -> None:
    assert resolve(f"{MODULE}:words", Reward())(judged("one two")) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:reward", "nowhere:reward cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        (f"{MODULE}:missing", "cannot be imported: AttributeError"),
        ("tests.rewards.ends:reward", "cannot be imported: SystemExit"),
        (f"{MODULE}:CONSTANT", "is no function but int"),
    ],
)
def test_what_is_no_reward(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(name, Reward())


def test_a_reward_that_raises_or_hangs_costs_its_own_sample_only() -> None:
    names = [f"{MODULE}:{name}" for name in ("words", "raises", "hangs", "not_a_number")]
    pool = RewardPool(Reward(functions=names, timeout_s=2.0, workers=2))
    began = time.monotonic()
    futures = [pool.submit(judged("a b", n=n)) for n in (1, 2, 3, 4)]
    found = [{name.rpartition(":")[2]: f.exception(60) or f.result() for name, f in own.items()} for own in futures]
    pool.close()
    assert time.monotonic() - began < 50
    assert [row["words"][0] for row in found] == [2.0] * 4
    assert all(0 <= row["words"][1] < 1 for row in found)  # seconds
    assert [str(row["raises"]) for row in found[::2]] == ["KeyError: 'odd'"] * 2
    assert [row["raises"][0] for row in found[1::2]] == [1.0] * 2
    assert str(found[0]["hangs"]) == "TimeoutError: no reward within 2 s (reward.timeout_s)"
    assert [row["hangs"][0] for row in found[1:]] == [0.5] * 3
    assert all("the reward is nan" in str(row["not_a_number"]) for row in found)


def test_a_reward_process_that_is_killed_costs_its_own_sample_only() -> None:
    """Killed while it evaluates, while it has nothing to do, and while it starts."""
    own, other = f"{MODULE}:kills_itself", f"{MODULE}:pid"
    pool = RewardPool(Reward(functions=[own, other], timeout_s=30.0, workers=1))
    try:

        def evaluated(n: int) -> tuple[object, int]:
            futures = pool.submit(judged("a", n=n))
            return futures[own].exception(60) or futures[own].result()[0], int(futures[other].result(60)[0])

        first, pid = evaluated(1)
        assert str(first) == "ChildProcessError: the process that computed it was ended by SIGKILL"
        second, pid = evaluated(2)
        assert str(second) == "ChildProcessError: the process that computed it ended with exit code 7"
        assert str(evaluated(3)[0]) == "Unpicklable: one and other"
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
        value_, started = evaluated(4)
        assert value_ == 0.25
        assert started != pid
        waiting = [pool.submit(judged("a", n=n))[own] for n in (1, 5, 6, 7)]
        assert [future.exception(60) is None for future in waiting] == [False, True, True, True]
    finally:
        pool.close()


def test_what_waits_for_a_pool_that_is_closed_fails() -> None:
    name = f"{MODULE}:hangs"
    pool = RewardPool(Reward(functions=[name], timeout_s=600.0, workers=1))
    futures = [pool.submit(judged("a", n=1))[name] for _ in range(3)]
    pool.close()
    assert all("Error" in str(future.exception(30)) for future in futures)
