"""The tail that is summed where the whole row is: right where a difference from 1 is not."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from gkd.inference import tail
from gkd.inference.tail import _with_tails, tail_logprobs, tails_of


class Rows(NamedTuple):
    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor
    selected_token_ranks: torch.Tensor


def take_apart(scores: torch.Tensor, k: int, token_ids: torch.Tensor) -> Rows:
    ids = torch.cat([token_ids[:, None], scores.topk(k).indices], 1)
    return Rows(ids.int(), scores.gather(1, ids), torch.zeros(len(scores), dtype=torch.int32))


def peaked(n: int, vocabulary: int, rest: float) -> torch.Tensor:
    """Logits with five likely tokens and all others about ``rest`` below them."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n, vocabulary, dtype=torch.float64, generator=generator) - rest
    logits[:, 7:12] += rest
    return logits


@pytest.mark.parametrize("rest", [0.0, 15.0, 22.0, 30.0])
def test_tails_equal_sums_in_float64(rest: float) -> None:
    logits = peaked(50, 1000, rest)
    top = logits.topk(5).indices
    exact = torch.softmax(logits, -1).scatter(-1, top, 0.0).sum(-1)
    tails = tail_logprobs(torch.log_softmax(logits.float(), -1), top)
    assert tails.dtype == torch.float32
    torch.testing.assert_close(tails.double().exp(), exact, rtol=2e-5, atol=0)
    if rest == 22.0:
        assert (exact > 1e-9).all() and (exact < 1e-6).all()
        subtracted = 1 - torch.log_softmax(logits.float(), -1).gather(-1, top).exp().sum(-1)
        assert ((subtracted - exact).abs() / exact).max() > 0.1, "this is what a difference from 1 gives"


def test_rows_are_summed_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = peaked(50, 1000, 15.0).float()
    top = logits.topk(5).indices
    whole, shapes = tail_logprobs(logits, top), []
    scatter = torch.Tensor.scatter
    monkeypatch.setattr(torch.Tensor, "scatter", lambda x, *rest: shapes.append(x.shape) or scatter(x, *rest))
    monkeypatch.setattr(tail, "AT_ONCE_BYTES", 12 * 4000)
    torch.testing.assert_close(tail_logprobs(logits, top), whole)
    assert [n for n, _ in shapes] == [12, 12, 12, 12, 2]
    assert tail_logprobs(logits[:0], top[:0]).shape == (0,)


def test_tails_travel_in_place_of_ranks() -> None:
    """The token itself, which is the first of its row, is no part of the top K."""
    scores: Any = torch.log_softmax(peaked(4, 100, 20.0).float(), -1)
    rows = _with_tails(take_apart)(scores, 5, torch.tensor([0, 7, 99, 8]))
    torch.testing.assert_close(tails_of(rows), tail_logprobs(scores, scores.topk(5).indices))
