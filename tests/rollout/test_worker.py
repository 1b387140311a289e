"""A rollout worker on the thread of the test, with the engine that needs no vLLM."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gkd.rollout.output_queue
from gkd.cluster.workers.activity import HERE
from gkd.config import load
from gkd.data.answers import with_turn_end
from gkd.data.model_info import ModelInfo
from gkd.data.tokenizer import load_tokenizer
from gkd.errors import RunFailed
from gkd.inference.engine import EngineSpec
from gkd.rollout.dataset_answers import make_dataset_sample
from gkd.rollout.receiving import WeightLoader
from gkd.rollout.slots import Slots
from gkd.rollout.worker import RolloutWorker
from gkd.types import GenerationNotice, Prompt, SampleRequest, Sampling, ScoredSample, TrainingSample
from gkd.weights.delivery import Push
from gkd.weights.object_store import ObjectStore
from gkd.weights.transfer import Bucket, Receiver
from tests.data.models import WORDS, save_model


class Parts:
    """What receives the buckets of a push, one after the other."""

    def __init__(self, buckets: list[dict[str, Any]]) -> None:
        self.buckets = buckets

    def receive(self, bucket: Bucket) -> dict[str, Any]:
        return self.buckets[bucket.number]


A, B, TURN_END = (WORDS.index(word) for word in ("a", "b", "d"))


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> RolloutWorker:
    path = str(save_model(tmp_path_factory.mktemp("worker") / "model"))
    model = with_turn_end(ModelInfo.read(path, "model.path", load_tokenizer(path)), TURN_END)
    config = load({"rollout": {"engine": "hf"}})
    return RolloutWorker(config, EngineSpec.for_rollout(config, path, model, 64, 0, "cpu"))


class NoReceiver(Receiver):
    """The receiving end of a transfer that cannot be made here."""

    def __init__(self, *_: Any) -> None:
        raise RunFailed("no receiver")

    def receive(self, bucket: Bucket) -> Any:
        raise AssertionError("it cannot be made")


class Unreceivable(ObjectStore):
    """A transfer of one's own."""

    receiver = NoReceiver


def test_a_receiver_that_cannot_be_made_ends_the_start_and_not_the_first_push(worker: RolloutWorker) -> None:
    config = load({"rollout": {"engine": "hf"}, "weights": {"transfer": "tests.rollout.test_worker:Unreceivable"}})
    with pytest.raises(RunFailed, match="no receiver"):
        WeightLoader(config, 0, worker.loop, worker.sampler)


def test_a_bucket_has_longer_than_the_driver_waits_which_ends_an_engine_that_hangs(worker: RolloutWorker) -> None:
    """Else both are over in one moment, and ranks go on with the other engines while the driver looks at these."""
    limits: list[float] = []
    loop: Any = SimpleNamespace(call=lambda run, activity, timeout_s: limits.append(timeout_s))
    loader = WeightLoader(load({"rollout": {"engine": "hf"}}), 0, loop, worker.sampler)
    loader.load_bucket(Push(1, 7, 99.0), Bucket(7, 0, True), 1)
    assert limits == [99.0]


def test_a_bucket_of_a_push_that_is_over_is_refused(worker: RolloutWorker) -> None:
    """As of a rank that stood still while the driver gave its push up."""
    loop: Any = SimpleNamespace(call=lambda run, activity, timeout_s: None)
    loader = WeightLoader(load({"rollout": {"engine": "hf"}}), 0, loop, worker.sampler)
    loader.load_bucket(Push(2, 8, 99.0), Bucket(8, 0, False), 1)
    with pytest.raises(RunFailed, match=r"rank 0\b.* over$"):
        loader.load_bucket(Push(1, 7, 99.0), Bucket(7, 1, True), 1)
    assert loader.count_arrived()[:2] == (1, 1)


def done(worker: RolloutWorker, requests: list[SampleRequest]) -> list[ScoredSample]:
    worker.sampler.add([replace(request, key=key) for key, request in enumerate(requests)])
    by_key: dict[int, ScoredSample] = {}
    while len(by_key) < len(requests):
        try:
            item = worker.output_queue._items.get_nowait()
        except queue.Empty:
            worker.sampler.step()
            continue
        if isinstance(item, GenerationNotice):
            continue
        assert isinstance(item, list)
        for training, scored in item:
            by_key[training.key] = scored
            assert training.finish_reason == scored.sample.finish_reason
    return [by_key[key] for key in sorted(by_key)]


def test_sampling_stops_where_the_chat_template_ends_a_turn(worker: RolloutWorker) -> None:
    prompt = Prompt(0, np.array([A, B], np.int32), "a b")
    sampled = [s.sample for s in done(worker, [SampleRequest(prompt, i, i, Sampling(32)) for i in range(16)])]
    assert TURN_END in {int(s.token_ids[-1]) for s in sampled if s.finish_reason == "stop"}
    assert all(TURN_END not in s.sampled_ids[:-1] for s in sampled)


