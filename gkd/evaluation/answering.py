"""Questions to a model, many beside each other: engines have work as long as there is any."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gkd.errors import ConfigError, ControlLost, QuestionRefused, RunFailed, SignalExit, describe_raised
from gkd.evaluation.answers import RecordedAnswer
from gkd.evaluation.questions import Question
from gkd.evaluation.strategies import Answer, Messages, Reply
from gkd.types import Sampling, seed_of

MOST_REFUSED = 8
"""Answers that are refused before there is any, after which all others are taken to be refused, too."""


class ReplySource(Protocol):
    """A model that replies: engines on GPUs, or an endpoint."""

    @property
    def in_flight(self) -> int:
        """How many questions keep it busy."""

    async def reply(self, question: Question, prompt: str | Messages | None, sampling: Sampling, seed: int) -> Reply:
        """Return the reply to ``prompt``, None for the question as the set has it. Raises RunFailed."""

    async def work(self) -> None:
        """Serve replies until this is cancelled. Raises RunFailed when that is not possible any more."""


@dataclass(frozen=True, slots=True)
class AnswerJob:
    """One answer wanted: the ``index``-th of a question."""

    question: Question
    index: int


class CountingGenerate:
    """Samples replies for one job, as a strategy's ``generate``, and counts them."""

    def __init__(self, source: ReplySource, job: AnswerJob, sampling: Sampling, seed: int) -> None:
        self._source, self._job, self._sampling, self._seed = source, job, sampling, seed
        self._n_replies = self._n_waiting = 0
        self.limit_idling(None, 0.0)
        self.n_tokens: float = 0
        self._truncated: dict[str, bool] = {}

    @property
    def question(self) -> str:
        """The text of the question: of messages the last one's."""
        prompt = self._job.question.prompt
        return prompt.text if prompt.messages is None else str(prompt.messages[-1]["content"])

    async def __call__(
        self,
        prompt: str | Messages | None = None,
        *,
        temperature: float | None = None,
        max_response_length: int | None = None,
    ) -> Reply:
        """Return the model's reply. Every reply has a seed of its own, which depends on its place alone."""
        sampling = self._sampling
        if temperature is not None:
            sampling = replace(sampling, temperature=temperature)
        if max_response_length is not None:
            sampling = replace(sampling, max_tokens=max_response_length)
        seed = seed_in_set(self._seed, self._job.question.key, self._job.index, self._n_replies)
        self._n_replies += 1
        question = self._job.question
        self._n_waiting += 1
        self._postpone()
        try:
            reply = await self._source.reply(question, prompt, sampling, seed)
        finally:
            self._n_waiting -= 1
            self._postpone()
        reply = replace(reply, prompt=question.prompt.text, stops=sampling.stop)
        self.n_tokens += reply.n_tokens
        self._truncated.pop(reply.text, None)
        self._truncated[reply.text] = reply.truncated  # the last one that came stands last
        return reply

    def limit_idling(self, limit: asyncio.Timeout | None, idle_s: float) -> None:
        """Have ``limit`` end what has waited for no reply in ``idle_s``; None: nothing has to end."""
        self._limit, self._idle_s = limit, idle_s

    def _postpone(self) -> None:
        if self._limit is not None and not self._limit.expired():
            now = asyncio.get_running_loop().time()
            self._limit.reschedule(None if self._n_waiting else now + self._idle_s)

    def is_truncated(self, text: str) -> bool:
        """Return whether the limit cut the reply that an answer is, or of one that is none the last reply."""
        return self._truncated.get(text, next(reversed(self._truncated.values()), False))


def seed_in_set(seed: int, question: str, *place: int) -> int:
    """Return the seed of a reply to a question, by its key and the reply's place: the same in every process."""
    return seed_of(seed, int.from_bytes(hashlib.sha256(question.encode()).digest()[:6]), *place)


