"""Log-probabilities at positions of sequences, from final hidden states through a model's head.

Shapes: n positions, D the hidden size, V the vocabulary, K the most likely tokens that are wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gkd.losses.targets import MOST_PINNED


@dataclass(frozen=True, slots=True)
class RowShape:
    """Outputs wanted at positions: the ``top_k`` of the first ``rows`` tokens of softmax(logits / ``temperature``)."""

    temperature: float
    rows: int
    top_k: int


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """``token_logprobs`` [n], ``ids`` [n, K] (int32) and ``logprobs`` [n, K] in falling order, ``tails`` [n].

    ``tails``: log-probability of all tokens but those K together; None where K is 0 or all.
    """

    token_logprobs: Tensor
    ids: Tensor
    logprobs: Tensor
    tails: Tensor | None

    @staticmethod
    def allocate(n: int, shape: RowShape, pinned: bool) -> ScoredRows:
        """Allocate the host's memory for ``n`` positions, ``pinned`` so that a GPU writes beside other work.

        What is large is not pinned, as torch never gives pinned memory back: then a GPU is waited for.
        """
        k, has_tails = shape.top_k, 0 < shape.top_k < shape.rows
        pinned = pinned and 4 * n * max(1, k) <= MOST_PINNED
        return ScoredRows(
            torch.empty(n, pin_memory=pinned),
            torch.empty((n, k), dtype=torch.int32, pin_memory=pinned),
            torch.empty((n, k), pin_memory=pinned),
            torch.empty(n, pin_memory=pinned) if has_tails else None,
        )

    def put(self, start: int, part: ScoredRows) -> None:
        """Copy ``part`` to the positions from ``start`` on, without waiting for a GPU."""
        stop = start + len(part.token_logprobs)
        for name in self.__slots__:
            buffer, values = getattr(self, name), getattr(part, name)
            if buffer is not None:
                buffer[start:stop].copy_(values, non_blocking=True)


class RowSums(NamedTuple):
    """Of rows of logits x [n, V] / T: ``total`` [n], logsumexp(x / T), and what the tail of the top K is made of.

    With the row's K-th largest x: ``below`` [n], the same of all that are less, and ``ties`` [n], how many are equal;
    None where there is no tail.
    """

    total: Tensor
    below: Tensor | None
    ties: Tensor | None


SumRows = Callable[[Tensor, Tensor | None, float], RowSums]
"""Of :func:`sum_rows`, as it stands or compiled."""


def sum_rows(logits: Tensor, kth: Tensor | None, temperature: float) -> RowSums:
    """Return the sums over rows of ``logits`` [n, V], with the K-th largest of each, ``kth`` [n].

    To be compiled: in one kernel, which reads the logits and writes nothing as large. Computed as it stands it takes
    several float32 copies of them.
    """
    x = logits.float() / temperature
    total = torch.logsumexp(x, -1)
    if kth is None:
        return RowSums(total, None, None)
    # Compared as they came: what is equal is equal however a division is computed.
    less = logits < kth[:, None]
    return RowSums(total, torch.logsumexp(torch.where(less, x, -torch.inf), -1), (logits == kth[:, None]).sum(-1))


@torch.inference_mode()
def score_rows(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    token_ids: Tensor,
    shape: RowShape,
    logit_bytes: int,
    sums: SumRows | None = None,
) -> ScoredRows:
    """Score ``token_ids`` [n] by the hidden states [n, D] that predict them.

    As many positions at a time as have float32 logits of ``logit_bytes``; ``sums`` is :func:`sum_rows`, compiled, where
    that is to be used. The results are on the host, and whole once the device has come so far.
    """
    n_rows = max(1, logit_bytes // (4 * shape.rows))
    scored = ScoredRows.allocate(len(token_ids), shape, hidden.is_cuda)
    for start in range(0, len(token_ids), n_rows):
        some = slice(start, start + n_rows)
        if sums is None:
            scored.put(start, score_logits(head, hidden[some], token_ids[some], shape))
        else:
            scored.put(start, score_by_sums(head, hidden[some], token_ids[some], shape, sums))
    return scored


def score_by_sums(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    token_ids: Tensor,
    shape: RowShape,
    sums: SumRows,
) -> ScoredRows:
    """Do as :func:`score_logits`, by ``sums``; the logits are not overwritten, and not copied."""
    logits, k, temperature = head(hidden)[:, : shape.rows], shape.top_k, shape.temperature
    top, ids = torch.topk(logits, k)
    kth = top[:, -1].contiguous() if 0 < k < shape.rows else None
    total, below, ties = sums(logits, kth, temperature)
    tokens = logits.gather(-1, token_ids[:, None])[:, 0].float() / temperature - total
    logprobs, tails = top.float() / temperature - total[:, None], None
    if kth is not None and below is not None and ties is not None:
        left_out = ties - (top == kth[:, None]).sum(-1)
        tails = torch.logaddexp(below, kth.float() / temperature + torch.log(left_out)) - total
    return ScoredRows(tokens, ids.int(), logprobs, tails)


def score_logits(head: Callable[[Tensor], Tensor], hidden: Tensor, token_ids: Tensor, shape: RowShape) -> ScoredRows:
    """Score ``token_ids`` [n] by ``head(hidden)``, the logits [n, V] that predict them, which are overwritten.

    The results are on the logits' device.
    """
    # Computed here: a caller's argument outlives its last use wherever torch.compile's frame evaluator is installed.
    logits = head(hidden)[:, : shape.rows]
    ids = torch.topk(logits, shape.top_k).indices  # of the numbers as they came, half as many bytes in bfloat16
    # In float32, and the division too: bfloat16 logits would be rounded a second time.
    logits = logits.float()
    if shape.temperature != 1.0:
        logits = logits / shape.temperature
    total = torch.logsumexp(logits, -1, keepdim=True)
    tokens = (logits.gather(-1, token_ids[:, None]) - total)[:, 0]
    if shape.top_k == 0:
        none = tokens.new_empty((len(tokens), 0))
        return ScoredRows(tokens, none.int(), none, None)
    logprobs, tails = logits.gather(-1, ids) - total, None
    if shape.top_k < shape.rows:
        # The sum over the complement itself: 1 minus the sum of the K would be rounding where the tail is small.
        tails = torch.logsumexp(logits.scatter_(-1, ids, -torch.inf), -1) - total[:, 0]
    return ScoredRows(tokens, ids.int(), logprobs, tails)
