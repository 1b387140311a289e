"""Strategies beside each other, with a source that replies as it is asked."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import numpy as np
import pytest

from gkd.errors import RunFailed, SignalExit
from gkd.evaluation.answering import AnswerJob, answer_all
from gkd.evaluation.answers import RecordedAnswer
from gkd.evaluation.questions import Question
from gkd.evaluation.strategies import Answer, Columns, GenerateFn, Messages, Reply, plain
from gkd.types import Prompt, Sampling

SAMPLING = Sampling(8, 0.7)


class Echo:
    """Replies with what it was asked, when as many wait as it has places for, or nothing else is coming."""

    def __init__(self, in_flight: int = 3, fail_after: int | None = None) -> None:
        self.in_flight, self.fail_after = in_flight, fail_after
        self.waiting: list[tuple[str, asyncio.Future[Reply]]] = []
        self.most, self.seen = 0, []

    async def reply(self, question: Question, prompt: str | Messages | None, sampling: Sampling, seed: int) -> Reply:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.seen.append((question.key, prompt, sampling, seed))
        self.waiting.append((str(prompt or question.prompt.text), future))
        return await future

    async def work(self) -> None:
        while True:
            for _ in range(10):
                await asyncio.sleep(0)
            self.most = max(self.most, len(self.waiting))
            if self.fail_after is not None and len(self.seen) > self.fail_after:
                raise RunFailed("no engine is left")
            for text, future in self.waiting:
                future.set_result(Reply(text, len(text), False))
            self.waiting = []


def jobs(n: int, samples: int = 1) -> list[AnswerJob]:
    questions = [
        Question(f"{i:016x}", Prompt(i, np.array([i], np.int32), f"q{i}"), {"prompt": f"q{i}"}) for i in range(n)
    ]
    return [AnswerJob(question, index) for index in range(samples) for question in questions]


def answer(
    source: Any, to_answer: list[AnswerJob], strategy: Any = plain, idle_s: float = 60.0
) -> list[tuple[AnswerJob, RecordedAnswer]]:
    answers: list[tuple[AnswerJob, RecordedAnswer]] = []
    answer_all(source, to_answer, strategy, SAMPLING, 0, idle_s, lambda *answered: answers.append(answered))
    return answers


def test_every_job_is_answered_once_and_no_more_than_the_source_takes_are_under_way() -> None:
    source = Echo()
    answers = answer(source, jobs(10, samples=2))
    assert sorted((job.question.key, job.index) for job, _ in answers) == sorted(
        (j.question.key, j.index) for j in jobs(10, 2)
    )
    assert all(answered.text == job.question.prompt.text for job, answered in answers)
    assert source.most == 3


def test_seeds_depend_on_the_place_alone() -> None:
    first, second = Echo(in_flight=1), Echo(in_flight=5)
    answer(first, jobs(4, samples=2))
    answer(second, jobs(4, samples=2)[::-1])
    assert sorted(map(repr, first.seen)) == sorted(map(repr, second.seen))
    assert len({seed for *_, seed in first.seen}) == 8


def test_a_strategy_may_ask_several_times_and_its_tokens_are_counted() -> None:
    async def twice(generate: GenerateFn, row: Columns) -> Answer:
        again = generate(f"{row['prompt']} again", temperature=0.0, max_response_length=3)
        first, second = await asyncio.gather(generate(), again)
        await asyncio.sleep(0.01)  # something else than the model
        return Answer(second.text, first.n_tokens + second.n_tokens, 2)

    source = Echo(in_flight=2)
    ((_, answered), *_) = answer(source, jobs(3), twice)
    assert (answered.text, answered.cost, answered.iterations, answered.n_tokens) == ("q0 again", 10, 2, 10)
    assert [(sampling.temperature, sampling.max_tokens) for *_, sampling, _ in source.seen[:2]] == [(0.7, 8), (0.0, 3)]
    assert len({seed for *_, seed in source.seen}) == 6  # else the samples of one question would be alike


@pytest.mark.parametrize(("chosen", "truncated"), [("q0", False), ("qq cut", True), ("of its own", True)])
def test_an_answer_is_truncated_where_the_reply_is_that_it_is(chosen: str, truncated: bool) -> None:
    """And not where one of several others was that took the longest."""

    class Cut(Echo):
        async def reply(self, *args: Any) -> Reply:
            reply = await super().reply(*args)
            return Reply(reply.text, reply.n_tokens, "cut" in reply.text)

    async def choose(generate: GenerateFn, row: Columns) -> Answer:
        await asyncio.gather(generate(), generate("qq cut"))
        return Answer(chosen, 2.0, 2)

    assert [answered.truncated for _, answered in answer(Cut(), jobs(1), choose)] == [truncated]


def test_questions_are_put_where_a_loop_runs_already_as_in_a_notebook() -> None:
    async def cell() -> int:
        return len(answer(Echo(), jobs(3), plain))

    assert asyncio.run(cell()) == 3


def test_failures_are_one_line_and_what_was_answered_before_is_handed_over() -> None:
    answered: list[AnswerJob] = []
    with pytest.raises(RunFailed, match="no engine"):
        answer_all(Echo(fail_after=4), jobs(9), plain, SAMPLING, 0, 60.0, lambda job, _: answered.append(job))
    assert len(answered) == 3

    async def broken(generate: GenerateFn, row: Columns) -> Answer:
        return Answer(row["nothing"], 0)

    with pytest.raises(RunFailed, match=r"\bbroken .*question 1: KeyError: 'nothing'"):
        answer(Echo(), jobs(1), broken)

    async def text(generate: GenerateFn, row: Columns) -> str:
        return (await generate()).text

    with pytest.raises(RunFailed, match=r"\btext .*\bstr, .*gkd\.evaluation\.strategies\.Answer"):
        answer(Echo(), jobs(1), text)


@pytest.mark.parametrize(
    ("counted", "named"),
    [
        (Answer("1", None), "cost=None"),  # type: ignore[arg-type]
        (Answer("1", float("inf")), "cost=inf"),
        (Answer("1", 1.0, "two"), "iterations='two'"),  # type: ignore[arg-type]
        (Answer("1", 1.0, float("nan")), "iterations=nan"),  # type: ignore[arg-type]
    ],
)
def test_a_strategy_that_counts_no_numbers_is_one_line(counted: Answer, named: str) -> None:
    async def count(generate: GenerateFn, row: Columns) -> Answer:
        return counted

    with pytest.raises(RunFailed, match=rf"\bcount .*\b{named}"):
        answer(Echo(), jobs(1), count)


def test_a_strategy_that_waits_for_ever_is_ended_and_one_that_waits_for_replies_is_not() -> None:
    class Slow(Echo):
        async def reply(self, *args: Any) -> Reply:
            await asyncio.sleep(0.8)
            return await super().reply(*args)

    async def thrice(generate: GenerateFn, row: Columns) -> Answer:
        await asyncio.gather(generate(), generate())
        return Answer((await generate()).text, 0)

    async def hang(generate: GenerateFn, row: Columns) -> Answer:
        await generate()
        await asyncio.Event().wait()
        raise AssertionError

    assert len(answer(Slow(), jobs(2), thrice, 0.5)) == 2
    with pytest.raises(RunFailed, match=r"\bhang .*question 1: .*0\.5 s.*\brollout\.timeout_s\b"):
        answer(Echo(), jobs(1), hang, 0.5)


def test_a_strategy_that_ends_programs_fails_as_any_other() -> None:
    """With exit code 0 the evaluation would seem to be done. What a signal does is no failure of the strategy's."""

    async def leaves(generate: GenerateFn, row: Columns) -> Answer:
        raise SystemExit(0)

    async def stopped(generate: GenerateFn, row: Columns) -> Answer:
        raise SignalExit(signal.SIGTERM)

    with pytest.raises(RunFailed, match=r"\bleaves .*question 1: SystemExit: "):
        answer(Echo(), jobs(2), leaves)
    with pytest.raises(SignalExit):
        answer(Echo(), jobs(2), stopped)
