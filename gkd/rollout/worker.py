"""One sampling engine: takes requests as they come, has every finished sample scored at once, hands it on."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from gkd.cluster.failure import WorkerHangs
from gkd.config import Config
from gkd.errors import RunFailed, one_line
from gkd.inference.engine import EngineSpec, GpuReceiver, SamplingEngine
from gkd.inference.vllm_engine import Follower, Span, engine_arguments, start_llm
from gkd.observability.metrics import memory_here
from gkd.rollout.pipeline import ScoringPipeline
from gkd.types import FinishReason, Int32, Sample, SampleRequest, ScoredSample, TrainingSample
from gkd.weights import object_store
from gkd.weights.pieces import Piece

IDLE_POLL_S = 0.5
Result = TypeVar("Result")


class RolloutWorker:
    """Runs an engine on the thread that calls :meth:`serve`; everything else may be called from other threads."""

    def __init__(self, config: Config, spec: EngineSpec, span: Span | None = None) -> None:
        self.config, self.rank, self.device = config, spec.rank, spec.device
        self.engine, self._eos_ids = _engine(config, spec, span), spec.model.eos_ids
        self.pipeline = ScoringPipeline(config, spec.model_path, spec.rank)
        self._commands: queue.Queue[Callable[[], None]] = queue.Queue()
        self._unfinished = 0  # requests in the engine
        self._ended: BaseException | None = None
        self._asleep = False
        self._intact = True  # whether the engine holds one whole version of the weights

    def connect(self, scorers: Mapping[str, dict[str, Any]]) -> None:
        """Shake hands with the models that score; as :meth:`gkd.rollout.pipeline.ScoringPipeline.connect`."""
        self.pipeline.connect(scorers)

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Hand over requests; their samples come out of :meth:`finished`."""
        self._commands.put(lambda: self._add(requests))

    def receive(self, push: object_store.Push) -> int:
        """Load a version of the weights once the engine is idle; returns it. Raises WorkerHangs past the deadline."""
        return self._between_steps(lambda: self._load(push), f"load weights version {push.version}")

    def halt(self, version: int) -> None:
        """Finish what is being sampled; nothing more until :meth:`serve_version`, while weights come in pieces."""
        self._between_steps(self._halt, f"become idle for weights version {version}")

    def join_actor(self, unique_id: str, engines: Sequence[int], workers: int) -> None:
        """Meet the actor and the other ``engines`` (ranks), of ``workers`` processes each, in a new NCCL group."""
        offset, world = 1 + workers * engines.index(self.rank), 1 + workers * len(engines)
        self._between_steps(lambda: self._receiver.join(unique_id, offset, world), "meet the actor over NCCL")

    def take(self, piece: Piece) -> None:
        """Load the next piece of the weights that the engine was halted for. Raises WorkerHangs past the deadline."""
        self._between_steps(lambda: self._receiver.take(piece), f"load {piece}")

    def serve_version(self, version: int) -> int:
        """All pieces are loaded: sample from them. Returns the version."""
        return self._between_steps(lambda: self._finish_pieces(version), f"serve weights version {version}")

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

    def sleep(self) -> None:
        """Give the engine's memory back once it is idle. Raises WorkerHangs past the deadline."""
        self._between_steps(self._sleep, "go to sleep")

    def wake(self, weights_only: bool) -> None:
        """Take it again; ``weights_only``: as far as new weights need. Raises WorkerHangs past the deadline."""
        self._between_steps(lambda: self._wake(weights_only), "wake up")

    def progress(self) -> tuple[int, int]:
        """Forward passes so far, and responses that are not finished, those not begun included."""
        return self.engine.forward_passes, self._unfinished + self._commands.qsize()

    def memory(self) -> dict[str, float]:
        """Memory of this engine's process."""
        return memory_here()

    def serve(self) -> None:
        """Run the engine for as long as this process lives. What it raises also comes out of :meth:`finished`."""
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
            self.pipeline.scored.put(error)
            raise
        finally:
            self.pipeline.close()

    def finished(self) -> Iterator[list[ScoredSample] | list[TrainingSample]]:
        """Yield scored samples as they come, all that are there at a time: a list of their arrays, then their numbers.

        Being streamed, they belong to the driver, not to this process: they outlive it.
        """
        scored = self.pipeline.scored
        while True:
            batch = [scored.get()]
            while not scored.empty():
                batch.append(scored.get_nowait())
            arrays: list[ScoredSample] = []
            samples: list[TrainingSample] = []
            for item in batch:
                if isinstance(item, BaseException):
                    raise item
                samples.append(replace(item[0], slot=len(arrays)))
                arrays.append(item[1])
            yield arrays
            yield samples

    def _add(self, requests: Sequence[SampleRequest]) -> None:
        if not self._intact:
            raise RunFailed(f"rollout rank {self.rank} was asked to sample from weights that are only half there")
        if self._asleep:
            raise RunFailed(f"rollout rank {self.rank} was asked to sample while its memory was others'")
        for request in requests:
            if request.own_answer and request.prompt.answer_ids is not None:
                self.pipeline.submit(self._own_answer(request, request.prompt.answer_ids))
                continue
            try:
                self.engine.add(request)
            except ValueError as error:
                raise RunFailed(f"rollout rank {self.rank} cannot sample prompt {request.prompt.id}: {error}") from None
            self._unfinished += 1

    def _own_answer(self, request: SampleRequest, answer_ids: Int32) -> Sample:
        """The data's answer as a sample; it was cut where it has no end token."""
        unknown = np.full(len(answer_ids), np.nan, dtype=np.float32)
        reason: FinishReason = "stop" if int(answer_ids[-1]) in self._eos_ids else "length"
        return Sample.single_turn(request, answer_ids, unknown, self.engine.version, reason)

    def _step(self) -> None:
        for sample in self.engine.step():
            self._unfinished -= 1
            self.pipeline.submit(sample)

    def _halt(self) -> None:
        self._become_idle()
        self._intact = False

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

    def _load(self, push: object_store.Push) -> int:
        self._halt()
        self.engine.load_weights(object_store.receive(push, self.config.weights.timeout_s), push.version)
        return self._serve(push.version)

    def _finish_pieces(self, version: int) -> int:
        self._receiver.finish(version)
        return self._serve(version)

    def _serve(self, version: int) -> int:
        self._intact = True
        return version

    @property
    def _receiver(self) -> GpuReceiver:
        assert isinstance(self.engine, GpuReceiver), "the configuration allows other engines the object store alone"
        return self.engine