def test_what_was_begun_ends_under_its_weights_unless_others_come_in_flight(worker: RolloutWorker) -> None:
    prompt = Prompt(0, np.array([A, B], np.int32), "a b")
    worker.sampler.add([SampleRequest(prompt, i, i, Sampling(32), key=i) for i in range(4)])
    assert worker.engine.has_unfinished_requests()
    worker.sampler.hold(in_flight=False)
    assert not worker.engine.has_unfinished_requests() and worker.sampler.n_unfinished == 0
    worker.sampler.release(worker.engine.version)
    assert len(worker.output_queue.gather()[0]) == 4


def test_an_own_answer_without_its_end_was_cut(worker: RolloutWorker) -> None:
    prompt = Prompt(0, np.array([A], np.int32), "a")
    whole, cut = (replace(prompt, answer_ids=np.array(ids, np.int32)) for ids in ([B, TURN_END], [B, B]))
    requests = [SampleRequest(one, 0, 0, Sampling(2), from_dataset=True) for one in (whole, cut)]
    assert [s.sample.finish_reason for s in done(worker, requests)] == ["stop", "length"]


@pytest.mark.parametrize(
    ("capacity", "messages"), [(8, [[0, 1, 2]]), (3, [[0], [1, 2]])], ids=["slots are free", "others wait for slots"]
)
def test_the_driver_is_given_several_samples_at_a_time_unless_others_wait_for_their_slots(
    capacity: int, messages: list[list[int]], worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gkd.rollout.output_queue, "GATHER_S", 60.0)
    monkeypatch.setattr(worker.output_queue, "_slots", Slots(capacity))
    worker.output_queue._slots.take(dict.fromkeys(range(3), 0))
    prompt = Prompt(0, np.array([A], np.int32), "a", answer_ids=np.array([B, TURN_END], np.int32))
    requests = [SampleRequest(prompt, 0, 0, Sampling(2), from_dataset=True, key=key) for key in range(3)]
    finished = worker.stream_samples()

    def score(*keys: int) -> None:
        for key in keys:
            worker.pipeline.submit(make_dataset_sample(requests[key], prompt.answer_ids, [TURN_END], 0))

    score(0)
    later = threading.Thread(target=lambda: (time.sleep(0.1), score(1, 2)))
    batches = []
    for number in range(len(messages)):
        if number == len(messages) - 1:
            later.start()
        arrays, samples = next(finished), next(finished)
        assert len(arrays) == len(samples)
        batches.append([sample.key for sample in samples])
    later.join()
    assert batches == messages


@pytest.mark.parametrize("error", [RunFailed("the engine ended"), queue.Empty()], ids=["ended", "empty"])
def test_what_ends_the_engine_does_not_wait_for_further_samples(
    error: Exception, worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is: an engine of one's own may have a queue of its own."""
    monkeypatch.setattr(gkd.rollout.output_queue, "GATHER_S", 60.0)
    monkeypatch.setattr(worker.output_queue, "_slots", Slots(8))
    worker.output_queue._slots.take(dict.fromkeys(range(3), 0))
    worker.output_queue.put(error)
    with pytest.raises(type(error)) as raised:
        next(worker.stream_samples())
    assert raised.value is error


def test_requests_that_come_between_the_buckets_of_new_weights_are_sampled_from_the_whole(
    worker: RolloutWorker,
) -> None:
    prompt = Prompt(0, np.array([A], np.int32), "a")
    requests = [SampleRequest(prompt, i, i, Sampling(3), key=i) for i in range(2)]
    tensors = {name: tensor.clone() for name, tensor in worker.engine.model.state_dict().items()}
    worker.weights._receiver = Parts([{}, tensors])
    before = worker.engine.version
    worker.weights.load(Bucket(before + 1, 0, last=False))
    worker.sampler.add(requests[:1])
    worker.sampler.add(requests[1:])
    assert not worker.engine.has_unfinished_requests()
    assert worker.progress()[1] == 2  # so that the driver sees that it has work
    worker.weights.load(Bucket(before + 1, 1, last=True))
    while worker.engine.has_unfinished_requests():
        worker.sampler.step()
    trained: list[TrainingSample] = []
    while len(trained) < len(requests):
        item = worker.output_queue._items.get(timeout=60)
        trained += [training for training, _ in item] if isinstance(item, list) else []
    assert [[span.version for span in training.versions] for training in trained] == [[before + 1]] * 2


def test_an_engine_that_is_held_or_asleep_does_no_step(worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights may be half loaded, or its memory others'."""
    steps = list[int]()
    monkeypatch.setattr(worker.engine, "step", lambda: steps.append(1) or [])
    worker.sampler.step()
    assert len(steps) == 1
    for state in ("held", "_asleep"):
        with monkeypatch.context() as patch:
            patch.setattr(worker.sampler, state, True)
            worker.sampler.step()
    assert len(steps) == 1


def test_taking_requests_on_counts_as_sampling(worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch it takes vLLM milliseconds, for which the engine would seem to wait for the driver."""
    activities = list[str | None]()
    monkeypatch.setattr(worker.engine, "add", lambda *_: activities.append(HERE.switch(None)[0]))
    monkeypatch.setattr(worker.output_queue, "accept", lambda _: None)
    monkeypatch.setattr(worker.sampler, "_in_engine", 0)
    HERE.switch(None)
    worker.sampler.add([SampleRequest(Prompt(0, np.array([A, B], np.int32), "a b"), 0, 0, Sampling(2))])
    assert activities == ["sample"]
