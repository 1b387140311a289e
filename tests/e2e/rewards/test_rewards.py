"""Rewards in processes of their own."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from gkd.config import Reward, load
from gkd.config.base import LONGEST_S
from gkd.config.own_code import keep_sources
from gkd.rewards.pool import RewardPool
from gkd.rewards.process import RewardProcess
from gkd.rollout.pipeline import ScoringPipeline
from gkd.types import Prompt, Sample, SampleRequest, Sampling, Scoring
from tests.data.models import WORDS, word_tokenizer
from tests.e2e.conftest import ROOT
from tests.error_text import contains_in_order
from tests.rewards.functions import PLACE
from tests.rewards.test_rewards import MODULE, make_completion


def test_a_reward_that_raises_or_hangs_costs_its_own_sample_only() -> None:
    names = [f"{MODULE}:{name}" for name in ("words", "raises", "hangs")]
    names.append(f"{ROOT / 'tests/rewards/functions.py'}:not_a_number")
    pool = RewardPool(Reward(functions=names, timeout_s=2.0, workers=2))
    futures = [pool.submit(make_completion("a b", n=n)) for n in (1, 2, 3, 4)]
    results = [{name.rpartition(":")[2]: f.exception(60) or f.result() for name, f in own.items()} for own in futures]
    pool.close()
    assert [row["words"][0] for row in results] == [2.0] * 4
    assert all(row["words"][1] >= 0 for row in results)  # seconds
    texts = [PLACE.sub("(HERE)", str(row["raises"])) for row in results[::2]]  # as of a loss of the user's own
    assert texts == ["KeyError: 'odd' (HERE)"] * 2
    assert [row["raises"][0] for row in results[1::2]] == [1.0] * 2
    assert contains_in_order(str(results[0]["hangs"]), "TimeoutError: ", "2 s (reward.timeout_s)")
    assert [row["hangs"][0] for row in results[1:]] == [0.5] * 3
    assert all("is nan" in str(row["not_a_number"]) for row in results)


def test_samples_that_are_rated_together_may_have_more_time_than_one_call_can_wait() -> None:
    """Reward.timeout_s is of each of them."""
    process = RewardProcess(Reward(functions=[f"{MODULE}:words"], timeout_s=LONGEST_S))
    try:
        process.send(7, f"{MODULE}:words", [make_completion("a b")], 4 * LONGEST_S)
        answer = process.receive(LONGEST_S)
        assert answer is not None and answer[0] == 7
        assert answer[1][0][0] == 2.0
    finally:
        process.close()


def test_a_script_that_rates_answers_runs_once(tmp_path: Path) -> None:
    """A user's from Python, which need not keep what it does from whoever imports it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from gkd.config import Reward\n"
        "from gkd.rewards.pool import RewardPool\n"
        "from tests.rewards.test_rewards import make_completion\n"
        "print('begins', flush=True)\n"
        "sys.path.append(Path('anywhere'))\n"  # a slip that Python lets pass
        f"pool = RewardPool(Reward(functions=['{MODULE}:words']))\n"
        f"print(pool.submit(make_completion('a b'))['{MODULE}:words'].result()[0])\n"
        "pool.close()\n"
    )
    done = subprocess.run(
        [sys.executable, script], check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.stdout.split() == ["begins", "2.0"]


def test_a_reward_process_that_is_killed_costs_its_own_sample_only() -> None:
    """Killed while it evaluates, while it has nothing to do, and while it starts."""
    own, other = f"{MODULE}:kills_itself", f"{MODULE}:pid"
    pool = RewardPool(Reward(functions=[own, other], timeout_s=30.0, workers=1))
    try:

        def evaluated(n: int) -> tuple[object, int]:
            futures = pool.submit(make_completion("a", n=n))
            return futures[own].exception(60) or futures[own].result()[0], int(futures[other].result(60)[0])

        first, pid = evaluated(1)
        assert contains_in_order(str(first), "ChildProcessError: ", "SIGKILL")
        second, pid = evaluated(2)
        assert contains_in_order(str(second), "ChildProcessError: ", "exit code 7")
        assert contains_in_order(str(evaluated(3)[0]), "Unpicklable: ", "one", "other")
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
        value_, started = evaluated(4)
        assert value_ == 0.25
        assert started != pid
        waiting = [pool.submit(make_completion("a", n=n))[own] for n in (1, 5, 6, 7)]
        assert [future.exception(60) is None for future in waiting] == [False, True, True, True]
    finally:
        pool.close()


def test_a_process_that_is_replaced_has_the_code_that_the_run_began_with(tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    text = "import os\ndef rate(completion):\n    return VALUE if completion.n_tokens else os._exit(7)\n"
    file.write_text(text.replace("VALUE", "1.0"))
    settings = Reward(functions=[name := f"{file}:rate"], timeout_s=30.0, workers=1)
    with keep_sources(tmp_path / "sources"):
        pool = RewardPool(settings)
        try:
            assert pool.submit(make_completion("a", n=1))[name].result(60)[0] == 1.0
            file.write_text(text.replace("VALUE", "2.0"))
            assert "exit code 7" in str(pool.submit(make_completion("", n=0))[name].exception(60))
            assert pool.submit(make_completion("a", n=1))[name].result(60)[0] == 1.0
        finally:
            pool.close()


def test_a_copy_of_the_process_that_a_reward_makes_answers_for_no_other_sample() -> None:
    for name in (f"{MODULE}:forks", f"{MODULE}:forks_later"):
        pool = RewardPool(Reward(functions=[name], timeout_s=30.0, workers=1, concurrency=3))
        futures = [pool.submit(make_completion("a", n=n))[name] for n in range(1, 7)]
        try:
            assert [future.result(60)[0] for future in futures] == [0.5] * 6
        finally:
            pool.close()


def test_async_rewards_that_block_or_end_their_process_cost_those_under_way_only() -> None:
    name = f"{MODULE}:blocks_or_ends"
    pool = RewardPool(Reward(functions=[name], timeout_s=1.0, workers=1, concurrency=2))
    try:
        for n, reason in ((2, r"TimeoutError"), (3, r"exit code 7")):
            assert reason in str(pool.submit(make_completion("a", n=n))[name].exception(60))
            assert [pool.submit(make_completion("a", n=n))[name].result(60)[0] for n in (4, 5, 6)] == [4, 5, 6]
    finally:
        pool.close()


def test_an_async_reward_that_takes_long_keeps_no_other_from_its_place() -> None:
    name = f"{MODULE}:longer"
    pool = RewardPool(Reward(functions=[name], timeout_s=600.0, workers=1, concurrency=3))
    try:
        long = pool.submit(make_completion("a", n=500))[name]
        others = [pool.submit(make_completion("a", n=0))[name] for _ in range(12)]
        assert [future.result(60)[0] for future in others] == [0.0] * 12
        assert not long.done()
    finally:
        pool.close()
    assert "ChildProcessError" in str(long.exception(60))


def test_what_waits_for_a_pool_that_is_closed_fails() -> None:
    name = f"{MODULE}:hangs"
    pool = RewardPool(Reward(functions=[name], timeout_s=600.0, workers=1))
    futures = [pool.submit(make_completion("a", n=1))[name] for _ in range(3)]
    pool.close()
    futures.append(pool.submit(make_completion("a", n=1))[name])
    assert all("Error" in str(future.exception(30)) for future in futures)


def test_async_rewards_of_many_samples_are_waited_for_together(tmp_path: Path) -> None:
    name, begun_and_ended = f"{MODULE}:noted", tmp_path / "calls"
    pool = RewardPool(Reward(functions=[name], timeout_s=30.0, workers=1))
    try:
        futures = [pool.submit(make_completion("a", str(begun_and_ended), n=n))[name] for n in range(4, 24)]
        rewards = [future.result(60) for future in futures]
    finally:
        pool.close()
    assert [reward for reward, _ in rewards] == list(range(4, 24))
    assert "++" in begun_and_ended.read_text()


def test_a_group_is_rated_at_once_async_or_not_and_has_the_time_of_all_its_samples() -> None:
    names = [f"{MODULE}:{name}" for name in ("words", "ranked", "ranked_later", "half_a_second_each")]
    pool = RewardPool(Reward(functions=names, timeout_s=1.4, workers=2))
    try:
        groups = [[make_completion("a" * n, n=n) for n in order] for order in ((1, 3, 2), (5, 4, 6))]
        single = [pool.submit(completion) for group in groups for completion in group]
        futures = [own for group in groups for own in pool.submit_group(group)]
        assert all(own.keys() == {names[0]} for own in single)
        assert [own[names[0]].result(60)[0] for own in single] == [1.0] * 6
        for name in names[1:3]:
            assert [own[name].result(60)[0] for own in futures] == [0.0, 1.0, 0.5, 0.5, 0.0, 1.0]
        assert [own[names[3]].result(60)[0] for own in futures] == [3.0] * 6
        late = pool.submit_group(groups[0][:1])[0][names[3]]
        assert late.result(60)[0] == 1.0
    finally:
        pool.close()


def test_a_reward_sees_a_response_without_the_text_that_ended_it(tmp_path: Path) -> None:
    """As accuracy in validation and evaluations does."""
    word_tokenizer().save_pretrained(tmp_path)
    config = load({"algorithm": {"name": "grpo"}, "rollout": {"n": 2}, "reward": {"functions": ["accuracy"]}})
    delivered: queue.Queue[Any] = queue.Queue()
    pipeline = ScoringPipeline(config, str(tmp_path), 0, delivered.put)
    try:
        cases = (("bc", ()), ("bc", ("c",)), ("bcd", ("c",)))  # the last as where the token of "c" has more
        for key, (words, stop) in enumerate(cases):
            ids = np.array([WORDS.index(word) for word in words], np.int32)
            prompt = Prompt(key, np.array([1], np.int32), "", answer="b")
            request = SampleRequest(prompt, 0, 0, Sampling(16, stop=stop), Scoring(rewards=True), key=key)
            pipeline.submit(Sample.single_turn(request, ids, np.zeros(len(ids), np.float32), 0, "stop"))
        rewards = {one.key: one.rewards["accuracy"] for _ in cases for one, _ in delivered.get(timeout=60)}
    finally:
        pipeline.close()
    assert rewards == {0: 0.0, 1: 1.0, 2: 1.0}


def test_samples_that_are_rated_together_come_out_together(tmp_path: Path) -> None:
    """By their index, whichever was sampled first, each with its own reward; other groups do not wait for them."""
    word_tokenizer().save_pretrained(tmp_path)
    name = f"{MODULE}:sizes"
    rewards = [name, "length", trl := f"{MODULE}:trl_of_ids"]
    settings = {"algorithm": {"name": "grpo"}, "rollout": {"n": 3}, "trainer": {"total_steps": 8}}
    config = load({**settings, "reward": {"functions": rewards}})
    delivered: queue.Queue[Any] = queue.Queue()
    pipeline = ScoringPipeline(config, str(tmp_path), 0, delivered.put)
    try:
        finished = [(0, 2, 4), (3, 0, 1), (3, 2, 3), (0, 0, 2), (3, 1, 2), (0, 1, 3)]  # group, index, tokens
        for first, index, n_tokens in finished:
            request = SampleRequest(
                Prompt(first, np.array([1], np.int32), "", columns={"level": 3}), index, 0, Sampling(16),
                Scoring(rewards=True, group_size=3), key=first + index,
            )  # fmt: skip
            ids = np.full(n_tokens, 5, np.int32)
            pipeline.submit(Sample.single_turn(request, ids, np.zeros(n_tokens, np.float32), 2, "stop"))
        groups = [delivered.get(timeout=60) for _ in range(2)]
        assert delivered.empty()
        assert {tuple(one.key for one, _ in group): [one.rewards[name] for one, _ in group] for group in groups} == {
            (0, 1, 2): [2 / 9, 3 / 9, 4 / 9],
            (3, 4, 5): [1 / 6, 2 / 6, 3 / 6],
        }
        assert all(one.rewards[trl] == one.n_sampled / 4 for group in groups for one, _ in group)  # after 2 steps of 8
        assert all(one.rewards["length"] == 1 - one.n_sampled / 16 for group in groups for one, _ in group)
    finally:
        pipeline.close()
