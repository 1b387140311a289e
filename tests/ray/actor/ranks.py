"""The actor's ranks as Ray actors, without the pools around them, for one test after another."""

from __future__ import annotations

import ray
from torch import Tensor

from gkd.actor.balance import share
from gkd.actor.worker import ActorWorker
from gkd.algorithms.aggregation import token_weights
from gkd.config import Config, load
from gkd.types import Lesson, Scored
from gkd.weights import object_store
from tests.actor import models


def config(**actor: object) -> Config:
    settings = {"lr": 1e-2, "max_tokens_per_micro_batch": 40, "loss_chunk": 7, "grad_clip": 0.5, **actor}
    return load({"actor": settings, "trainer": {"total_steps": 10}, "cluster": {"cpu_threads": 1}})


def put(batch: list[Scored]) -> list[Lesson]:
    """Lists of two samples each in the object store, as engines hand them on; advantages of either sign."""
    refs = [ray.put(batch[i : i + 2]) for i in range(0, len(batch), 2)]
    return [models.lesson(refs[i // 2], i % 2, s, (-1.0) ** i) for i, s in enumerate(batch)]


class Ranks:
    """``world`` ranks that have met and have no model yet."""

    def __init__(self, world: int) -> None:
        kind = ray.remote(num_cpus=0)(ActorWorker)
        self.workers = [kind.remote(config(), "", rank, world, "cpu") for rank in range(world)]
        host, port = ray.get(self.workers[0].open_store.remote(), timeout=60)
        ray.get([w.join.remote(host, port) for w in self.workers], timeout=60)

    def become(self, path: str, settings: Config) -> Ranks:
        """Begin with the model in ``path``, whatever was trained before."""

        def begin(worker: ActorWorker) -> None:
            worker.config, worker.model_path = settings, path
            worker.take_at_most(settings.actor.max_tokens_per_micro_batch)
            worker.load()

        ray.get([w.__ray_call__.remote(begin) for w in self.workers], timeout=120)
        return self

    def run(self, method: str, lessons: list[Lesson], *last: object) -> dict[str, float]:
        """Call a method of all ranks with their shares of a batch."""
        lengths = [lesson.record.n_response for lesson in lessons]
        weights = token_weights(lengths, [True] * len(lessons), "sequence_mean", 12)
        shares = share([lesson.record.n_tokens for lesson in lessons], len(self.workers))
        calls = []
        for worker, part in zip(self.workers, shares, strict=True):
            args = last if method == "remember" else ([weights[i] for i in part], sum(lengths), *last)
            calls.append(getattr(worker, method).remote([lessons[i] for i in part], *args))
        found = ray.get(calls, timeout=120)
        assert all(f == found[0] for f in found)  # every rank knows the metrics of the whole batch
        return found[0]

    def weights(self) -> dict[str, Tensor]:
        pushes = ray.get([w.publish.remote(1) for w in self.workers], timeout=60)
        assert all(push is None for push in pushes[1:])
        return {name: t for piece in object_store.receive(pushes[0], 60) for name, t in piece.items()}

    def end(self) -> None:
        for worker in self.workers:
            ray.kill(worker)
