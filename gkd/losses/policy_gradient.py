"""Parts of policy-gradient losses: means over sequences, penalties that keep near a reference, and importance weights.

All tensors are [N] where no shape is stated: the response tokens of S whole sequences laid end to end, sequence ``i``
from ``bounds[i]`` to ``bounds[i + 1]``. Log-probabilities are of the sampled tokens, natural logarithms. Losses are to
be minimised; every function's value at a token is that token's, not yet weighted (:mod:`gkd.algorithms.aggregation`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gkd.config.learning import Estimator, RatioLevel

LARGEST_LOG_RATIO = 20.0  # exp of more would be meaningless; vLLM and a trainer differ by a hundredth of it
USUAL_RANGES: dict[RatioLevel, tuple[float, float]] = {"token": (0.2, 0.2), "sequence": (3e-4, 4e-4)}
"""What a ratio is usually clipped to: so far below 1, and so far above. A response's lie much nearer to 1."""


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


def log_ratio(level: RatioLevel, log_q: Tensor, log_old: Tensor, bounds: Tensor, by_token: bool = False) -> Tensor:
    """Compute the log of each token's importance ratio (``algorithm.policy.ratio``).

    It is between the policy that is being updated and the one the batch's updates started from; with one update a batch
    it is 1, and a surrogate's gradient is the plain policy gradient. By ``level``:

    - ``token``: each token's own, log q - log old (PPO, arXiv 1707.06347; GRPO, Shao et al., arXiv 2402.03300, eq. 3).
    - ``sequence``: the mean of these over its response, since a reward belongs to a whole response (GSPO, Zheng et al.,
      arXiv 2507.18071, eq. 7). For responses of one token it is GRPO's.

    ``by_token``: advantages differ from token to token. A response's ratio is then ``sg(s) q / sg(q)`` (GSPO-token,
    eq. 14): its value is the response's, its gradient each token's own, so that a token is moved by its own advantage.
    Where these are equal it has GSPO's gradient.
    """
    token_log_ratio = log_q - log_old
    if level == "token":
        return token_log_ratio
    whole = sequence_mean(token_log_ratio, bounds)
    return whole.detach() + log_q - log_q.detach() if by_token else whole


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Take exp, of at most e^20."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def kl_penalty(log_q: Tensor, log_reference: Tensor, estimator: Estimator, log_old: Tensor) -> Tensor:
    """Estimate KL(Q || reference) at each token from the token sampled, weighted by the ratio ``r = q / old``.

    With ``d = log q - log reference``: k1 is ``d``, k2 is ``d^2 / 2``, k3 is ``exp(-d) - 1 + d`` (Schulman,
    "Approximating KL Divergence", 2020; k3 in GRPO, arXiv 2402.03300, eq. 4). ``log_old`` is of what the samples
    are from: of Q itself, without gradient, where they are its. On average over samples of ``old``, the gradient of all
    three is that of KL(Q || reference): of ``r d``, with d constant, and of ``r k3`` (DeepSeek-V3.2, arXiv 2512.02556,
    eq. 7) as of the average itself, and of ``sg(r) d^2 / 2``. Without r, k3's would be that of KL(reference || Q).
    """
    d = log_q - log_reference
    ratio = ratio_of(log_q - log_old)
    if estimator == "k1":
        return ratio * d.detach()
    if estimator == "k2":
        return ratio.detach() * d.square() / 2
    return ratio * (ratio_of(-d) - 1 + d)


def importance_weights(
    trainer: Tensor, sampler: Tensor, bounds: Tensor, level: RatioLevel, mask: bool, cap: float
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
