"""One sampling engine's process: takes requests as they come, has every finished sample scored at once, hands it on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from gkd.cluster.session.reaper import watch_family
from gkd.cluster.workers.activity import memory_here, report_here
from gkd.config import Config
from gkd.config.device import NodeSpan
from gkd.inference.engine import EngineSpec, InferenceEngine
from gkd.rollout.loop import EngineLoop
from gkd.rollout.output_queue import OutputQueue
from gkd.rollout.pipeline import ScoringPipeline
from gkd.rollout.receiving import WeightLoader
from gkd.rollout.sampler import Sampler
from gkd.types import GenerationNotice, Sample, SampleRequest, ScoredSample, TrainingSample


class RolloutWorker:
    """Puts together what a rollout worker consists of: requests go to ``sampler``, which runs on the thread of
    ``loop``, its samples to ``pipeline``, scored to ``output_queue``, and new weights come to ``weights``.

    The driver calls methods of ``pipeline`` and ``weights`` by their names there, such as ``weights.pause``. The thread
    that built the worker calls :meth:`serve`; everything else may be called from other threads.
    """

    def __init__(self, config: Config, spec: EngineSpec, span: NodeSpan | None = None) -> None:
        self.rank = spec.rank
        if spec.device == "cuda":
            watch_family()  # of the processes that an engine starts there, on one GPU too
        self.engine: InferenceEngine[SampleRequest, Sample] = config.rollout.engine_class(replace(spec, span=span))
        self._cache_bytes: int | None = self.engine.cache_bytes()
        self._memory: list[dict[str, float]] = []
        self._measure()
        self.output_queue = OutputQueue(config.rollout.slots)
        self.pipeline = ScoringPipeline(config, spec.model_path, spec.rank, self.output_queue.put)
        self.loop = EngineLoop(self.engine, spec.rank, config.weights.timeout_s)
        self.sampler = Sampler(self.engine, spec, self.output_queue, self.pipeline.submit)
        self.weights = WeightLoader(config, spec.rank, self.loop, self.sampler)

    def cache_bytes(self) -> int | None:
        """Return the size that the engine measured for its cache when it started, see :class:`InferenceEngine`."""
        return self._cache_bytes

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Hand over requests; their samples come out of :meth:`stream_samples`.

        Those that come while new weights are loaded are sampled from these, once they are whole.
        """
        self.loop.submit(lambda: self.sampler.add(requests))

    def sleep(self) -> None:
        """Give the engine's memory back once it is idle. Raises WorkerHung past the deadline."""
        self.loop.call(self.sampler.sleep, "go to sleep")

    def wake(self, weights_only: bool) -> None:
        """Take it again; ``weights_only``: as far as new weights need. Raises WorkerHung past the deadline."""
        self.loop.call(lambda: self.sampler.wake(weights_only), "wake up")

    def progress(self) -> tuple[int, int]:
        """Return forward passes so far, and responses that are not finished, those not begun included."""
        return self.engine.forward_passes, self.sampler.n_unfinished + len(self.loop)

    def report(self) -> dict[str, Any]:
        """Return memory and activity of this worker, see :func:`gkd.cluster.workers.activity.report_here`.

        Of the engine's further processes it is the memory at the report before: only the loop's thread may call them.
        """
        self.loop.submit(self._measure)
        return report_here(self._memory)

    def _measure(self) -> None:
        self._memory = self.engine.call_processes(memory_here)

    def serve(self) -> None:
        """Run the engine for as long as this process lives. What it raises also comes out of :meth:`stream_samples`."""
        try:
            self.loop.serve(self.sampler.step, self.sampler.has_unfinished_requests)
        except BaseException as error:
            self.output_queue.put(error)
            raise
        finally:
            self.pipeline.close()

    def stream_samples(self) -> Iterator[list[ScoredSample] | list[TrainingSample | GenerationNotice]]:
        """Yield scored samples as they come; as :meth:`gkd.rollout.output_queue.OutputQueue.batches`."""
        return self.output_queue.batches()


def rollout_follower(config: Config, spec: EngineSpec, span: NodeSpan) -> Any:
    """Return the part on a further node of the engine that a RolloutWorker with these arguments leads."""
    return config.rollout.engine_class.follow(replace(spec, span=span))
