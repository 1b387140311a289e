"""The data's own answers as samples, where training is supervised and no engine takes part."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from gkd.errors import RunFailed
from gkd.rollout.columns import ScoredSamples
from gkd.types import FinishReason, Int32, Prompt, Sample, SampleRequest, Sampling, ScoredSample, TrainingSample


def make_dataset_sample(request: SampleRequest, answer_ids: Int32, eos_ids: Sequence[int], version: int) -> Sample:
    """Return the data's answer [N] to a prompt as its sample; it was cut where it has no end token.

    Its log-probabilities are NaN: nobody sampled it. ``version``: of the weights that it counts as sampled from.
    """
    unknown = np.full(len(answer_ids), np.nan, dtype=np.float32)
    reason: FinishReason = "stop" if int(answer_ids[-1]) in eos_ids else "length"
    return Sample.single_turn(request, answer_ids, unknown, version, reason)


class DatasetAnswers:
    """Takes requests as :class:`gkd.rollout.group.RolloutGroup` does, and has the data answer all of them at once.

    The samples' arrays go into Ray's object store, where the actor finds them as it finds those of engines.
    """

    def __init__(self, eos_ids: Sequence[int]) -> None:
        self.eos_ids = eos_ids
        self._next_key = 0
        self._samples: dict[int, Sample] = {}  # by key, until they are collected

    def submit(self, requests: Sequence[SampleRequest], order: int = 0) -> list[int]:
        """Answer requests for step ``order``; returns the keys of their samples, for :meth:`collect_in_order`."""
        keys = list(range(self._next_key, self._next_key + len(requests)))
        self._next_key += len(requests)
        for key, request in zip(keys, requests, strict=True):
            if request.prompt.answer_ids is None:
                raise RunFailed(f"prompt {request.prompt.id} has no answer to learn from")
            keyed = replace(request, key=key)
            self._samples[key] = make_dataset_sample(keyed, request.prompt.answer_ids, self.eos_ids, max(0, order - 1))
        return keys

    def collect_in_order(self, keys: Sequence[int], timeout_s: float) -> Iterator[list[TrainingSample]]:
        """Yield the samples of ``keys``; nothing is waited for, whatever ``timeout_s``."""
        yield _store([self._samples.pop(key) for key in keys])

    def make_samples(self, prompts: Sequence[Prompt]) -> list[TrainingSample]:
        """Return the answers to prompts that have one as samples, for validation."""
        requests = [SampleRequest(p, 0, 0, Sampling(1), from_dataset=True) for p in prompts if p.answer_ids is not None]
        return [sample for samples in self.collect_in_order(self.submit(requests), 0.0) for sample in samples]


def _store(samples: Sequence[Sample]) -> list[TrainingSample]:
    ref: Any = ray.put(ScoredSamples(ScoredSample(sample) for sample in samples))
    now = time.time()
    described = [TrainingSample.from_sample(sample, 0, now) for sample in samples]
    return [replace(sample, ref=ref, slot=slot) for slot, sample in enumerate(described)]
