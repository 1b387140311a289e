"""Sequences laid end to end: every token is found again, and what sequences begin with is there once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gkd.modeling.layout import MOST_KEYS, PackSize, SequenceLayout
from gkd.modeling.sequences import PackedSequences
from gkd.types import Int32

# Of each sequence: which beginning it has, of how many tokens, how many follow, and whether it may be shared.
described = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 7), st.booleans()), max_size=9)


def sequences_of(rows: list[tuple[int, int, int, bool]]) -> tuple[list[Int32], list[int]]:
    rng = np.random.default_rng(0)
    sequences = [
        np.concatenate([100 * kind + np.arange(n), rng.integers(1000, 2000, own)]).astype(np.int32)
        for kind, n, own, _ in rows
    ]
    return sequences, [n if may else 0 for _, n, _, may in rows]


@given(described)
def test_every_token_is_found_at_its_position(rows: list[tuple[int, int, int, bool]]) -> None:
    sequences, n_shared = sequences_of(rows)
    layout = SequenceLayout(sequences, n_shared)
    for number, ids in enumerate(sequences):
        places = layout.locate(number, np.arange(len(ids)))
        assert layout.token_ids[places].tolist() == ids.tolist()
        assert layout.position_ids[places].tolist() == list(range(len(ids)))


@given(described)
def test_what_may_be_shared_is_there_once_and_nothing_else_is(rows: list[tuple[int, int, int, bool]]) -> None:
    sequences, n_shared = sequences_of(rows)
    layout = SequenceLayout(sequences, n_shared)
    shared = {ids[:n].tobytes(): n for ids, n in zip(sequences, n_shared, strict=True)}
    own = sum(len(ids) - n for ids, n in zip(sequences, n_shared, strict=True))
    assert len(layout.token_ids) == own + sum(shared.values())
    size = PackSize()
    for ids, n in zip(sequences, n_shared, strict=True):
        size.add(len(ids), ids[:n].tobytes(), n)
    assert (size.n_tokens, size.n_keys) == (len(layout.token_ids), sum(map(len, sequences)))


@given(described)
def test_keys_of_a_sequence_are_its_tokens_of_which_its_own_come_last(rows: list[tuple[int, int, int, bool]]) -> None:
    sequences, n_shared = sequences_of(rows)
    layout = SequenceLayout(sequences, n_shared)
    own = [layout.token_ids[start:end].tolist() for start, end in pairwise(layout.cu_seqlens)]
    assert all(ids.tolist()[-len(its) :] == its for ids, its in zip(sequences, own, strict=True))
    assert layout.max_seqlen == max(map(len, sequences), default=1)
    if layout.key_index is None or layout.cu_keys is None:
        assert own == [ids.tolist() for ids in sequences]
    else:
        keys = layout.token_ids[layout.key_index]
        assert [keys[start:end].tolist() for start, end in pairwise(layout.cu_keys)] == [x.tolist() for x in sequences]


@given(described, st.integers(0, 60))
def test_padding_is_more_sequences_no_longer_than_the_others(
    rows: list[tuple[int, int, int, bool]], n_more: int
) -> None:
    packed = PackedSequences.from_layout(SequenceLayout(*sequences_of(rows)))
    n, n_sequences = len(packed), len(packed.cu_seqlens)
    padded = packed.pad(n + n_more)
    assert torch.equal(padded.token_ids[:n], packed.token_ids) and len(padded) == n + n_more
    assert torch.equal(padded.cu_seqlens[:n_sequences], packed.cu_seqlens) and padded.cu_seqlens[-1] == n + n_more
    own = padded.cu_seqlens[n_sequences - 1 :].diff().tolist()
    assert all(0 < length <= packed.max_seqlen for length in own)
    assert padded.position_ids[n:].tolist() == [i for length in own for i in range(length)]
    if packed.key_index is None or packed.cu_keys is None:
        assert padded.key_index is None and padded.cu_keys is None
    else:
        assert padded.key_index is not None and padded.cu_keys is not None
        n_keys = len(packed.key_index)
        assert padded.key_index.tolist() == packed.key_index.tolist() + list(range(n, n + n_more))
        assert padded.cu_keys[n_sequences - 1 :].diff().tolist() == own and padded.cu_keys[-1] == n_keys + n_more
        assert torch.equal(padded.cu_keys[:n_sequences], packed.cu_keys)


def test_a_pack_is_full_by_its_tokens_or_by_its_keys() -> None:
    size = PackSize()
    assert size.has_room(100, 60, "a", 50)
    size.add(60, "a", 50)
    assert size.has_room(100, 90, "a", 50) and not size.has_room(100, 91, "a", 50)
    assert not size.has_room(100, 60, "b", 50)  # another prompt
    for _ in range(2):
        size.add(60, "a", 50)
    assert (size.n_tokens, size.n_keys) == (80, 180) and MOST_KEYS == 2
    assert size.has_room(100, 20, "a", 10) and not size.has_room(100, 21, "a", 10)


@pytest.mark.parametrize("n_shared", [0, 2])
def test_all_tensors_of_a_pack_are_moved(n_shared: int) -> None:
    """To a GPU, as to the device without numbers here."""
    ids = np.arange(5, dtype=np.int32)
    packed = PackedSequences.from_layout(SequenceLayout([ids, ids], [n_shared, n_shared]))
    moved = packed.to(lambda tensor: tensor.to("meta"))
    for name in packed.__slots__:
        own, its = getattr(packed, name), getattr(moved, name)
        assert its.device.type == "meta" and its.shape == own.shape if isinstance(own, torch.Tensor) else its == own