def rollout_follower(config: Config, spec: EngineSpec, span: Span) -> Follower:
    """The part on a further node of the engine that a RolloutWorker with these arguments leads."""
    return Follower(_arguments(config, spec, span))


def _engine(config: Config, spec: EngineSpec, span: Span | None) -> SamplingEngine:
    """Start the engine that the configuration names."""
    if config.rollout.engine == "hf":
        import torch

        from gkd.inference.hf import HFEngine

        dtype = getattr(torch, config.model.dtype_on(spec.device))
        return HFEngine(spec.model_path, spec.model, spec.device, dtype, config.rollout.max_num_seqs)
    from gkd.inference.vllm import VLLMEngine

    return VLLMEngine(start_llm(_arguments(config, spec, span), spec.device), spec.model, spec.device)


def _arguments(config: Config, spec: EngineSpec, span: Span | None) -> dict[str, Any]:
    """Arguments of vLLM's engine, and its weight backend made known to this process."""
    from gkd.weights import vllm_plugin

    arguments = engine_arguments(
        spec.model_path,
        spec.device,
        config.rollout,
        dtype=config.model.dtype_on(spec.device),
        max_model_len=spec.max_length,
        logprobs_mode="processed_logprobs",
        prefix_caching=not spec.model.stateful,  # states are cached at chunks' ends alone, and prompts are not chunked
        seeded=True,
        seed=config.trainer.seed + spec.rank,
        sleeps=config.cluster.offload is True and "rollout" in config.on_the_actors_gpus(),
        span=span,
    )
    return {**arguments, "weight_transfer_config": {"backend": vllm_plugin.register(config.weights.transfer)}}
