"""Decides how many of its most likely tokens the teacher sends. Kept free of torch for the driver."""

from __future__ import annotations

from gkd.config import Config
from gkd.errors import ConfigError


def required_top_k(config: Config, vocab_size: int) -> int:
    """Return the teacher's K in training: 0 where only the tokens' log-probabilities count, ``vocab_size`` for all.

    Raises ConfigError when that is more than the teacher sends.
    """
    loss = config.algorithm.loss
    if loss.compares_tokens_alone or not config.algorithm.distils:
        return 0
    setting = f"algorithm.loss.top_k={loss.top_k}" if loss.top_k else "algorithm.loss.top_k=null (full vocabulary)"
    return _require_sent(config, setting, min(loss.top_k or vocab_size, vocab_size))


def top_k_for_validation(config: Config, vocab_size: int) -> int:
    """Return the K that val/reverse_kl is measured with: ``data.val_top_k``, whatever training has.

    Raises ConfigError when that is more than the teacher sends.
    """
    return _require_sent(config, f"data.val_top_k={config.data.val_top_k}", min(config.data.val_top_k, vocab_size))


def _require_sent(config: Config, setting: str, k: int) -> int:
    if k > config.teacher.max_top_k:
        raise ConfigError(
            f"{setting} needs {k:,} of the teacher's log-probabilities a position, more than "
            f"teacher.max_top_k={config.teacher.max_top_k:,}"
        )
    return k
