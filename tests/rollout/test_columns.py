"""Scored samples, pickled as columns, are the same afterwards."""

from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gkd.rollout.columns import LARGE_BYTES, ScoredSamples
from gkd.types import Prompt, Sample, SampleRequest, Sampling, ScoredSample, Scoring, Target, VersionSpan


def scored(seed: int, n_prompt: int, n_response: int, top_k: int | None, has_tail: bool, has_reference: bool) -> Any:
    """Return a sample of two versions with random numbers, every optional part of which is there or not."""
    random = np.random.default_rng(seed)

    def numbers(*shape: int) -> Any:
        return random.standard_normal(shape).astype(np.float32)

    ids = random.integers(0, 99, n_prompt + n_response, dtype=np.int32)
    prompt = Prompt(
        seed, ids[:n_prompt], f"question {seed}", "7", messages=({"role": "user", "content": "?"},),
        teacher_ids=ids[:1], answer_ids=ids[:0], other_answers=("8",), columns={"row": [seed]},
    )  # fmt: skip
    request = SampleRequest(prompt, 1, seed, Sampling(5, stop=("\n",)), Scoring(top_k, 0.5), key=seed, order=2.5)
    sampled = np.arange(len(ids)) >= n_prompt
    versions = (VersionSpan(n_prompt, len(ids) - 1, 3), VersionSpan(len(ids) - 1, len(ids), 4))
    sample = Sample(request, ids, sampled, numbers(len(ids)), versions, "length")
    teacher = None
    if top_k is not None:
        top = random.integers(0, 99, (n_response, top_k), dtype=np.int32)
        tail = numbers(n_response) if has_tail else None
        teacher = Target(numbers(n_response), top, numbers(n_response, top_k), 0.5, tail)
    return ScoredSample(sample, teacher, numbers(n_response) if has_reference else None)


def equal(one: Any, other: Any) -> bool:
    """Return whether both are of the same types and values all through."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if is_dataclass(one):
        return all(equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


kinds = st.tuples(
    st.integers(0, 1000),
    st.integers(1, 4),
    st.integers(1, 4),
    st.none() | st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)


@given(st.lists(kinds, max_size=5))
def test_samples_are_the_same_after_pickling(of: list[tuple[Any, ...]]) -> None:
    samples = [scored(*kind) for kind in of]
    again = pickle.loads(pickle.dumps(ScoredSamples(samples), protocol=5))
    assert type(again) is list and len(again) == len(samples)
    assert all(map(equal, again, samples))


def test_small_arrays_are_pickled_together_and_large_ones_without_a_copy() -> None:
    buffers: list[pickle.PickleBuffer] = []
    samples = ScoredSamples(scored(i, 3, 2, 2, True, True) for i in range(50))
    pickle.dumps(samples, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) < 20
    large = ScoredSamples(scored(i, 3, 2, LARGE_BYTES, True, True) for i in range(2))
    data = pickle.dumps(large, protocol=5, buffer_callback=(views := list[pickle.PickleBuffer]()).append)
    for sample, again in zip(large, pickle.loads(data, buffers=views), strict=True):
        assert np.shares_memory(sample.teacher.ids, again.teacher.ids)
        assert equal(sample, again)
