"""Weights through the object store: complete, in buckets, verified."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray
import torch

from gkd.config import Weights
from gkd.errors import RunFailed
from gkd.weights.delivery import Delivery, Destination, Push
from gkd.weights.object_store import ObjectStoreReceiver, StoredBucket
from gkd.weights.packing import split_into_buckets
from gkd.weights.publishing import Publisher
from gkd.weights.transfer import Bucket
from tests.ray.cluster.conftest import eventually

TENSORS = {
    "a.weight": torch.randn(7, 5),
    "b.weight": torch.randn(64, 64).bfloat16(),
    "c.bias": torch.arange(3, dtype=torch.int64),
    "d.weight": torch.randn(4, 4).t(),  # not contiguous
}


@pytest.fixture(scope="module", autouse=True)
def _ray(local_ray):
    """These tests put and get real objects."""


CPU = torch.device("cpu")


def sent(bucket_mb: int, checksum: bool) -> list[Bucket]:
    settings = Weights(transfer="object_store", bucket_mb=bucket_mb, checksum=checksum)
    publisher, buckets = Publisher(settings, CPU, lambda: iter(TENSORS.items())), []
    while not buckets or not buckets[-1].last:
        buckets.append(publisher.pack(3, len(buckets), packs=True))
    return buckets


def receive(bucket: Bucket, **settings: Any) -> dict[str, torch.Tensor]:
    return ObjectStoreReceiver(Weights(**settings), CPU).receive(bucket)


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize(("bucket_bytes", "n"), [(1, 4), (300, 3), (1 << 20, 1)])
def test_every_tensor_arrives_as_it_was(
    bucket_bytes: int, n: int, checksum: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gkd.weights.publishing.split_into_buckets", lambda tensors, _: split_into_buckets(tensors, bucket_bytes)
    )
    buckets = sent(1, checksum)
    received = {name: t for bucket in buckets for name, t in receive(bucket).items()}
    assert received.keys() == TENSORS.keys()
    assert all(torch.equal(received[n], t) and received[n].dtype == t.dtype for n, t in TENSORS.items())
    assert [bucket.number for bucket in buckets] == list(range(n))
    assert [bucket.last for bucket in buckets] == [False] * (n - 1) + [True]


def test_a_rank_that_does_not_pack_gathers_all_the_same() -> None:
    bucket = Publisher(Weights(), CPU, lambda: iter(TENSORS.items())).pack(3, 0, packs=False)
    assert bucket == Bucket(3, 0, True)


def test_a_changed_byte_is_found_when_checksums_are_on() -> None:
    (bucket,) = sent(1, checksum=True)
    stored: StoredBucket = bucket.contents[0]
    data = ray.get(stored.ref).copy()
    data[-1] ^= 1
    damaged = replace(stored, ref=ray.put(data))
    with pytest.raises(RunFailed, match=r"weights version 3, bucket 1 differs"):
        receive(replace(bucket, contents=(damaged,)))
    assert receive(replace(bucket, contents=(replace(damaged, sha256=None),)))  # not asked for: not checked


def test_a_bucket_that_does_not_come_is_a_failure_with_a_deadline() -> None:
    @ray.remote
    def never() -> np.ndarray:
        import time

        time.sleep(30)
        return np.zeros(1, dtype=np.uint8)

    ref = never.remote()
    with pytest.raises(RunFailed, match=r"version 2, bucket 1 .*\b0\.2 s"):
        receive(Bucket(2, 0, True, (StoredBucket(ref, None),)), timeout_s=0.2)
    ray.cancel(ref, force=True)


@ray.remote(num_cpus=0, max_concurrency=4)
class Loader:
    """An engine's worker that takes its time for the first bucket."""

    def __init__(self) -> None:
        self.go, self.begun, self.loaded = threading.Event(), [], []

    def load_bucket(self, push: Push, bucket: Bucket, n_senders: int) -> None:
        self.begun.append(bucket.number)
        assert self.go.wait(60)
        self.loaded.append(bucket.number)

    def progress(self) -> tuple[list[int], list[int]]:
        return self.begun, self.loaded

    def release(self) -> None:
        self.go.set()


def test_an_engine_begins_to_load_while_later_buckets_are_gathered() -> None:
    loader, n = Loader.remote(), 5

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(n):
            if number == 2:  # the first bucket went out when the tensor that did not fit into it was there
                assert eventually(lambda: ray.get(loader.progress.remote(), timeout=30) == ([0], []))
                ray.get(loader.release.remote(), timeout=30)
            yield f"{number}.weight", torch.zeros(1 << 18)  # a bucket each

    publisher = Publisher(Weights(transfer="object_store", bucket_mb=1), CPU, gather)
    publisher.send(Delivery(Push(1, 1, 60.0), [Destination(0, loader, 1)]))
    begun, loaded = ray.get(loader.progress.remote(), timeout=30)  # of the two in flight either may come first
    assert sorted(begun) == sorted(loaded) == list(range(n))
    ray.kill(loader)
