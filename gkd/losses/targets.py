"""Holds the teacher's log-probabilities at N response positions, and checks them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MASS_TOLERANCE = 1e-3
MOST_PINNED = 256 << 20  # bytes of a tensor

ABSENT_TAIL = math.log(torch.finfo(torch.float32).eps)
"""Tail of a teacher that gave every token it has, where the student has more (padded) rows: one machine epsilon."""


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host's tensor on ``device``, without waiting for what a GPU is at work on.

    From pinned memory, which torch keeps until it is copied; from other memory the copy waits, as it does here for
    full-vocabulary targets, since torch never gives pinned memory back. It goes on the stream that computes: with one
    of its own, the GPU would hold the targets of two micro-batches.
    """
    if device.type == "cuda" and tensor.nbytes <= MOST_PINNED:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True, slots=True)
class PositionTargets:
    """The teacher's log-probabilities at N positions; :class:`gkd.types.Target` of many samples end to end.

    ``token_ids`` [N]: the response tokens. ``teacher_token_logprobs`` [N]: their log-probabilities under the teacher.
    ``ids`` [N, K] and ``logprobs`` [N, K]: the teacher's K most likely tokens, distinct, in any order. K is 0 where
    only the tokens were scored. ``tail_logprobs`` [N]: the teacher's log-probability of all other tokens together; may
    be None where K is 0 or the whole vocabulary. Ids may be of any integer type; a divergence widens those it works on.
    """

    token_ids: Tensor
    teacher_token_logprobs: Tensor
    ids: Tensor
    logprobs: Tensor
    tail_logprobs: Tensor | None = None

    def __post_init__(self) -> None:
        n = self.token_ids.shape
        if len(n) != 1 or self.teacher_token_logprobs.shape != n:
            raise ValueError(
                f"token_ids {tuple(n)} and teacher_token_logprobs {tuple(self.teacher_token_logprobs.shape)}: "
                "expected [N] twice"
            )
        if self.ids.ndim != 2 or self.ids.shape[:1] != n or self.logprobs.shape != self.ids.shape:
            raise ValueError(
                f"ids {tuple(self.ids.shape)} and logprobs {tuple(self.logprobs.shape)}: expected [{n[0]}, K] twice"
            )
        if self.tail_logprobs is not None and self.tail_logprobs.shape != n:
            raise ValueError(f"tail_logprobs {tuple(self.tail_logprobs.shape)}: expected [{n[0]}]")

    def __len__(self) -> int:
        """Return N."""
        return len(self.token_ids)

    @property
    def k(self) -> int:
        """Return K, the number of the teacher's tokens at each position."""
        return self.ids.shape[1]

    def rows(self, start: int, stop: int) -> PositionTargets:
        """Return positions ``start`` to ``stop``, sharing memory."""
        return self._map(lambda tensor: tensor[start:stop])

    def to(self, device: torch.device) -> PositionTargets:
        """Return the same on ``device``, see :func:`send`."""
        return self._map(lambda tensor: send(tensor, device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> PositionTargets:
        return PositionTargets(
            change(self.token_ids),
            change(self.teacher_token_logprobs),
            change(self.ids),
            change(self.logprobs),
            None if self.tail_logprobs is None else change(self.tail_logprobs),
        )


def check_targets(vocab_size: int, targets: PositionTargets) -> None:
    """Raise ValueError unless a student of ``vocab_size`` logits can be trained on ``targets``.

    It reads every number, so call it once on the CPU, before the targets go to a GPU; the losses do not check again.
    """
    if targets.k > vocab_size:
        raise ValueError(f"the teacher gave {targets.k} tokens a position, the student's vocabulary has {vocab_size}")
    for what, ids in (("a response", targets.token_ids), ("the teacher's top K", targets.ids)):
        if ids.numel() == 0:
            continue
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(
                f"token {wrong} in {what} is outside the student's vocabulary of {vocab_size}: student and teacher "
                "need the same tokenizer, and a teacher with more (padded) rows must leave those out"
            )
    top = torch.logsumexp(targets.logprobs, -1)
    masses = [
        ("of a response token", targets.teacher_token_logprobs, -torch.inf),
        (f"of the top {targets.k} together", top, -torch.inf),
    ]
    if targets.tail_logprobs is not None:
        whole = torch.logaddexp(top, targets.tail_logprobs)
        masses.append((f"of the top {targets.k} and the tail together", whole, -MASS_TOLERANCE))
    for what, log_mass, lowest_mass in masses:
        wrong_rows = ~((log_mass <= MASS_TOLERANCE) & (log_mass >= lowest_mass))  # a NaN is wrong too
        if wrong_rows.any():
            row = int(wrong_rows.nonzero()[0, 0])
            raise ValueError(
                f"the teacher's probability {what} is {float(log_mass[row].exp()):.4g} at position {row}: expected "
                "natural log-probabilities of distinct tokens, normalised over the whole vocabulary"
            )
