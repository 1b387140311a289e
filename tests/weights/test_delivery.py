"""Buckets of a push at an engine: whole, in their order, whoever sends them when."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from gkd.config import Weights
from gkd.errors import RunFailed
from gkd.weights.delivery import Arrivals, Delivery, Destination, Push
from gkd.weights.publishing import Publisher
from gkd.weights.transfer import Bucket, Sender


def bucket(number: int, n: int, rank: int = 0) -> Bucket:
    return Bucket(7, number, number == n - 1, (f"{number} of rank {rank}",))


def test_buckets_of_several_ranks_are_loaded_whole_and_in_their_order() -> None:
    """Eight buckets in parts of three ranks, which come in any order."""
    n, ranks, loaded, arrivals = 8, 3, [], Arrivals(Push(1, 7, 20.0))
    parts = [bucket(number, n, rank) for number in range(n) for rank in range(ranks)]
    random.Random(0).shuffle(parts)
    with ThreadPoolExecutor(len(parts) + 1) as pool:
        done = pool.submit(arrivals.wait)
        for call in [pool.submit(arrivals.load, part, ranks, loaded.append) for part in parts]:
            call.result(20)
        done.result(20)
    assert [one.number for one in loaded] == list(range(n))
    for one in loaded:
        assert set(one.contents) == {f"{one.number} of rank {rank}" for rank in range(ranks)}
    assert arrivals.progress()[:2] == (n, n)


def test_a_part_waits_for_the_others_and_is_told_when_all_is_loaded() -> None:
    arrivals, begun, go = Arrivals(Push(1, 7, 20.0)), threading.Event(), threading.Event()

    def load(whole: Bucket) -> None:
        begun.set()
        assert go.wait(20)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(arrivals.load, bucket(0, 1, 0), 2, load)
        assert arrivals.progress()[:2] == (0, 0)
        second = pool.submit(arrivals.load, bucket(0, 1, 1), 2, load)
        assert begun.wait(20)
        assert arrivals.progress()[:2] == (1, 0)  # which is how an engine that hangs is found
        assert not first.done() and not second.done()
        go.set()
        first.result(20)
        second.result(20)
    arrivals.wait()


def test_the_time_of_a_push_begins_again_with_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model takes longer than any bucket of it may."""
    limit_s, n, now = 0.6, 4, [100.0]

    def load(_: Bucket) -> None:
        now[0] += 0.6 * limit_s
        with arrivals._changed:
            arrivals._changed.notify_all()  # whoever waits looks at the time

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr("gkd.weights.delivery.time", SimpleNamespace(monotonic=lambda: now[0]))
        arrivals = Arrivals(Push(1, 7, limit_s))
        waiting = pool.submit(arrivals.wait)
        for number in range(n):
            arrivals.load(bucket(number, n), 1, load)
            assert arrivals.progress()[2] == 0
        waiting.result(20)
    assert now[0] - 100.0 > 2 * limit_s
    arrivals = Arrivals(Push(2, 8, 0.1))
    arrivals.load(bucket(0, 2), 1, lambda _: None)
    with pytest.raises(RunFailed, match=r"in vain .*version 8"):
        arrivals.wait()


def test_what_loading_raises_ends_the_push_for_everyone() -> None:
    arrivals = Arrivals(Push(1, 7, 20.0))

    def fail(whole: Bucket) -> None:
        raise RunFailed("damaged")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(arrivals.wait)
        with pytest.raises(RunFailed, match="damaged"):
            arrivals.load(bucket(0, 2), 1, fail)
        with pytest.raises(RunFailed, match="damaged"):
            waiting.result(20)
    with pytest.raises(RunFailed, match="damaged"):
        arrivals.load(bucket(1, 2), 1, lambda whole: None)


