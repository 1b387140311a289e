"""A slot is free as soon as its sample is generated: a slow scorer keeps no engine from sampling."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gkd.config import load
from gkd.data.model_info import ModelInfo
from gkd.errors import RunFailed
from gkd.inference.engine import EngineSpec, InferenceEngine
from gkd.rollout.dispatch import RequestDispatcher
from gkd.rollout.output_queue import OutputQueue
from gkd.rollout.sampler import Sampler
from gkd.rollout.slots import Slots
from gkd.rollout.worker import RolloutWorker
from gkd.types import GenerationNotice, Sample, SampleRequest
from tests.data.models import word_tokenizer
from tests.rollout.test_dispatch import make_requests

CAPACITY, N = 3, 10


def test_what_is_generated_is_announced_once_and_only_by_an_engine_that_is_full_or_idle() -> None:
    slots = Slots(capacity=3)
    assert slots.take({1: 0, 2: 0}) == slots.generate([1]) == ()  # the driver knows of a free slot
    assert slots.take({3: 0}) == (1,)  # now it does not
    assert slots.generate([2]) == ()
    assert slots.take({4: 0}) == (2,)
    slots.deliver([1, 2, 3])
    assert slots.take({5: 0, 6: 0}) == ()
    assert slots.generate([4, 5]) == (4, 5)
    assert slots.generate([6]) == (6,)  # all that the engine had
    assert slots.generate([]) == ()


def test_scored_samples_wait_for_those_that_are_announced_and_not_scored() -> None:
    slots = Slots(capacity=3)
    slots.take({1: 0, 2: 0})
    assert slots.generate([1, 2]) == (1, 2)
    assert slots.may_wait({1}) and not slots.may_wait({1, 2})
    slots.deliver([1])
    assert not slots.may_wait({2})


def test_what_is_sampled_ahead_keeps_no_step_waiting() -> None:
    slots = Slots(capacity=8)
    slots.take({1: 5, 2: 5, 3: 6})
    assert slots.may_wait({1}) and not slots.may_wait({1, 2})
    assert slots.may_wait({3})  # for what the driver waits for first
    slots.deliver([1, 2])
    assert not slots.may_wait({3})


class OneAStep(InferenceEngine[SampleRequest, Sample]):
    """Finishes the oldest request in every step, and keeps how many it had at a time."""

    can_sample = True

    def __init__(self, spec: EngineSpec) -> None:
        self.requests: dict[int, SampleRequest] = {}
        self.most = 0

    def add(self, key: int, request: SampleRequest) -> None:
        self.requests[key] = request
        self.most = max(self.most, len(self.requests))

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[tuple[int, Sample]]:
        key = next(iter(self.requests))
        request = self.requests.pop(key)
        return [(key, Sample.single_turn(request, np.ones(2, np.int32), np.zeros(2, np.float32), 0, "stop"))]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[RolloutWorker]:
    word_tokenizer().save_pretrained(tmp_path)
    config = load({"rollout": {"engine": "tests.rollout.test_slots:OneAStep", "max_num_seqs": CAPACITY}})
    made = RolloutWorker(config, EngineSpec.for_rollout(config, str(tmp_path), ModelInfo(1, 1, [], 1), 1, 0, "cpu"))

    class Over(Exception):
        """The test is."""

    def end() -> None:
        raise Over

    def serve() -> None:
        with contextlib.suppress(Over):
            made.serve()

    serving = threading.Thread(target=serve)
    serving.start()
    yield made
    made.loop.submit(end)
    serving.join(60)
    assert not serving.is_alive()


def test_an_engine_goes_on_while_nothing_that_it_sampled_is_scored(
    worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    score: Any = worker.sampler.score
    held: list[Sample] = []
    monkeypatch.setattr(worker.sampler, "score", held.append)
    dispatcher, stream = RequestDispatcher([0], CAPACITY, 1), worker.stream_samples()
    dispatcher.add(make_requests(N, 1))
    while dispatcher.n_waiting:
        for requests in dispatcher.hand_out().values():
            worker.submit(requests)
        if dispatcher.n_waiting:
            assert next(stream) == []
            for item in next(stream):
                assert isinstance(item, GenerationNotice)
                dispatcher.mark_generated(0, item.key)
    assert len(dispatcher) == N
    while worker.progress()[1]:
        time.sleep(0.01)
    assert worker.engine.most <= CAPACITY
    for sample in held:  # it is scored at last
        score(sample)
    while len(dispatcher):
        next(stream)
        for item in next(stream):
            if not isinstance(item, GenerationNotice):
                assert dispatcher.finish(0, item.key)
    assert [sample.request.key for sample in held] == list(range(N))


def test_tokens_without_a_probability_end_the_run() -> None:
    """Otherwise they would be learned as answers of the data are, which nobody sampled either."""
    config = load({})
    spec = EngineSpec.for_rollout(config, "", ModelInfo(1, 1, [], 1), 1, 0, "cpu")
    (request,) = make_requests(1, 1)
    sample = Sample.single_turn(request, np.ones(2, np.int32), np.array([-1, np.nan], np.float32), 0, "stop")
    output_queue = OutputQueue(1)
    output_queue.accept([request])
    engine: Any = SimpleNamespace(step=lambda: [(request.key, sample)])
    scored: list[Sample] = []
    sampler = Sampler(engine, spec, output_queue, scored.append)
    with pytest.raises(RunFailed, match=r"rollout rank 0: .* not finite"):
        sampler.step()
    assert not scored
