"""How much each response token counts in a batch's loss. Kept free of torch for the driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def token_weights(lengths: Sequence[int], kept: Sequence[bool], how: Aggregation, max_tokens: int) -> list[float]:
    """Weight of every token of each sample, so that the batch's loss is the weighted sum over all its tokens.

    ``token_mean``: the mean over the tokens of samples that are ``kept`` (DAPO, arXiv 2503.14476, eq. 8).
    ``sequence_mean``: the mean over samples of each one's mean (GRPO, arXiv 2402.03300, eq. 3). ``constant``: the sum
    over tokens divided by the number of samples and ``max_tokens``, so that no length is favoured (Dr. GRPO, arXiv
    2503.20783). Samples that are not ``kept`` have weight 0, and the last two divide by all samples: what one counts
    does not depend on how many others are left out. Since each token's weight is settled here, for the whole batch,
    the gradient is the same however the batch is cut into ranks and micro-batches.
    """
    n_tokens = sum(length for length, keep in zip(lengths, kept, strict=True) if keep)

    def weight(length: int) -> float:
        if how == "token_mean":
            return 1 / n_tokens
        return 1 / (len(lengths) * (length if how == "sequence_mean" else max_tokens))

    return [weight(length) if keep and length else 0.0 for length, keep in zip(lengths, kept, strict=True)]
