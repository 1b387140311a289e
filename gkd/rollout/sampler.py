"""What becomes of requests in an engine, on the engine's own thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gkd.cluster.workers.activity import HERE
from gkd.errors import RunFailed
from gkd.inference.engine import NO_PROBABILITY, EngineSpec, InferenceEngine
from gkd.inference.requests import RequestRejected
from gkd.rollout.dataset_answers import make_dataset_sample
from gkd.rollout.output_queue import OutputQueue
from gkd.types import Sample, SampleRequest


class Sampler:
    """Gives requests to ``engine`` and each sample that it finishes to ``score``. One thread calls all methods.

    While :attr:`held`, the engine does not hold one whole version of the weights: requests wait, and it does no step.
    """

    def __init__(
        self,
        engine: InferenceEngine[SampleRequest, Sample],
        spec: EngineSpec,
        output_queue: OutputQueue,
        score: Callable[[Sample], None],
    ) -> None:
        self.engine, self._rank, self._eos_ids = engine, spec.rank, spec.model.eos_ids
        self._output_queue, self.score = output_queue, score
        self._in_engine = 0  # requests
        self._waiting: list[SampleRequest] = []  # that came while held
        self._asleep = False
        self.held = False

    @property
    def n_unfinished(self) -> int:
        """Requests without a sample, those included that wait for weights."""
        return self._in_engine + len(self._waiting)

    def has_unfinished_requests(self) -> bool:
        """Return whether there is a step to do."""
        return self.engine.has_unfinished_requests() and not self.held

    def add(self, requests: Sequence[SampleRequest]) -> None:
        """Take on requests. Raises RunFailed for one that cannot be sampled."""
        if self.held:  # Ray keeps no order between the driver's calls and the actor's
            self._waiting += requests
            return
        if self._asleep:
            raise RunFailed(f"rollout rank {self._rank} was to sample while its memory was others'")
        needed, version = max((request.version for request in requests), default=0), self.engine.version
        if needed > version:
            raise RunFailed(f"rollout rank {self._rank} was to sample from weights {needed}, and has {version}")
        HERE.switch("sample", version)  # vLLM takes milliseconds for the requests of a batch
        self._output_queue.accept(requests)
        for request in requests:
            if request.from_dataset and request.prompt.answer_ids is not None:
                self._output_queue.put_generated([request.key])
                self.score(make_dataset_sample(request, request.prompt.answer_ids, self._eos_ids, self.engine.version))
                continue
            try:
                self.engine.add(request.key, request)
            except ValueError as error:
                raise RunFailed(
                    f"rollout rank {self._rank} cannot sample prompt {request.prompt.id}: {error}"
                ) from None
            self._in_engine += 1

    def step(self) -> None:
        """Have the engine work for a moment, unless it is held or its memory is others'.

        Raises RunFailed for a request that it cannot take on after all.
        """
        if self.held or self._asleep:
            return
        finished = self.engine.step()
        self._output_queue.put_generated([key for key, _ in finished])
        for _, sample in finished:
            if isinstance(sample, RequestRejected):
                raise RunFailed(f"rollout rank {self._rank} cannot sample: {sample.message}")
            if np.isnan(sample.sampled_logprobs).any():  # which would stand for tokens that nobody sampled
                raise RunFailed(f"rollout rank {self._rank}: {NO_PROBABILITY}")
            self._in_engine -= 1
            self.score(sample)

    def hold(self, in_flight: bool) -> None:
        """Sample no more until :meth:`release`; ``in_flight``: with requests unfinished, which go on then."""
        if self.held:
            return
        if in_flight:
            self.engine.pause()
        else:
            self._finish_all()
        self.held = True

    def release(self, version: int) -> None:
        """Sample again, from weights of ``version``, which the engine holds whole."""
        self.held, self.engine.version = False, version
        waiting, self._waiting = self._waiting, []
        if waiting:
            self.add(waiting)

    def sleep(self) -> None:
        """Free the engine's memory once nothing is left to sample."""
        self._finish_all()
        self._asleep = True
        self.engine.sleep()

    def wake(self, weights_only: bool) -> None:
        """Allocate it again; ``weights_only``: as far as new weights need."""
        self.engine.wake(weights_only)
        self._asleep = weights_only

    def _finish_all(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()
