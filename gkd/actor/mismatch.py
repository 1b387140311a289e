"""Means over the tokens that metrics are of: what engine and trainer disagree on is apart for tokens of the present
weights and of older ones.

The first is a difference in how the two compute, the second mostly the updates in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gkd.actor.batches import Metrics
from gkd.losses.objective import GIVEN, SAMPLED
from gkd.types import TrainingSample

SHARE = "mismatch/stale_share"
_MEANS, _RATIO, _LARGEST = ("kl", "is_ratio_mean"), "is_ratio_mean", "is_ratio_max"


def mark_stale_tokens(samples: Sequence[TrainingSample], version: int) -> Tensor:
    """Return which of the samples' sampled tokens [N], laid end to end, older weights than ``version`` sampled."""
    spans = [span for sample in samples for span in sample.versions]
    stale = torch.tensor([span.version < version for span in spans], dtype=torch.bool)
    return stale.repeat_interleave(torch.tensor([span.stop - span.start for span in spans], dtype=torch.int64))


def leave_out(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the metrics of a micro-batch, sums or the largest, without those of the mismatch."""
    return {name: value for name, value in values.items() if not name.startswith("mismatch/")}


def split_by_age(
    sums: Mapping[str, Tensor], largest: Mapping[str, Tensor], stale: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the metrics of a micro-batch's tokens, ``mismatch/*`` of fresh, ``mismatch/stale_*`` of stale ones.

    ``sums`` are [N], as ``stale``, of which a share is among them now; ``largest`` are scalars. Tokens that nobody
    sampled are neither.
    """
    split, most = dict(sums), dict(largest)
    ratio = sums[f"mismatch/{_RATIO}"]
    sampled = sums[SAMPLED] > 0 if SAMPLED in sums else torch.ones_like(stale)
    for prefix, mask in (("", ~stale & sampled), ("stale_", stale & sampled)):
        for name in _MEANS:
            split[f"mismatch/{prefix}{name}"] = torch.where(mask, sums[f"mismatch/{name}"], 0.0)
        among = torch.where(mask, ratio, 0.0)
        most[f"mismatch/{prefix}{_LARGEST}"] = among.max() if len(among) else among.sum()
    split[SHARE] = (stale & sampled).to(ratio.dtype)
    return split, most


def compute_means(row: Metrics) -> Metrics:
    """Return a batch's metrics as means over the tokens that they are of, without those of which there are none.

    ``row`` has them as sums over the batch's tokens, divided by the number of all: of tokens that the student sampled,
    fresh and stale ones apart, and of the data's own answers.
    """
    row = dict(row)
    sampled, given_share = row.pop(SAMPLED, 1.0), row.pop(GIVEN, 0.0)
    _divide(row, ("actor/kl_reference", "actor/importance_weight", SHARE), sampled)
    _divide(row, ("actor/cross_entropy",), given_share)
    stale = row.get(SHARE, 0.0)
    for prefix, share in (("", sampled * (1 - stale)), ("stale_", sampled * stale)):
        largest = f"mismatch/{prefix}{_LARGEST}"
        is_of_none = not row.get(largest, 1.0)  # exact, which a share, a sum of parts, is not
        if is_of_none:
            del row[largest]
        _divide(row, [f"mismatch/{prefix}{name}" for name in _MEANS], 0.0 if is_of_none else share)
    return row


def _divide(row: Metrics, names: Iterable[str], share: float) -> None:
    """Divide what a row has of ``names`` by the share of tokens that it is of; what is of none is left out."""
    for name in names:
        if share > 0 and name in row:
            row[name] /= share
        else:
            row.pop(name, None)
