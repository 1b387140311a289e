"""vLLM loads packed buckets: the real engine on a CPU, where the bytes are handed over instead of fetched by CUDA."""

from __future__ import annotations

import base64
import itertools
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gkd.cluster.workers.environment import environment
from gkd.config import Weights
from gkd.errors import RunFailed
from gkd.types import Sampling
from gkd.weights import nccl
from gkd.weights.packing import split_into_buckets
from gkd.weights.publishing import Publisher
from gkd.weights.transfer import Bucket
from tests.vllm.inference.test_engines import make, requests, run, small_spec, worst_difference

COPY = "tests.ray.weights.wire:CopyIpc"


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gkd.weights.publishing.split_into_buckets", lambda tensors, _: split_into_buckets(tensors, 20_000)
    )


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine with the backend of a way; its embeddings are tied to its head."""
    os.environ.update(environment("cpu", []))
    from gkd.inference.vllm_sampler import VLLMSampler

    path: Path = tmp_path_factory.mktemp("model")
    make(True, seed=0).save_pretrained(path)
    sampler = VLLMSampler(small_spec(str(path), transfer=request.param))
    yield sampler
    sampler.close()


def buckets(model: nn.Module, version: int, transfer: str) -> Iterator[Bucket]:
    settings = Weights(transfer=transfer, bucket_mb=1, checksum=True)
    state = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}  # tied
    publisher = Publisher(settings, torch.device("cpu"), lambda: iter(state.items()))
    for number in itertools.count():
        bucket = publisher.pack(version, number, packs=True)
        yield bucket
        if bucket.last:
            return


@pytest.mark.parametrize("engine", [COPY], indirect=True)
def test_the_engine_becomes_the_pushed_model_bucket_by_bucket(engine: Any) -> None:
    sample_requests = requests(Sampling(12))
    run(engine, sample_requests)  # fills the prefix cache with the old weights
    for version, seed in ((1, 7), (2, 8)):
        pushed, count = make(True, seed), 0
        for bucket in buckets(pushed, version, COPY):
            engine.receive_weights(bucket)
            count += 1
        assert count > 3
        assert engine.llm.get_weight_version() == str(version)
        samples = run(engine, sample_requests)
        assert worst_difference(pushed, sample_requests, samples) < 2e-4
        assert worst_difference(make(True, 0), sample_requests, samples) > 0.1


@pytest.mark.parametrize("engine", [COPY], indirect=True)
def test_a_damaged_bucket_is_not_loaded(engine: Any) -> None:
    bucket = next(buckets(make(True, 9), 3, COPY))
    bucket.contents[0].handle[0][5] ^= 1
    with pytest.raises(RunFailed, match=r"weights version 3, bucket 1 differs"):
        engine.receive_weights(bucket)


@pytest.mark.parametrize("engine", ["nccl"], indirect=True)
def test_by_nccl_an_engine_needs_the_group_and_asks_vllm_for_it(engine: Any) -> None:
    """As far as a CPU goes: vLLM takes the id, and fails where it would load NCCL."""
    with pytest.raises(RunFailed, match=r"weights version 3, bucket 1: .*NCCL group"):
        engine.receive_weights(next(buckets(make(True, 9), 3, "nccl")))
    with pytest.raises(ValueError, match=r"128 bytes, got 3"):
        engine.join(base64.b64encode(b"abc").decode(), 1, 2)
    if torch.version.cuda is None:
        with pytest.raises(RuntimeError, match=r"NCCL library|accelerator"):
            engine.join(base64.b64encode(bytes(128)).decode(), 1, 2)


def test_a_communicator_that_would_do_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

    monkeypatch.setattr("vllm.envs.VLLM_DISABLE_PYNCCL", True, raising=False)
    with pytest.raises(RunFailed, match=r"VLLM_DISABLE_PYNCCL"):
        nccl.require_enabled("nccl", uid_init_process_group(bytes(128), 1, 2, 0))


def test_tensors_are_copied_to_the_device_one_by_one() -> None:
    """A model whose weights come through the host holds those of a module there, not a bucket's."""
    from gkd.weights.vllm_backend import BucketTransferEngine, BucketUpdate

    names, copied = ["a", "b", "c"], list[str]()

    def load_weights(weights: Any) -> None:
        for n, (name, _) in enumerate(weights, 1):
            assert (name, copied) == (names[n - 1], names[:n])

    tensors: Any = {name: SimpleNamespace(to=lambda _, name=name: copied.append(name)) for name in names}
    model = SimpleNamespace(load_weights=load_weights)
    receiving: Any = SimpleNamespace(model=model, device="there", load_meanwhile=nullcontext)
    BucketTransferEngine.receive_weights(receiving, BucketUpdate(tensors=tensors))
    assert copied == names