def test_a_bucket_that_does_not_come_has_a_deadline() -> None:
    arrivals = Arrivals(Push(1, 7, 0.05))
    with pytest.raises(RunFailed, match=r"version 7, bucket 2 .*loaded"):
        arrivals.load(bucket(1, 3), 1, lambda whole: None)
    with pytest.raises(RunFailed, match=r"version 7$"):
        arrivals.wait()
    begun = Arrivals(Push(1, 7, 0.05))
    begun.load(bucket(0, 3), 1, lambda whole: None)
    with pytest.raises(RunFailed, match=r"version 7$"):  # with the first alone nothing is complete
        begun.wait()


def worker(engine: int) -> Any:
    """A handle whose calls are the bucket's number and the engine."""
    return SimpleNamespace(load_bucket=SimpleNamespace(remote=lambda push, bucket, _: (bucket.number, engine)))


def test_a_bucket_is_loaded_while_the_next_one_is_packed_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many are on their way as there is memory for. Ray is played by a list of the calls that were waited for."""
    n, loaded = 5, list[tuple[int, int]]()

    def wait_for(call: tuple[int, int], timeout: float) -> int:
        loaded.append(call)
        return 7

    monkeypatch.setattr(ray, "get", wait_for)
    delivery = Delivery(Push(1, 7, 20.0), [Destination(engine, worker(engine), 1) for engine in (0, 3)])
    for number in range(n):
        delivery.make_room()
        assert number - len(loaded) // 2 == min(number, 1)  # while this one is gathered and packed
        delivery.send(bucket(number, n))
    assert not delivery.served  # nobody serves a part
    delivery.make_room(0)
    assert loaded == [(number, engine) for number in range(n) for engine in (0, 3)]
    assert delivery.served == {0: 7, 3: 7} and not delivery.lost


class NotingSender(Sender):
    """Notes which bucket is packed, and how many before it are kept meanwhile."""

    def __init__(self, *_: Any) -> None:
        self.noted: list[tuple[str, int]] = []

    def pack(self, tensors: dict[str, torch.Tensor], bucket: Bucket) -> None:
        self.noted.append(("pack", bucket.number))

    def release(self, keep: int = 0) -> None:
        self.noted.append(("keep", keep))


def test_the_next_bucket_is_gathered_and_packed_before_the_one_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = [(f"{i}", torch.zeros(1 << 18)) for i in range(4)]  # a MiB each, and so a bucket
    publisher = Publisher(Weights(transfer="object_store", bucket_mb=1), torch.device("cpu"), lambda: iter(tensors))
    sender = publisher.sender = NotingSender()
    monkeypatch.setattr(ray, "get", lambda call, timeout: sender.noted.append(("load", call[0])) or 7)
    delivery = Delivery(Push(1, 7, 20.0), [Destination(0, worker(0), 1)])
    publisher.send(delivery)
    assert [number for what, number in sender.noted if what == "pack"] == [0, 1, 2, 3]
    steps = [step for step in sender.noted if step[0] != "keep"]
    for number in range(3):
        assert steps.index(("pack", number + 1)) < steps.index(("load", number))
        if number < 2:
            assert steps.index(("load", number)) < steps.index(("pack", number + 2))
    # What is kept is the bucket that may not be loaded yet.
    assert [number for what, number in sender.noted if what == "keep"] == [0, 1, 1, 1, 0]
    assert delivery.served == {0: 7}


def test_an_engine_that_dies_with_two_buckets_on_their_way_is_lost_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_for(call: tuple[int, int], timeout: float) -> int:
        if call[1] == 3:
            raise RunFailed(f"bucket {call[0]}")
        return 7

    monkeypatch.setattr(ray, "get", wait_for)
    delivery = Delivery(Push(1, 7, 20.0), [Destination(engine, worker(engine), 1) for engine in (0, 3)])
    for number in range(2):
        delivery.send(bucket(number, 3))
    delivery.make_room(0)
    assert [to.engine for to in delivery.destinations] == [0]
    assert {engine: str(error) for engine, error in delivery.lost.items()} == {3: "bucket 0"}
    delivery.send(bucket(2, 3))
    delivery.make_room(0)
    assert delivery.served == {0: 7}
