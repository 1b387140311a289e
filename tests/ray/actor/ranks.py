"""The actor's ranks as Ray actors, without the pools around them, for one test after another."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import ray
from torch import Tensor

from gkd.actor.batches import balance_over_ranks, measure_lengths
from gkd.actor.worker import ActorWorker
from gkd.algorithms.aggregation import token_weights
from gkd.config import Config, load
from gkd.types import ScoredSample, TrainingSample
from gkd.weights.transfer import Bucket
from tests.actor import models
from tests.weights.received import received


def config(n_gpus: int = 1, **actor: object) -> Config:
    settings = {"lr": 1e-2, "max_tokens_per_micro_batch": 40, "loss_chunk": 7, "grad_clip": 0.5, **actor}
    return load(
        {"actor": settings, "trainer": {"total_steps": 10, "n_gpus_per_node": n_gpus}, "cluster": {"cpu_threads": 1}}
    )


def put(batch: list[ScoredSample]) -> list[TrainingSample]:
    """Lists of two samples each in the object store, as engines hand them on; advantages of either sign."""
    refs = [ray.put(batch[i : i + 2]) for i in range(0, len(batch), 2)]
    return [models.on_driver(refs[i // 2], i % 2, s, (-1.0) ** i) for i, s in enumerate(batch)]


def call(worker: Any, method: str, *args: Any) -> Any:
    """Start a method of a part of a rank; returns a reference to its result."""
    return worker.__ray_call__.remote(lambda it, *arguments: attrgetter(method)(it)(*arguments), *args)


class Ranks:
    """``world`` ranks that have met and have no model yet."""

    def __init__(self, world: int) -> None:
        kind = ray.remote(num_cpus=0)(ActorWorker)
        self.workers = [kind.remote(config(), "", rank, world, "cpu") for rank in range(world)]
        host, port = ray.get(self.workers[0].open_store.remote(), timeout=300)
        ray.get([w.join.remote(host, port) for w in self.workers], timeout=300)

    def become(self, path: str, settings: Config) -> Ranks:
        """Begin with the model in ``path``, whatever was trained before."""

        def begin(worker: ActorWorker) -> None:
            worker.config, worker.model_path = settings, path
            worker.load()

        ray.get([w.__ray_call__.remote(begin) for w in self.workers], timeout=300)
        return self

    def run(self, method: str, samples: list[TrainingSample], *last: object) -> dict[str, float]:
        """Call a method of all ranks with their shares of a batch."""
        lengths = [sample.n_sampled for sample in samples]
        weights = token_weights(lengths, [True] * len(samples), "sequence_mean", 12)
        shares = balance_over_ranks(measure_lengths(samples, shared=True), len(self.workers))
        calls = []
        for worker, part in zip(self.workers, shares, strict=True):
            args = last if method == "compute_logprobs" else ([weights[i] for i in part], sum(lengths), *last)
            calls.append(call(worker, f"trainer.{method}", [samples[i] for i in part], *args))
        metrics = ray.get(calls, timeout=300)
        if method == "compute_logprobs":  # seconds of each
            return {}
        assert all(f == metrics[0] for f in metrics)  # every rank knows the metrics of the whole batch
        return metrics[0]

    def weights(self) -> dict[str, Tensor]:
        def pack(number: int) -> list[Bucket]:
            calls = [
                w.__ray_call__.remote(lambda worker, packs: worker.weights.publisher.pack(1, number, packs), rank == 0)
                for rank, w in enumerate(self.workers)
            ]
            buckets: list[Bucket] = ray.get(calls, timeout=300)
            return buckets

        return received(pack)

    def end(self) -> None:
        for worker in self.workers:
            ray.kill(worker)
