"""Parts of policy-gradient losses: means over sequences, penalties that keep near a reference, and importance weights.

All tensors are [N] where no shape is stated: the response tokens of S whole sequences laid end to end, sequence ``i``
from ``bounds[i]`` to ``bounds[i + 1]``. Log-probabilities are of the sampled tokens, natural logarithms. Losses are to
be minimised; every function's value at a token is that token's, not yet weighted (:mod:`gkd.algorithms.aggregation`).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from gkd.config.learning import Estimator

LARGEST_LOG_RATIO = 20.0  # exp of more would be meaningless; vLLM and a trainer differ by a hundredth of it


def sequence_mean(values: Tensor, bounds: Tensor) -> Tensor:
    """Replace every token's value by the mean over its sequence; differentiable. ``bounds`` [S + 1]."""
    return _reduce_sequences(values, bounds, mean=True)


def sequence_sum(values: Tensor, bounds: Tensor) -> Tensor:
    """Replace every token's value by the sum over its sequence; differentiable. ``bounds`` [S + 1]."""
    return _reduce_sequences(values, bounds, mean=False)


def _reduce_sequences(values: Tensor, bounds: Tensor, mean: bool) -> Tensor:
    lengths = bounds.diff().long()
    sequences = torch.arange(len(lengths), device=values.device)
    # Without the size the host would wait for the GPU to add it up.
    owner = torch.repeat_interleave(sequences, lengths, output_size=len(values))
    sums = torch.zeros(len(lengths), dtype=values.dtype, device=values.device).index_add(0, owner, values)
    return (sums / lengths.clamp(min=1) if mean else sums)[owner]


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Take exp, of at most e^20."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def kl_penalty(log_q: Tensor, log_reference: Tensor, estimator: Estimator, log_old: Tensor | None = None) -> Tensor:
    """Estimate KL(Q || reference) at each token from the token sampled, weighted by the ratio ``r = q / old``.

    With ``d = log q - log reference``: k1 is ``d``, k2 is ``d^2 / 2``, k3 is ``exp(-d) - 1 + d`` (Schulman,
    "Approximating KL Divergence", 2020; k3 in GRPO, arXiv 2402.03300, eq. 4). ``log_old`` is what the samples are from;
    None: Q itself, and r is 1 with the gradient of q. On average over samples of ``old``, the gradient of all three is
    that of KL(Q || reference): of ``r d``, with d constant, and of ``r k3`` (DeepSeek-V3.2, arXiv 2512.02556, eq. 7) as
    of the average itself, and of ``sg(r) d^2 / 2``. Without r, k3's would be that of KL(reference || Q).
    """
    d = log_q - log_reference
    ratio = ratio_of(log_q - (log_q.detach() if log_old is None else log_old))
    if estimator == "k1":
        return ratio * d.detach()
    if estimator == "k2":
        return ratio.detach() * d.square() / 2
    return ratio * (ratio_of(-d) - 1 + d)


def importance_weights(
    trainer: Tensor, sampler: Tensor, bounds: Tensor, level: Literal["token", "sequence"], mask: bool, cap: float
) -> Tensor:
    """Compute weights that undo the difference between the engine that sampled and the trainer, detached.

    ``w = trainer's probability / sampler's`` of each token, or the product over its sequence. Truncated importance
    sampling weighs by ``min(w, cap)`` (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training", 2025). With ``mask``, what is outside ``[1 / cap, cap]`` has weight 0 and the rest keeps w (Liu et al.,
    "When Speed Kills Stability", 2025).
    """
    log_w = (trainer - sampler).detach()
    log_w = sequence_sum(log_w, bounds) if level == "sequence" else log_w
    if mask:
        return ratio_of(log_w) * (log_w.abs() <= math.log(cap))
    return ratio_of(log_w).clamp(max=cap)


def sequence_mask(log_q: Tensor, log_sampler: Tensor, advantages: Tensor, bounds: Tensor, limit: float) -> Tensor:
    """Return 1 for the tokens of sequences to learn from, 0 for bad ones that are too far off-policy; detached.

    A sequence is left out when its advantage is negative and the mean of ``log sampler - log q`` over it is above
    ``limit``. The sampler's log-probabilities are those of the engine, so that a difference between engine and trainer
    counts as well as the updates since (off-policy sequence masking of DeepSeek-V3.2, arXiv 2512.02556, eq. 9).
    """
    moved = sequence_mean((log_sampler - log_q).detach(), bounds)
    return (~((sequence_mean(advantages, bounds) < 0) & (moved > limit))).to(log_q.dtype)
