"""One sampling engine: takes requests as they come, has every finished sample scored at once, hands it on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from gkd.cluster.activity import HERE, noted, report_here
from gkd.cluster.failure import WorkerHangs
from gkd.config import Config, Weights
from gkd.errors import RunFailed, one_line
from gkd.inference.engine import EngineSpec, InferenceEngine, Span
from gkd.inference.requests import Refused
from gkd.rollout.own_answers import own_answer
from gkd.rollout.pipeline import Scored, ScoringPipeline
from gkd.rollout.slots import Slots
from gkd.types import Sample, SampleRequest, ScoredSample, TrainingSample, Unscored
from gkd.weights.delivery import Arrivals, Push
from gkd.weights.transfer import Piece, Receiver

IDLE_POLL_S = 0.5
GATHER_S = 0.05
"""Scored samples wait so long for others, so that the driver gets few messages."""
Result = TypeVar("Result")


class RolloutWorker:
    """Runs an engine on the thread that calls :meth:`serve`; everything else may be called from other threads."""

    def __init__(self, config: Config, spec: EngineSpec, span: Span | None = None) -> None:
        self.config, self.rank, self.device = config, spec.rank, spec.device
        self.engine: InferenceEngine[SampleRequest, Sample] = config.rollout.engine_class(replace(spec, span=span))
        self._cache_bytes: int | None = self.engine.cache_bytes()
        self._receiver = _receiver(config.weights)
        self._eos_ids = spec.model.eos_ids
        self.pipeline = ScoringPipeline(config, spec.model_path, spec.rank)
        self._slots = Slots(config.rollout.slots)
        self._commands: queue.Queue[Callable[[], None]] = queue.Queue()
        self._unfinished = 0  # requests in the engine
        self._ended: BaseException | None = None
        self._asleep = False
        self._arriving = threading.Lock()
        self._arrivals: Arrivals | None = None
        self._intact = True  # whether the engine holds one whole version of the weights
        self._held: list[SampleRequest] = []  # that came while it does not

    def connect(self, scorers: Mapping[str, dict[str, Any]]) -> None:
        """Shake hands with the models that score; as :meth:`gkd.rollout.pipeline.ScoringPipeline.connect`."""
        self.pipeline.connect(scorers)

    def expect_scorer(self, scorer: str, name: str, within_s: float, address: str) -> None:
        """Wait for a server that is being started; as :meth:`gkd.rollout.pipeline.ScoringPipeline.expect_scorer`."""
        self.pipeline.expect_scorer(scorer, name, within_s, address)

    def cache_bytes(self) -> int | None:
        """Return the size that the engine measured for its cache when it started, see :class:`InferenceEngine`."""
        return self._cache_bytes

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Hand over requests; their samples come out of :meth:`finished`.

        Those that come while new weights are loaded are sampled from these, once they are whole.
        """
        self._commands.put(lambda: self._add(requests))

    def pause(self, version: int) -> None:
        """Finish what is being sampled, unless weights are loaded in flight; sample no more until all pieces of
        ``version`` are loaded.
        """
        self._between_steps(self._pause, f"become idle for weights version {version}")

    def load_piece(self, push: Push, piece: Piece, n_senders: int) -> int:
        """Load the next piece of new weights once the engine computes nothing. Called by ranks of the actor.

        Each of ``n_senders`` sends a part of it; returns when the whole is loaded, the version that the engine serves
        then. From the first piece to the last it does not sample. Raises WorkerHangs past the deadline.
        """
        self._arrivals_of(push).load(
            piece, n_senders, lambda whole: self._between_steps(lambda: self._receive(whole), f"load {whole}")
        )
        return self.engine.version

    def receive(self, push: Push) -> int:
        """Wait until all pieces of a push are loaded; returns the version that the engine serves then."""
        self._arrivals_of(push).wait()
        return self.engine.version

    def arrived(self) -> tuple[int, int]:
        """Return how many pieces of the newest push have come, and how many of them are loaded."""
        return (0, 0) if self._arrivals is None else self._arrivals.progress()

    def _arrivals_of(self, push: Push) -> Arrivals:
        """Return what has come of a push; the first to ask begins it. Raises RunFailed for one that is over."""
        with self._arriving:
            if self._arrivals is None or self._arrivals.push.number < push.number:
                self._arrivals = Arrivals(push)
            if self._arrivals.push.number > push.number:
                raise RunFailed(f"rollout rank {self.rank}: a piece came of a push that is over")
            return self._arrivals

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
                done.set_exception(self._cause_of(error))

        self._commands.put(command)
        limit = self.config.weights.timeout_s
        try:
            return done.result(limit)
        except TimeoutError:
            raise WorkerHangs(
                f"rollout rank {self.rank} did not {what} within {limit:g} s (weights.timeout_s)"
            ) from None

    def sleep(self) -> None:
        """Give the engine's memory back once it is idle. Raises WorkerHangs past the deadline."""
        self._between_steps(self._sleep, "go to sleep")

    def wake(self, weights_only: bool) -> None:
        """Take it again; ``weights_only``: as far as new weights need. Raises WorkerHangs past the deadline."""
        self._between_steps(lambda: self._wake(weights_only), "wake up")

    def progress(self) -> tuple[int, int]:
        """Return forward passes so far, and responses that are not finished, those not begun included."""
        return self.engine.forward_passes, self._unfinished + len(self._held) + self._commands.qsize()

    def report(self) -> dict[str, Any]:
        """Return memory and activity of this process, see :func:`gkd.cluster.activity.report_here`."""
        return report_here()

    def serve(self) -> None:
        """Run the engine for as long as this process lives. What it raises also comes out of :meth:`finished`."""
        try:
            while True:
                busy = self.engine.busy() and self._intact
                HERE.switch("sample" if busy else None, self.engine.version if busy else None)
                try:
                    command = self._commands.get(block=not busy, timeout=None if busy else IDLE_POLL_S)
                except queue.Empty:
                    command = self._step
                command()
        except BaseException as error:
            self._ended = cause = self._cause_of(error)
            self.pipeline.scored.put(cause)
            if cause is error:
                raise
            raise cause from error
        finally:
            self.pipeline.close()

    def _cause_of(self, error: BaseException) -> BaseException:
        """Return why the engine failed with ``error``: that one, unless a process of the engine's has died."""
        if isinstance(error, Exception) and self.engine.has_lost_process():
            return WorkerHangs(f"rollout rank {self.rank} lost a process of its engine: {one_line(error)}")
        return error

    def finished(self) -> Iterator[list[ScoredSample] | list[TrainingSample | Unscored]]:
        """Yield scored samples as they come, several at a time: a list of their arrays, then their numbers.

        Being streamed, they belong to the driver, not to this process: they outlive it. Samples that are generated and
        not scored yet are among the latter where the driver may have others for their slots, or waits for the engine to
        have sampled all.
        """
        while True:
            batch = self._gather()
            arrays: list[ScoredSample] = []
            samples: list[TrainingSample | Unscored] = []
            for item in batch:
                if isinstance(item, BaseException):
                    raise item
                if isinstance(item, Unscored):
                    samples.append(item)
                    continue
                samples.append(replace(item[0], slot=len(arrays)))
                arrays.append(item[1])
            self._slots.deliver(sample.key for sample in samples if not isinstance(sample, Unscored))
            yield arrays
            yield samples

    def _gather(self) -> list[Scored | Unscored | BaseException]:
        """Wait for scored samples, and a moment for more of them where nobody waits for these."""
        scored = self.pipeline.scored
        batch: list[Scored | Unscored | BaseException] = []
        item: list[Scored] | Unscored | BaseException = scored.get()
        end = time.monotonic() + GATHER_S
        with suppress(queue.Empty):
            while True:
                batch += item if isinstance(item, list) else [item]
                urgent = isinstance(item, BaseException | Unscored) or not self._slots.may_wait(len(batch))
                item = scored.get(timeout=0.0 if urgent else max(0.0, end - time.monotonic()))
        return batch

    def _add(self, requests: Sequence[SampleRequest]) -> None:
        if not self._intact:  # Ray keeps no order between the driver's calls and the actor's
            self._held += requests
            return
        if self._asleep:
            raise RunFailed(f"rollout rank {self.rank} was asked to sample while its memory was others'")
        self._announce(self._slots.take([request.key for request in requests]))
        for request in requests:
            if request.own_answer and request.prompt.answer_ids is not None:
                self._announce(self._slots.generate([request.key]))
                answer = own_answer(request, request.prompt.answer_ids, self._eos_ids, self.engine.version)
                self.pipeline.submit(answer)
                continue
            try:
                self.engine.add(request.key, request)
            except ValueError as error:
                raise RunFailed(f"rollout rank {self.rank} cannot sample prompt {request.prompt.id}: {error}") from None
            self._unfinished += 1

    def _add_held(self) -> None:
        held, self._held = self._held, []
        if held:
            self._add(held)

    def _announce(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.pipeline.scored.put(Unscored(key))

    def _step(self) -> None:
        finished = self.engine.step()
        self._announce(self._slots.generate([key for key, _ in finished]))
        for _, sample in finished:
            if isinstance(sample, Refused):
                raise RunFailed(f"rollout rank {self.rank} cannot sample: {sample.message}")
            self._unfinished -= 1
            self.pipeline.submit(sample)

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
        if not self._intact:
            return
        if self.config.schedule.in_flight:
            self.engine.pause()
        else:
            self._become_idle()
        self._intact = False

    @noted("load weights")
    def _receive(self, piece: Piece) -> int:
        if piece.number == 0:
            self._pause()
        if self._receiver is None:
            self.engine.receive_weights(piece)
        else:
            self.engine.load_weights(piece, self._receiver.receive(piece))
        if piece.last:
            self._intact, self.engine.version = True, piece.version
            self._add_held()
        return self.engine.version


def rollout_follower(config: Config, spec: EngineSpec, span: Span) -> Any:
    """Return the part on a further node of the engine that a RolloutWorker with these arguments leads."""
    return config.rollout.engine_class.follow(replace(spec, span=span))


def _receiver(weights: Weights) -> Receiver | None:
    """Return what receives weights in this process; None where the engine's own processes do, on their GPUs."""
    import torch

    transfer = weights.transfer_class
    return None if transfer.gpu_to_gpu else transfer.receiver(weights, torch.device("cpu"))
