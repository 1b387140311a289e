"""What a sampler makes of logits before it draws, in the order of vLLM, and the same in the trainer.

1. ``presence_penalty`` is taken off the logits of tokens that the response has already.
2. Logits are divided by the temperature.
3. ``min_p``: tokens less likely than so many times the most likely one are left out.
4. ``top_k``: all but the K most likely are left out.
5. ``top_p``: of what is left, the most likely tokens stay, as few as have that much of it together.

What stays is normalised, so log-probabilities of the sampler and of the trainer are of one distribution. n positions,
V vocabulary.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor


class Truncation(Protocol):
    """Settings of a sampler; :class:`gkd.config.Rollout` and :class:`gkd.types.Sampling` have them."""

    @property
    def top_k(self) -> int | None: ...

    @property
    def top_p(self) -> float: ...

    @property
    def min_p(self) -> float: ...


def truncates(truncation: Truncation) -> bool:
    """Return whether any token is left out."""
    return truncation.top_p < 1.0 or truncation.top_k is not None or truncation.min_p > 0.0


def find_least_kept(log_q: Tensor, truncation: Truncation) -> Tensor:
    """Return the log-probability [n, 1] of the least likely token that stays; ``log_q`` [n, V].

    Tokens as likely as that one stay, too.
    """
    if truncation.top_p == 1.0:
        floor_ = log_q.amax(-1, keepdim=True) + (math.log(truncation.min_p) if truncation.min_p else -math.inf)
        if truncation.top_k is None or truncation.top_k >= log_q.shape[-1]:
            return floor_
        return torch.maximum(floor_, log_q.topk(truncation.top_k, -1).values[..., -1:])
    falling = log_q.sort(-1, descending=True).values
    floor, total = None, log_q.new_ones(())
    if truncation.min_p or truncation.top_k is not None:
        floor = falling[..., :1] + (math.log(truncation.min_p) if truncation.min_p else -math.inf)
        if truncation.top_k is not None:
            floor = torch.maximum(floor, falling[..., min(truncation.top_k, falling.shape[-1]) - 1, None])
        falling = falling.masked_fill(falling < floor, -torch.inf)
        total = falling.exp().sum(-1, keepdim=True)
    before = falling.exp().cumsum(-1) - falling.exp()
    floor_ = falling.masked_fill(before >= truncation.top_p * total, torch.inf).amin(-1, keepdim=True)
    return floor_ if floor is None else torch.maximum(floor_, floor)


def log_mass(log_q: Tensor, truncation: Truncation) -> Tensor:
    """Compute the log of what the tokens that stay have together, [n]; which they are is taken as constant.

    A token that was sampled and, by rounding or an update, is left out now keeps its own probability, divided by this:
    its importance ratio is then continuous, and not 0.
    """
    with torch.no_grad():
        smallest = find_least_kept(log_q.detach(), truncation)
    return torch.logsumexp(log_q.masked_fill(log_q < smallest, -torch.inf), -1)


def truncate_logprobs(log_q: Tensor, truncation: Truncation) -> Tensor:
    """Return ``log_q`` [n, V] with the tokens that are left out impossible, normalised over the others."""
    if not truncates(truncation):
        return log_q
    return log_q.masked_fill(log_q < find_least_kept(log_q, truncation), -torch.inf).log_softmax(-1)


def apply_presence_penalty(logits: Tensor, start: int, response_ids: Tensor, bounds: Tensor, penalty: float) -> Tensor:
    """Take ``penalty`` off the logits [n, V] of tokens that stand before a position in its response.

    ``logits`` are of the sampled positions from ``start`` on, of N that have ``response_ids`` [N]; ``bounds`` [S + 1]:
    where each response begins.
    """
    if not penalty or not len(logits):
        return logits
    stop, vocab = start + len(logits), logits.shape[1]
    places = torch.arange(stop, device=logits.device)
    first = bounds[torch.searchsorted(bounds, places, right=True) - 1]
    # Where each token stands first in a response, in the row of the first logits that are of this response. Only shapes
    # that is known on the host, so that it need not wait for a GPU.
    row = (first - start).clamp(min=0)
    stands = torch.where(first >= first[start], places, stop).int()
    earliest = torch.full_like(logits, stop, dtype=torch.int32).view(-1)
    earliest.scatter_reduce_(0, row * vocab + response_ids[:stop], stands, "amin")
    is_sampled = earliest.view_as(logits)[row[start:]] < places[start:, None]
    return logits - penalty * is_sampled
