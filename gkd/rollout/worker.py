"""One sampling engine: takes requests as they come, has every finished sample scored at once, hands both on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from gkd.cluster.failure import WorkerHangs, one_line
from gkd.config import REWARD_MODEL, Config, Weights
from gkd.data.tokenizer import load_tokenizer, tokenizer_hash
from gkd.errors import RunFailed
from gkd.inference.engine import EngineSpec, Finished, InferenceEngine, Span
from gkd.inference.requests import Refused
from gkd.observability.memory import memory_here
from gkd.rewards.completion import Completion
from gkd.rewards.pool import RewardError, RewardPool, Timed, finite
from gkd.rewards.reward_model import tokens_of
from gkd.scoring.client import Rate, Score, TeacherClient
from gkd.types import Job, Record, Request, Sample, Scored, Target, teacher_of
from gkd.weights.transfer import Piece, Receiver

IDLE_POLL_S = 0.5
Result = TypeVar("Result")


class RolloutWorker:
    """Runs an engine on the thread that calls :meth:`serve`; everything else may be called from other threads."""

    def __init__(self, config: Config, spec: EngineSpec, span: Span | None = None) -> None:
        self.config, self.rank, self.device = config, spec.rank, spec.device
        self.engine: InferenceEngine[Request, Finished] = config.rollout.engine_class(replace(spec, span=span))
        self._receiver = _receiver(config.weights)
        self._eos_ids = spec.model.eos_ids
        self.judges: dict[str, TeacherClient] = {}
        self.tokenizer = load_tokenizer(spec.model_path)
        self.rewards = RewardPool(config.reward) if config.algorithm.policy_weight else None
        self._rater: tuple[Any, bool] | None = None  # the reward model's tokenizer, and whether it is the student's
        if config.asks_reward_model:
            tokenizer = load_tokenizer(config.reward_model.model.path or "", "reward_model.model.path")
            self._rater = tokenizer, tokenizer_hash(tokenizer) == tokenizer_hash(self.tokenizer)
        self.version = 0
        self._commands: queue.Queue[Callable[[], None]] = queue.Queue()
        self._out: queue.Queue[tuple[Record, Scored] | BaseException] = queue.Queue()
        self._jobs: dict[int, Job] = {}
        self._ended: BaseException | None = None
        self._asleep = False
        self._intact = True  # whether the engine holds one whole version of the weights

    def connect(self, judges: Mapping[str, dict[str, Any]]) -> None:
        """Shake hands with the servers of teacher and reference; arguments by name, of :class:`TeacherClient`.

        Raises ConfigError where student and teacher do not fit together, RunFailed when a server does not answer.
        """
        for name, arguments in judges.items():
            self.judges[name] = TeacherClient(**arguments)
            self.judges[name].connect()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Hand over requests; their records come out of :meth:`records`."""
        self._commands.put(lambda: self._add(jobs))

    def pause(self, version: int) -> None:
        """Finish what is being sampled; sample no more until all pieces of ``version`` are loaded."""
        self._between_steps(self._pause, f"become idle for weights version {version}")

    def receive(self, piece: Piece) -> int:
        """Load the next piece of new weights once the engine is idle; returns the version that it serves then.

        From the first piece to the last the engine does not sample. Raises WorkerHangs past the deadline.
        """
        return self._between_steps(lambda: self._receive(piece), f"load {piece}")

    def join_group(self, address: str, engines: Sequence[int], workers: int) -> None:
        """Join the actor and the other ``engines`` (ranks), of ``workers`` processes each, in a group for weights."""
        offset, world = 1 + workers * engines.index(self.rank), 1 + workers * len(engines)
        self._between_steps(lambda: self.engine.join(address, offset, world), "join the actor's group")

    def _between_steps(self, run: Callable[[], Result], what: str) -> Result:
        """Have the engine's thread do something, and wait for it at most ``weights.timeout_s``."""
        if self._ended is not None:
            raise RunFailed(f"rollout rank {self.rank} cannot {what}: its engine ended with {one_line(self._ended)}")
        done: Future[Result] = Future()

        def command() -> None:
            try:
                done.set_result(run())
            except BaseException as error:
                done.set_exception(error)

        self._commands.put(command)
        limit = self.config.weights.timeout_s
        try:
            return done.result(limit)
        except TimeoutError:
            raise WorkerHangs(
                f"rollout rank {self.rank} did not {what} within {limit:g} s (weights.timeout_s)"
            ) from None

    def give_back(self) -> None:
        """Give the engine's memory back once it is idle. Raises WorkerHangs past the deadline."""
        self._between_steps(self._sleep, "give its memory back")

    def take_back(self, weights_only: bool) -> None:
        """Take it again; ``weights_only``: as far as new weights need. Raises WorkerHangs past the deadline."""
        self._between_steps(lambda: self._wake(weights_only), "take its memory again")

    def progress(self) -> tuple[int, int]:
        """Forward passes so far, and responses that are not finished, those not begun included."""
        return self.engine.forward_passes, len(self._jobs) + self._commands.qsize()

    def memory(self) -> dict[str, float]:
        """Memory of this engine's process."""
        return memory_here()

    def serve(self) -> None:
        """Run the engine for as long as this process lives. What it raises also comes out of :meth:`records`."""
        try:
            while True:
                busy = self.engine.busy()
                try:
                    command = self._commands.get(block=not busy, timeout=None if busy else IDLE_POLL_S)
                except queue.Empty:
                    command = self._step
                command()
        except BaseException as error:
            self._ended = error
            self._out.put(error)
            raise
        finally:
            for client in self.judges.values():
                client.close()
            if self.rewards is not None:
                self.rewards.close()

    def records(self) -> Iterator[list[Scored] | list[Record]]:
        """Finished samples as they come, several at a time where several are there: a list, then that of their records.

        Being streamed, they belong to the driver, not to this process: they outlive it.
        """
        while True:
            batch = [self._out.get()]
            while not self._out.empty():
                batch.append(self._out.get_nowait())
            samples: list[Scored] = []
            records: list[Record] = []
            for item in batch:
                if isinstance(item, BaseException):
                    raise item
                records.append(replace(item[0], slot=len(samples)))
                samples.append(item[1])
            yield samples
            yield records

    def _add(self, jobs: Sequence[Job]) -> None:
        if not self._intact:
            raise RunFailed(f"rollout rank {self.rank} was asked to sample from weights that are only half there")
        if self._asleep:
            raise RunFailed(f"rollout rank {self.rank} was asked to sample while its memory was others'")
        for job in jobs:
            ids = job.request.prompt.answer_ids
            if job.request.own_answer and ids is not None:
                unknown = np.full(len(ids), np.nan, dtype=np.float32)
                ended = int(ids[-1]) in self._eos_ids
                self._finish(job, Finished(ids, unknown, "stop" if ended else "length"))
                continue
            self._jobs[job.key] = job
            try:
                self.engine.add(job.key, job.request)
            except ValueError as error:
                raise RunFailed(
                    f"rollout rank {self.rank} cannot sample prompt {job.request.prompt.id}: {error}"
                ) from None

    def _step(self) -> None:
        for key, finished in self.engine.step():
            if isinstance(finished, Refused):
                raise RunFailed(f"rollout rank {self.rank} cannot sample: {finished.message}")
            self._finish(self._jobs.pop(key), finished)

    def _finish(self, job: Job, finished: Finished) -> None:
        sample = Sample(job.request, finished.response_ids, finished.logprobs, self.version, finished.finish_reason)
        now, asked = time.time(), self._ask(job, sample)
        if not asked:
            self._deliver(job, sample, now, asked)
            return
        left, lock = [len(asked)], threading.Lock()

        def one_less(_: Future[Any]) -> None:
            with lock:
                left[0] -= 1
                last = left[0] == 0
            if not last:
                return
            try:
                self._deliver(job, sample, now, asked)
            except BaseException as error:  # a future's callback would swallow it, and the sample would be waited for
                self._out.put(error)

        for future in list(asked.values()):
            future.add_done_callback(one_less)

    def _ask(self, job: Job, sample: Sample) -> dict[str, Future[Any]]:
        """Start judging a finished sample: by "teacher", by "reference", and by every reward's name."""
        prompt, judging = job.request.prompt, job.judging
        asked: dict[str, Future[Any]] = {}
        if judging.top_k is not None:
            score = Score(prompt.as_teacher_sees_it, sample.response_ids, judging.top_k, judging.temperature)
            asked["teacher"] = self.judges[teacher_of(prompt)].submit(score)
        if judging.reference:
            score = Score(prompt.token_ids, sample.response_ids, 0, job.request.sampling.temperature)
            asked["reference"] = self.judges["reference"].submit(score)
        if judging.rewards:
            assert self.rewards is not None, "rewards are asked for only where the configuration has them"
            response = self.tokenizer.decode(sample.response_ids.tolist(), skip_special_tokens=True)
            if self._rater is not None:
                asked[REWARD_MODEL] = self._rated(sample, response, *self._rater)
            asked |= self.rewards.submit(
                Completion(
                    prompt=prompt.text,
                    response=response,
                    answer=prompt.answer,
                    n_tokens=len(sample.response_ids),
                    max_tokens=job.request.sampling.max_tokens,
                    truncated=sample.finish_reason == "length",
                )
            )
        return asked

    def _rated(self, sample: Sample, response: str, tokenizer: Any, same_tokenizer: bool) -> Future[Timed]:
        """The reward model's mark and how long it took to come."""
        started, found = time.monotonic(), Future[Timed]()
        ids = tokens_of(sample.request.prompt, sample.response_ids, response, tokenizer, same_tokenizer)

        def marked(mark: Future[float]) -> None:
            try:
                found.set_result((finite(mark.result()), time.monotonic() - started))
            except Exception as error:
                found.set_exception(error)

        self.judges[REWARD_MODEL].submit(Rate(ids)).add_done_callback(marked)
        return found

    def _deliver(self, job: Job, sample: Sample, generated: float, asked: Mapping[str, Future[Any]]) -> None:
        """Hand on a sample that all have judged, or the error of a model that could not."""
        models = {name: asked[name] for name in ("teacher", "reference") if name in asked}
        failures = [error for error in (future.exception() for future in models.values()) if error is not None]
        if failures:
            self._out.put(failures[0])
            return
        told: dict[str, Target] = {name: future.result() for name, future in models.items()}
        reference = told["reference"].token_logprobs if "reference" in told else None
        given = {name: self._reward(future) for name, future in asked.items() if name not in models}
        record = Record(
            key=job.key,
            prompt_id=job.request.prompt.id,
            index=job.request.index,
            rewards={name: one if isinstance(one, str) else one[0] for name, one in given.items()},
            reward_s={name: one[1] for name, one in given.items() if not isinstance(one, str)},
            n_prompt=len(job.request.prompt.token_ids),
            n_response=len(sample.response_ids),
            finish_reason=sample.finish_reason,
            version=sample.version,
            worker=self.rank,
            generated_s=generated,
            scored_s=time.time(),
            slot=0,
        )
        self._out.put((record, Scored(sample, told.get("teacher"), reference)))

    def _reward(self, future: Future[Timed]) -> Timed | str:
        """What a reward function gave and how long it took, or why it gave nothing."""
        error = future.exception()
        if error is None:
            return future.result()
        return one_line(error if isinstance(error, RewardError) else f"{type(error).__name__}: {error}")

    def _sleep(self) -> None:
        self._become_idle()
        self._asleep = True
        self.engine.sleep()

    def _wake(self, weights_only: bool) -> None:
        self.engine.wake(weights_only)
        self._asleep = weights_only

    def _become_idle(self) -> None:
        while self.engine.busy():
            self._step()

    def _pause(self) -> None:
        self._become_idle()
        self._intact = False

    def _receive(self, piece: Piece) -> int:
        if piece.number == 0:
            self._pause()
        if self._receiver is None:
            self.engine.receive_weights(piece)
        else:
            self.engine.load_weights(piece, self._receiver.receive(piece))
        if piece.last:
            self._intact, self.version = True, piece.version
        return self.version


def rollout_follower(config: Config, spec: EngineSpec, span: Span) -> Any:
    """The part on a further node of the engine that a RolloutWorker with these arguments leads."""
    return config.rollout.engine_class.follow(replace(spec, span=span))


def _receiver(weights: Weights) -> Receiver | None:
    """What receives weights in this process; None where the engine's own processes do, on their GPUs."""
    import torch

    transfer = weights.transfer_class
    return None if transfer.gpu_to_gpu else transfer.receiver(weights, torch.device("cpu"))
