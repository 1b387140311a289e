"""New weights at one engine: buckets that come from the actor's ranks, loaded between the engine's steps."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch

from gkd.cluster.workers.activity import record_activity
from gkd.config import Config
from gkd.errors import RunFailed
from gkd.rollout.loop import EngineLoop
from gkd.rollout.sampler import Sampler
from gkd.weights.delivery import Arrivals, Push
from gkd.weights.transfer import Bucket, Receiver


class WeightLoader:
    """Loads pushes into the engine of ``sampler``, which samples nothing from the first bucket of one to the last.

    Threads of ranks and of the driver call it; ``loop`` runs what touches the engine.
    """

    def __init__(self, config: Config, rank: int, loop: EngineLoop, sampler: Sampler) -> None:
        self._rank, self._loop, self._sampler = rank, loop, sampler
        self._in_flight = config.schedule.in_flight
        transfer = config.weights.transfer_class
        self._receiver: Receiver | None = None
        """What receives in this process; None where the engine's own processes do, on their GPUs."""
        if not transfer.gpu_to_gpu:
            self._receiver = transfer.receiver(config.weights, torch.device("cpu"))
        self._arriving = threading.Lock()
        self._arrivals: Arrivals | None = None

    def ping(self, version: int) -> None:
        """Return once the engine is between two steps; it samples on. Raises WorkerHung past the deadline."""
        self._loop.call(lambda: None, f"end a step before weights version {version}")

    def pause(self, version: int) -> None:
        """Finish what is being sampled, unless weights are loaded in flight; sample no more until all buckets of
        ``version`` are loaded.
        """
        self._loop.call(self._hold, f"become idle for weights version {version}")

    def load_bucket(self, push: Push, bucket: Bucket, n_senders: int) -> int:
        """Load the next bucket of new weights once the engine computes nothing. Called by ranks of the actor.

        Each of ``n_senders`` sends a part of it; returns when the whole is loaded, the version that the engine serves
        then. From the first bucket to the last it does not sample. Raises WorkerHung past the deadline.
        """
        self._arrivals_of(push).load(
            bucket, n_senders, lambda whole: self._loop.call(lambda: self.load(whole), f"load {whole}", push.limit_s)
        )
        return self._sampler.engine.version

    def receive(self, push: Push) -> int:
        """Wait until all buckets of a push are loaded; returns the version that the engine serves then."""
        self._arrivals_of(push).wait()
        return self._sampler.engine.version

    def count_arrived(self) -> tuple[int, int, float]:
        """Return how many buckets of the newest push have come, how many are loaded, and seconds since either changed.

        Seconds are infinite before the first push.
        """
        return (0, 0, math.inf) if self._arrivals is None else self._arrivals.progress()

    def join_group(self, address: str, engines: Sequence[int], workers: int) -> None:
        """Join the actor and the other ``engines`` (ranks), of ``workers`` processes each, in a group for weights."""
        offset, world = 1 + workers * engines.index(self._rank), 1 + workers * len(engines)
        self._loop.call(lambda: self._sampler.engine.join(address, offset, world), "join the actor's group")

    @record_activity("load weights", lambda _, bucket: bucket.version)
    def load(self, bucket: Bucket) -> None:
        """Load a whole bucket, on the engine's thread."""
        if bucket.number == 0:
            self._hold()
        if self._receiver is None:
            self._sampler.engine.receive_weights(bucket)
        else:
            self._sampler.engine.load_weights(bucket, self._receiver.receive(bucket))
        if bucket.last:
            self._sampler.release(bucket.version)

    def _hold(self) -> None:
        self._sampler.hold(self._in_flight)

    def _arrivals_of(self, push: Push) -> Arrivals:
        """Return what has come of a push; the first call begins it. Raises RunFailed for one that is over."""
        with self._arriving:
            if self._arrivals is None or self._arrivals.push.number < push.number:
                self._arrivals = Arrivals(push)
            if self._arrivals.push.number > push.number:
                raise RunFailed(f"rollout rank {self._rank}: a bucket came of a push that is over")
            return self._arrivals
