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


def token_log_ratio(log_q: Tensor, log_old: Tensor, bounds: Tensor) -> Tensor:
    """The same for advantages that differ from token to token (GSPO-token, eq. 14): ``sg(s) q / sg(q)``, as log, [N].

    Its value is the response's ratio; its gradient is each token's own, so that a token is moved by its own advantage
    and not by the mean of its response's. Where the advantages of a response are equal it has GSPO's gradient.
    """
    return log_ratio(log_q, log_old, bounds).detach() + log_q - log_q.detach()
