"""Computes importance weights, by one rule for every loss that is an average over sampled tokens.

A response is sampled by an engine, ``mu``, and learned from by the trainer, ``q``. The two differ where a batch is
learned from in several updates, where engine and trainer compute differently on the same weights (bfloat16, 4-bit
weights, other kernels), and where the weights have moved on since. What is to be estimated is an average over tokens of
q, so each sampled token counts by

    q / mu  =  (q / old) * (old / mu)

with ``old`` the trainer's own probability before the batch's first update. All three are of the distribution that was
sampled from: softmax(logits / temperature), truncated by :mod:`gkd.losses.truncation`.

- ``q / old``, the ratio of PPO (arXiv 1707.06347), is 1 in the first update of a batch.
- ``old / mu`` is ``algorithm.importance_sampling``: truncated (Yao et al., "Your Efficient RL Framework Secretly
  Brings You Off-Policy RL Training", 2025) or masked, and constant. It is 1 where it is off.

Who gets what:

- The policy gradient on rewards: ``q / old`` inside its surrogate, which clips it, times that weight. With
  ``algorithm.policy.ratio=sequence``, as in GSPO, that ratio is of the whole response.
- Divergences estimated from the token sampled (``sampled_reverse_kl``) and the penalty to the reference: ``q / old`` of
  the token as it is, times that weight (DeepSeek-V3.2, arXiv 2512.02556, section 3.1, for the penalty).
- The mask of bad sequences that are far off-policy looks at ``mu``, so at all of the difference.
- Other divergences, over the vocabulary: nothing. At each position they are summed, not sampled,
  and GKD (arXiv 2306.13649) takes the text before a position from wherever it comes.
- The data's own answers, which nobody sampled: only the divergence and the supervised loss, nothing of the above.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gkd.config import Algorithm
from gkd.losses.micro_batch import MicroBatch
from gkd.losses.policy_gradient import importance_weights, ratio_of


@dataclass(frozen=True, slots=True)
class Importance:
    """The parts of N tokens' importance weights, each [N] and constant.

    ``old``: log-probabilities before the batch's first update. ``sampler``: the engine's, ``old`` where there is none.
    ``importance_weights``: old / mu, truncated or masked. ``sampled``: 1, or 0 for tokens of the data's own answers.
    """

    old: Tensor
    sampler: Tensor
    importance_weights: Tensor
    sampled: Tensor

    def weights(self, log_q: Tensor) -> Tensor:
        """Return q / old * old / mu of each token, [N], constant."""
        return ratio_of(log_q.detach() - self.old) * self.importance_weights


def importance(micro: MicroBatch, log_q: Tensor, algorithm: Algorithm) -> Importance:
    """Compute what a micro-batch's importance weights are made of; ``log_q`` [N] as the trainer has it now.

    ``algorithm.importance_sampling.level`` is to be decided already (:meth:`gkd.config.Config.algorithm_on`); where it
    is still ``auto`` they are 1.
    """
    old = log_q.detach() if micro.old_logprobs is None else micro.old_logprobs
    unknown = micro.sampler_logprobs.isnan()
    sampler = torch.where(unknown, old, micro.sampler_logprobs)
    settings, factors = algorithm.importance_sampling, torch.ones_like(old)
    if settings.level in ("token", "sequence"):
        factors = importance_weights(old, sampler, micro.bounds, settings.level, settings.mask, settings.cap)
    return Importance(old, sampler, factors, (~unknown).to(old.dtype))