def answer_all(
    source: ReplySource,
    jobs: Iterable[AnswerJob],
    strategy: Any,
    sampling: Sampling,
    seed: int,
    idle_s: float,
    done: Callable[[AnswerJob, RecordedAnswer], None],
) -> None:
    """Answer every job with ``strategy`` and hand each answer to ``done`` as it comes.

    Raises RunFailed when the source cannot reply any more, or the strategy raises, or waits ``idle_s`` for anything but
    replies; answers before that are handed over.
    Questions that the source refuses raise it once all others are answered.
    """
    refused: list[QuestionRefused] = []

    async def run() -> None:
        waiting, last, n_answered = iter(jobs), [time.monotonic()], 0

        async def work() -> None:
            nonlocal n_answered
            for job in waiting:
                generate = CountingGenerate(source, job, sampling, seed)
                try:
                    answer = await _answer(strategy, generate, job, idle_s)
                except QuestionRefused as error:
                    refused.append(error)
                    if not n_answered and len(refused) >= MOST_REFUSED:
                        raise
                    continue
                n_answered += 1
                now = time.monotonic()
                cost, n_tokens = (None if math.isnan(n) else n for n in (float(answer.cost), generate.n_tokens))
                truncated, seconds = generate.is_truncated(answer.text), now - last[0]
                done(job, RecordedAnswer(answer.text, cost, int(answer.iterations), n_tokens, truncated, seconds))
                last[0] = now

        async with asyncio.TaskGroup() as group:
            serving = group.create_task(source.work())
            workers = [group.create_task(work()) for _ in range(source.in_flight)]
            group.create_task(_cancel_after(workers, serving))

    try:
        _run_to_end(run())
    except BaseExceptionGroup as failures:
        raise next(_flatten(failures)) from None
    if refused:
        more = f" (and {len(refused) - 1} more answers)" if len(refused) > 1 else ""
        raise RunFailed(f"{refused[0]}{more}; all other answers are kept")


def _run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` in a loop of its own; on another thread where this one has a loop already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    with ThreadPoolExecutor(1, "evaluation") as thread:
        thread.submit(asyncio.run, work).result()


async def _answer(strategy: Any, generate: CountingGenerate, job: AnswerJob, idle_s: float) -> Answer:
    failure = f"the strategy {name_of(strategy)} failed on question {job.question.prompt.id + 1}"
    limit = asyncio.timeout(idle_s)
    try:
        async with limit:
            generate.limit_idling(limit, idle_s)
            answer = await strategy(generate, job.question.row)
    except (RunFailed, ConfigError, ControlLost, SignalExit):
        raise
    except (Exception, SystemExit) as error:  # a user's strategy may raise anything, and may end programs
        if limit.expired():
            raise RunFailed(f"{failure}: it waited {idle_s:g} s, and for no reply (rollout.timeout_s)") from None
        raise RunFailed(f"{failure}: {describe_raised(error)}") from error
    finally:
        generate.limit_idling(None, idle_s)
    if not isinstance(answer, Answer) or not isinstance(answer.text, str):
        raise RunFailed(
            f"the strategy {name_of(strategy)} returned {type(answer).__name__}, not a "
            "gkd.evaluation.strategies.Answer with a text"
        )
    _require_number(strategy, "cost", answer.cost, math.isinf)  # NaN: it is not known
    _require_number(strategy, "iterations", answer.iterations, lambda value: not math.isfinite(value))
    return answer


def _require_number(strategy: Any, name: str, value: Any, is_none: Callable[[float], bool]) -> None:
    """Raise RunFailed for what a strategy counted, unless it is a number that can be written."""
    try:
        wrong = is_none(float(value))
    except (TypeError, ValueError):
        wrong = True
    if wrong:
        raise RunFailed(f"the strategy {name_of(strategy)} returned an Answer with {name}={value!r}: no number")


def name_of(strategy: Any) -> str:
    """Return what messages call a strategy: its name, or its class'."""
    return str(getattr(strategy, "__name__", type(strategy).__name__))


async def _cancel_after(workers: list[asyncio.Task[None]], serving: asyncio.Task[None]) -> None:
    await asyncio.wait(workers)
    serving.cancel()


def _flatten(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _flatten(error)
        else:
            yield error
