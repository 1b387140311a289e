"""Decides how much each response token counts in a batch's loss. Kept free of torch for the driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gkd.config.learning import Aggregation


def token_weights(
    lengths: Sequence[int], in_loss: Sequence[bool], aggregation: Aggregation, max_tokens: int
) -> list[float]:
    """Return the weight of every token of each sample; the batch's loss is the weighted sum over all its tokens.

    - ``token_mean``: the mean over the tokens of samples that are ``in_loss`` (DAPO, arXiv 2503.14476, eq. 8).
    - ``sequence_mean``: the mean over samples of each one's mean (GRPO, arXiv 2402.03300, eq. 3).
    - ``constant``: the sum over tokens divided by the number of samples and ``max_tokens``, so that no length is
      favoured (Dr. GRPO, arXiv 2503.20783).

    ``lengths`` [S]: response tokens of each sample; ``max_tokens``: the most that one may have. Samples that are not
    ``in_loss`` have weight 0, and the last two divide by all samples: what one counts does not depend on how many
    others are left out. Since each token's weight is settled here, for the whole batch, the gradient is the same
    however the batch is cut into ranks and micro-batches.
    """
    n_tokens = sum(length for length, keep in zip(lengths, in_loss, strict=True) if keep)
    return chunk_weights(lengths, in_loss, aggregation, max_tokens, len(lengths), n_tokens)


def chunk_weights(
    lengths: Sequence[int],
    in_loss: Sequence[bool],
    aggregation: Aggregation,
    max_tokens: int,
    n_samples: int = 1,
    n_tokens: int = 1,
) -> list[float]:
    """Return :func:`token_weights` of a chunk of a batch, which has ``n_samples`` and ``n_tokens`` that are kept.

    Without these, as long as no more of the batch is known, but for a factor: :attr:`Totals.scale`. ``lengths``,
    ``in_loss`` [S] are the chunk's.
    """

    def weight(length: int) -> float:
        match aggregation:
            case "token_mean":
                return 1 / n_tokens
            case "sequence_mean":
                return 1 / (n_samples * length)
            case "constant":
                return 1 / (n_samples * max_tokens)

    return [weight(length) if keep and length else 0.0 for length, keep in zip(lengths, in_loss, strict=True)]


@dataclass(frozen=True, slots=True)
class Totals:
    """Terms that sums over a batch's chunks lack: the factor ``scale`` of all losses, and ``n_positions`` to divide by.

    The gradient is linear in the weights of tokens, so that one factor at the end makes it that of the whole batch.
    """

    scale: float = 1.0
    n_positions: int = 1

    @staticmethod
    def from_lengths(lengths: Sequence[int], in_loss: Sequence[bool], aggregation: Aggregation) -> Totals:
        """Return the totals of a batch whose chunks were weighted by :func:`chunk_weights`; arguments are its [S]."""
        counted = [length for length, keep in zip(lengths, in_loss, strict=True) if keep]
        divisor = sum(counted) if aggregation == "token_mean" else len(lengths)
        return Totals(1 / max(1, divisor), sum(lengths))
