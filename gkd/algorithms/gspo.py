"""GSPO (Zheng et al., arXiv 2507.18071): one importance ratio a response, the geometric mean of its tokens'.

A reward belongs to a whole response, so does the ratio (eq. 7): ``s = exp(mean over its tokens of log q - log old)``.
The ratios lie much nearer to 1 than tokens' do, hence the narrow clip range. For responses of one token it is GRPO.
"""

from __future__ import annotations

from torch import Tensor

from gkd.losses.policy_gradient import sequence_mean


def log_ratio(log_q: Tensor, log_old: Tensor, bounds: Tensor) -> Tensor:
    """log of the response's importance ratio at each of its tokens, [N]; ``bounds`` [S + 1]."""
    return sequence_mean(log_q - log_old, bounds)
