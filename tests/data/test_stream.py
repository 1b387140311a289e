"""The order prompts are trained on."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gkd.data.stream import PromptStream
from gkd.errors import ConfigError
from gkd.types import Prompt


def prompts(n: int) -> list[Prompt]:
    return [Prompt(id=i, token_ids=np.array([i], dtype=np.int32), text=str(i)) for i in range(n)]


def ids(stream: PromptStream, size: int, n_batches: int) -> list[list[int]]:
    return [[stream.prompt_at(index).id for index in stream.draw(size)] for _ in range(n_batches)]


SIZES = st.integers(min_value=1, max_value=20)
SEEDS = st.integers(min_value=0, max_value=2**32)


@given(n=SIZES, batch_size=SIZES, seed=SEEDS, n_batches=SIZES)
def test_every_epoch_holds_every_prompt_once(n: int, batch_size: int, seed: int, n_batches: int) -> None:
    stream = PromptStream(prompts(n), seed)
    batches = ids(stream, batch_size, n_batches)
    assert all(len(batch) == batch_size for batch in batches)
    drawn = [i for batch in batches for i in batch]
    for start in range(0, len(drawn) - n + 1, n):
        assert sorted(drawn[start : start + n]) == list(range(n))
    assert stream.epoch == n_batches * batch_size / n


@given(n=SIZES, batch_size=SIZES, seed=SEEDS, before=SIZES, after=SIZES)
def test_a_restored_stream_goes_on_exactly(n: int, batch_size: int, seed: int, before: int, after: int) -> None:
    stream = PromptStream(prompts(n), seed)
    ids(stream, batch_size, before)
    state = json.loads(json.dumps(stream.state()))
    again = PromptStream(prompts(n), seed)
    again.restore(state)
    assert ids(again, batch_size, after) == ids(stream, batch_size, after)
    assert again.epoch == stream.epoch


def test_seed_and_epoch_change_the_order() -> None:
    first, second = ids(PromptStream(prompts(50), 0), 50, 2)
    assert first != second
    assert [first, second] == ids(PromptStream(prompts(50), 0), 50, 2)
    assert first != ids(PromptStream(prompts(50), 1), 50, 1)[0]


def test_a_state_of_other_prompts_or_another_seed_is_refused() -> None:
    state = PromptStream(prompts(5), 0).state()
    with pytest.raises(ConfigError, match="n_prompts=5, this run n_prompts=6"):
        PromptStream(prompts(6), 0).restore(state)
    with pytest.raises(ConfigError, match="seed=0, this run seed=1"):
        PromptStream(prompts(5), 1).restore(state)


def in_files(*sizes: int) -> list[Prompt]:
    files = [file for file, size in enumerate(sizes) for _ in range(size)]
    return [Prompt(i, np.array([i], dtype=np.int32), str(i), file=file) for i, file in enumerate(files)]


WEIGHTS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(weights=WEIGHTS, batch_size=SIZES, n_batches=SIZES, seed=SEEDS, data=st.data())
def test_files_have_the_shares_of_their_weights(
    weights: list[int], batch_size: int, n_batches: int, seed: int, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(SIZES, min_size=len(weights), max_size=len(weights)))
    stream = PromptStream(in_files(*sizes), seed, [float(w) for w in weights])
    drawn = [stream.prompt_at(index) for _ in range(n_batches) for index in stream.draw(batch_size)]
    for number, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        own = [prompt.id for prompt in drawn if prompt.file == number]
        assert abs(len(own) - Fraction(weight, sum(weights)) * len(drawn)) <= len(weights)
        for start in range(0, len(own) - size + 1, size):  # every epoch of a file holds each of its prompts
            assert len(set(own[start : start + size])) == size


@given(weights=WEIGHTS, before=SIZES, after=SIZES, seed=SEEDS)
def test_a_restored_stream_of_several_files_goes_on_exactly(
    weights: list[int], before: int, after: int, seed: int
) -> None:
    all_prompts, shares = in_files(*[3] * len(weights)), [float(w) for w in weights]
    stream, again = PromptStream(all_prompts, seed, shares), PromptStream(all_prompts, seed, shares)
    ids(stream, before, 3)
    again.restore(json.loads(json.dumps(stream.state())))
    assert ids(again, after, 2) == ids(stream, after, 2)


def test_files_of_one_size_are_each_in_an_order_of_their_own() -> None:
    stream = PromptStream(in_files(50, 50), 0, [1.0, 1.0])
    drawn = [stream.prompt_at(index) for index in stream.draw(100)]
    first, second = ([prompt.id % 50 for prompt in drawn if prompt.file == number] for number in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50)) and first != second


def test_a_state_of_other_weights_is_refused() -> None:
    state = PromptStream(in_files(2, 2), 0, [1.0, 3.0]).state()
    with pytest.raises(ConfigError, match=r"weights=\[1.0, 3.0\], this run weights=None"):
        PromptStream(in_files(2, 2), 0).restore(state)
    with pytest.raises(ConfigError, match=r"data\.train_files\[1\]"):
        PromptStream(in_files(2), 0, [1.0, 1.0])
