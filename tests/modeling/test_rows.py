"""Rows of whole sequences, worked out from where tokens and keys are."""

from __future__ import annotations

import torch

from gkd.modeling.rows import Bounds, Rows, rows_of, take


def bounds_of(tokens: list[int], keys: list[int], index: list[int] | None = None) -> Bounds:
    starts, ends = (torch.tensor(its, dtype=torch.int32) for its in (tokens, keys))
    return Bounds(starts, ends, int(ends.diff().max()), None if index is None else torch.tensor(index))


def test_gradients_of_a_beginning_are_added_up_in_float32() -> None:
    """300 sequences begin with one token: in bfloat16 a sum of ones would stay at 256.

    One number a token, as a CPU adds up rows of several in float32 anyway.
    """
    n, index = 300, torch.tensor([i for own in range(1, 301) for i in (0, own)])
    x = torch.zeros(n + 1, dtype=torch.bfloat16, requires_grad=True)
    take(x, index).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [300.0, *[1.0] * n]


def test_sequences_as_long_as_each_other_are_rows_as_they_are() -> None:
    """Nothing is copied of them, unless they have a beginning in common."""
    assert Rows(bounds_of([0, 3, 6], [0, 3, 6]), 6).index is None
    assert Rows(bounds_of([0, 3, 6], [0, 3, 6])._replace(longest=4), 6).index is not None
    assert Rows(bounds_of([0, 3, 5], [0, 3, 5]), 5).index is not None
    assert Rows(bounds_of([0, 3, 4], [0, 3, 6], [0, 1, 2, 0, 1, 3]), 4).index is not None


def test_places_are_those_of_each_token_in_its_row() -> None:
    """Of sequences of 3, none, and 2 tokens, and of a second one that has two of the first one's."""
    rows = Rows(bounds_of([0, 3, 3, 5], [0, 3, 3, 5]), 5)
    assert rows.keys is rows.places and rows.places is not None and rows.places.tolist() == [0, 1, 2, 6, 7]
    rows = Rows(bounds_of([0, 3, 4], [0, 3, 6], [0, 1, 2, 0, 1, 3]), 4)
    assert rows.keys is not None and rows.keys.tolist() == [0, 1, 2, 3, 4, 5]
    assert rows.places is not None and rows.places.tolist() == [0, 1, 2, 5]
    assert rows.index is not None and rows.index.tolist() == [0, 1, 2, 0, 1, 3]


def test_rows_are_worked_out_without_reading_a_number_of_the_devices() -> None:
    """A GPU would be waited for; the device without numbers has none to read."""
    for its in (bounds_of([0, 3, 5], [0, 3, 5]), bounds_of([0, 3, 5], [0, 3, 6], [0, 1, 2, 0, 3, 4])):
        tokens, keys, longest, index = its
        bounds = Bounds(tokens.to("meta"), keys.to("meta"), longest, None if index is None else index.to("meta"))
        rows = Rows(bounds, 5)
        assert rows.remove(rows.add(torch.empty(2, 5, 4, device="meta"))).shape == (5, 2, 4)


def test_rows_are_worked_out_once_for_all_layers_of_a_pass() -> None:
    bounds = bounds_of([0, 3, 5], [0, 3, 5])
    assert rows_of(Bounds(*bounds), 5) is rows_of(Bounds(*bounds), 5)
    other = bounds_of([0, 2, 5], [0, 2, 5])
    assert rows_of(other, 5) is not rows_of(bounds, 5) and rows_of(other, 5).places is not None
