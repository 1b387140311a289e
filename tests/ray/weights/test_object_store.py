"""Weights through the object store: complete, in pieces, verified."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import ray
import torch

from gkd.errors import RunFailed
from gkd.weights import object_store

TENSORS = {
    "a.weight": torch.randn(7, 5),
    "b.weight": torch.randn(64, 64).bfloat16(),
    "c.bias": torch.arange(3, dtype=torch.int64),
    "d.weight": torch.randn(4, 4).t(),  # not contiguous
}


@pytest.fixture(scope="module", autouse=True)
def _ray(local_ray):
    """These tests put and get real objects."""


@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
def test_every_tensor_arrives_as_it_was(bucket_bytes: int) -> None:
    push = object_store.send(TENSORS.items(), 3, bucket_bytes, checksum=True)
    found = {name: t for piece in object_store.receive(push, 10.0) for name, t in piece.items()}
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in TENSORS.items())
    assert len(push.pieces) == len(push.digests) == {1: 4, 300: 3, 1 << 20: 1}[bucket_bytes]


def test_a_changed_byte_is_found_when_checksums_are_on() -> None:
    push = object_store.send(TENSORS.items(), 1, 1 << 20, checksum=True)
    data = ray.get(push.pieces[0]).copy()
    data[-1] ^= 1
    damaged = dataclasses.replace(push, pieces=[ray.put(data)])
    with pytest.raises(RunFailed, match=r"weights version 1, piece 1 of 1 differs"):
        list(object_store.receive(damaged, 10.0))
    assert list(object_store.receive(dataclasses.replace(damaged, digests=[]), 10.0))  # not asked for: not checked


def test_a_piece_that_does_not_come_is_a_failure_with_a_deadline() -> None:
    @ray.remote
    def never() -> np.ndarray:
        import time

        time.sleep(30)
        return np.zeros(1, dtype=np.uint8)

    ref = never.remote()
    push = object_store.Push(2, 1, [ref])
    with pytest.raises(RunFailed, match=r"version 2, piece 1 of 1 did not arrive within 0.2 s"):
        list(object_store.receive(push, 0.2))
    ray.cancel(ref, force=True)
