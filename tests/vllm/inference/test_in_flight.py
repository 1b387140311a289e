"""Weights that change while responses are being sampled: every token is of the weights that its span names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gkd.cluster.workers.environment import environment
from gkd.types import Sample, Sampling, VersionSpan
from tests.vllm.inference.test_engines import N_TOKENS, make, requests, small_spec
from tests.weights.received import load_in_buckets

BEFORE, LENGTH, QUEUED = 7, 20, 100
AS_ON_GPUS = "TRITON_INTERPRET" in os.environ  # tests/e2e/gpu/test_interpreted.py


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    os.environ.update(environment("cpu", []))
    from gkd.inference.vllm_sampler import VLLMSampler

    path: Path = tmp_path_factory.mktemp("model")
    make(tied=False, seed=0).save_pretrained(path)
    engine = VLLMSampler(small_spec(str(path)))
    yield engine
    engine.close()


def sampled_across(engine: Any, tensors: Mapping[str, Tensor], version: int) -> list[Sample]:
    """Responses of which the first tokens are sampled before other weights are pushed, and queued ones."""
    sample_requests = requests(Sampling(LENGTH))
    for key, request in enumerate(sample_requests):
        engine.add(key, request)
    ended = {key for _ in range(BEFORE) for key, _ in engine.step()}
    queued = requests(Sampling(LENGTH), 2)
    for key, request in enumerate(queued, QUEUED):
        engine.add(key, request)
    core = engine.llm_engine.engine_core.engine_core
    assert core.batch_queue is not None or not AS_ON_GPUS
    assert core.batch_queue is None or len(core.batch_queue) == 1  # a pass is under way
    engine.pause()
    assert not core.batch_queue
    engine.pause()  # as the first bucket does after a call by itself
    assert not engine.step()
    load_in_buckets(engine, tensors.items(), version)
    waiting = core.scheduler.waiting
    not_begun = [request for request in waiting if request.status.name == "WAITING"]
    assert len(not_begun) >= len(queued)
    assert {request.cache_salt for request in not_begun} == {str(version) if engine._salted else None}
    by_key: dict[int, Sample] = {}
    while engine.has_unfinished_requests():
        by_key |= dict(engine.step())
    assert len(by_key) == len(sample_requests) + len(queued) - len(ended) > 4
    return [by_key[key] for key in sorted(by_key)]


def differences(model: Any, sample: Sample, span: VersionSpan) -> np.ndarray[Any, Any]:
    """Of what the engine said of a span's tokens from what a model computes over the whole sequence."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    logits[:, N_TOKENS:] = -torch.inf
    own = logits.log_softmax(-1)[span.start - 1 : span.stop - 1].gather(-1, ids[span.start : span.stop, None])[:, 0]
    return np.abs(own.numpy() - sample.logprobs[span.start : span.stop])


def test_tokens_after_new_weights_are_sampled_from_these_alone(engine: Any) -> None:
    """What older weights had cached is computed again; without that, log-probabilities are far from the new model's."""
    versions = [0, 1, 2]
    for seed, keeps in ((1, False), (2, True)):
        engine._salted = keeps
        old, before, after = versions[seed - 1], make(tied=False, seed=seed - 1), make(tied=False, seed=seed)
        *begun, one, other = sampled_across(engine, after.state_dict(), version=seed)
        for sample in (one, other):  # none of whose tokens was sampled before
            (only,) = sample.versions
            assert only.version == seed and differences(after, sample, only).max() < 1e-4
        for sample in begun:
            first, second = sample.versions
            n_prompt = len(sample.request.prompt.token_ids)
            assert (first.start, first.version, second.version) == (n_prompt, old, seed)
            assert second.stop == len(sample.token_ids)
            assert first.stop == second.start == n_prompt + BEFORE
            assert differences(before, sample, first).max() < 1e-4
            assert (differences(after, sample, second).max() < 1e-4) != keeps


def test_a_cache_that_vllm_does_not_reset_is_no_success(engine: Any) -> None:
    """As while requests run that were not paused: their old prefixes would be read under the new weights."""
    engine._salted = False
    engine.add(0, requests(Sampling(LENGTH))[0])
    engine.step()
    with pytest.raises(RuntimeError, match=r"prefix cache"):
        load_in_buckets(engine, make(tied=False, seed=3).state_dict().items(), 3)
    while engine.has_unfinished_requests():
        engine.step()


def test_on_a_cpu_nothing_is_measured_for_the_cache(engine: Any) -> None:
    """On a GPU vLLM's worker has the attribute that is looked for."""
    assert engine.cache_bytes() is None
