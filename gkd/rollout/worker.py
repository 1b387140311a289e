"""One sampling engine: takes requests as they come, has every finished sample scored at once, hands both on."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from gkd.config import Config
from gkd.data.checkpoint import Checkpoint
from gkd.errors import RunFailed
from gkd.observability.memory import gpu_memory
from gkd.rollout.engine import Finished, SamplingEngine
from gkd.sample import Job, Record, Sample, Scored, Target
from gkd.teacher.client import Score, TeacherClient
from gkd.vllm_engine import Device
from gkd.weights import object_store

IDLE_POLL_S = 0.5


class RolloutWorker:
    """Runs an engine on the thread that calls :meth:`serve`; everything else may be called from other threads."""

    def __init__(
        self, config: Config, model_path: str, model: Checkpoint, max_length: int, rank: int, device: Device
    ) -> None:
        self.config, self.rank, self.device = config, rank, device
        self.engine = _engine(config, model_path, model, max_length, rank, device)
        self.teacher: TeacherClient | None = None
        self.version = 0
        self._commands: queue.Queue[Callable[[], None]] = queue.Queue()
        self._out: queue.Queue[tuple[Record, Scored] | BaseException] = queue.Queue()
        self._jobs: dict[int, Job] = {}
        self._intact = True  # whether the engine holds one whole version of the weights

    def connect(self, teacher: dict[str, Any]) -> None:
        """Shake hands with the teachers; ``teacher`` are the arguments of :class:`gkd.teacher.client.TeacherClient`.

        Raises ConfigError where student and teacher do not fit together, RunFailed when a teacher does not answer.
        """
        self.teacher = TeacherClient(**teacher)
        self.teacher.connect()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Hand over requests; their records come out of :meth:`records`."""
        self._commands.put(lambda: self._add(jobs))

    def receive(self, push: object_store.Push) -> int:
        """Load a version of the weights once the engine is idle; returns it. Raises RunFailed past the deadline."""
        done: Future[int] = Future()
        self._commands.put(lambda: self._load(push, done))
        limit = self.config.weights.timeout_s
        try:
            return done.result(limit)
        except TimeoutError:
            raise RunFailed(
                f"rollout rank {self.rank} did not load weights version {push.version} within {limit:g} s "
                "(weights.timeout_s)"
            ) from None

    def memory(self) -> dict[str, float]:
        """GPU memory of this engine in GB."""
        return gpu_memory()

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
            self._out.put(error)
            raise
        finally:
            if self.teacher is not None:
                self.teacher.close()

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
        for job in jobs:
            self._jobs[job.key] = job
            try:
                self.engine.add(job.key, job.request)
            except ValueError as error:
                raise RunFailed(
                    f"rollout rank {self.rank} cannot sample prompt {job.request.prompt.id}: {error}"
                ) from None

    def _step(self) -> None:
        for finished in self.engine.step():
            self._finish(self._jobs.pop(finished.key), finished)

    def _finish(self, job: Job, finished: Finished) -> None:
        sample = Sample(job.request, finished.response_ids, finished.logprobs, self.version, finished.finish_reason)
        now = time.time()
        if job.top_k is None:
            self._out.put(self._record(job, Scored(sample, None), now))
            return
        assert self.teacher is not None, "connect() comes before requests that are to be scored"
        prompt = job.request.prompt.token_ids
        future = self.teacher.submit(
            Score(prompt_ids=prompt, response_ids=sample.response_ids, top_k=job.top_k, temperature=job.temperature)
        )

        def deliver(done: Future[Target]) -> None:
            error = done.exception()
            self._out.put(error if error is not None else self._record(job, Scored(sample, done.result()), now))

        future.add_done_callback(deliver)

    def _load(self, push: object_store.Push, done: Future[int]) -> None:
        try:
            while self.engine.busy():
                self._step()
            self._intact = False
            self.engine.load_weights(object_store.receive(push, self.config.weights.timeout_s), push.version)
            self._intact = True
            self.version = push.version
            done.set_result(push.version)
        except BaseException as error:
            done.set_exception(error)

    def _record(self, job: Job, scored: Scored, generated: float) -> tuple[Record, Scored]:
        sample = scored.sample
        record = Record(
            key=job.key,
            prompt_id=job.request.prompt.id,
            index=job.request.index,
            n_prompt=len(job.request.prompt.token_ids),
            n_response=len(sample.response_ids),
            finish_reason=sample.finish_reason,
            version=sample.version,
            worker=self.rank,
            generated_s=generated,
            scored_s=time.time(),
            slot=0,
        )
        return record, scored


def _engine(
    config: Config, model_path: str, model: Checkpoint, max_length: int, rank: int, device: Device
) -> SamplingEngine:
    """Start the engine that the configuration names, for sequences of up to ``max_length`` tokens."""
    dtype = config.model.dtype_on(device)
    if config.rollout.engine == "hf":
        import torch

        from gkd.rollout.hf import HFEngine

        return HFEngine(model_path, model, device, getattr(torch, dtype), config.rollout.max_num_seqs)
    from vllm import LLM

    from gkd.rollout.vllm import VLLMEngine
    from gkd.vllm_engine import engine_arguments
    from gkd.weights import vllm_plugin

    arguments = engine_arguments(
        model_path,
        device,
        config.rollout,
        dtype=dtype,
        max_model_len=max_length,
        logprobs_mode="processed_logprobs",
        seeded=True,
        seed=config.trainer.seed + rank,
    )
    llm = LLM(**arguments, weight_transfer_config={"backend": vllm_plugin.register()})
    return VLLMEngine(llm, model)
