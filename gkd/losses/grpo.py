"""GRPO (Shao et al., arXiv 2402.03300): every response token has an importance ratio of its own.

The ratio is between the policy that is being updated and the one the batch's updates started from; with one update a
batch it is 1, and the surrogate's gradient is the plain policy gradient.
"""

from __future__ import annotations

from torch import Tensor


def log_ratio(log_q: Tensor, log_old: Tensor, bounds: Tensor) -> Tensor:
    """log of the importance ratio at each of N response tokens, [N]."""
    del bounds  # of sequences, which GRPO does not look at
    return log_q - log_old
