"""What engine and trainer disagree on, apart for tokens of the present weights and of older ones.

The first is a difference in how the two compute, the second mostly the updates in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gkd.actor.batches import Metrics
from gkd.types import TrainingSample

SHARE = "mismatch/stale_share"
_MEANS, _RATIO, _LARGEST = ("kl", "is_ratio_mean"), "is_ratio_mean", "is_ratio_max"


def stale_tokens(samples: Sequence[TrainingSample], version: int) -> Tensor:
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

    ``sums`` are [N], as ``stale``, of which a share is among them now; ``largest`` are scalars.
    """
    split, most = dict(sums), dict(largest)
    ratio = sums[f"mismatch/{_RATIO}"]
    for prefix, kept in (("", ~stale), ("stale_", stale)):
        for name in _MEANS:
            split[f"mismatch/{prefix}{name}"] = torch.where(kept, sums[f"mismatch/{name}"], 0.0)
        among = torch.where(kept, ratio, 0.0)
        most[f"mismatch/{prefix}{_LARGEST}"] = among.max() if len(among) else among.sum()
    split[SHARE] = stale.to(ratio.dtype)
    return split, most


def compute_means(row: Metrics) -> Metrics:
    """Return a batch's metrics with means over fresh and over stale tokens, without those of which there are none."""
    if SHARE not in row:
        return row
    row = dict(row)
    for prefix, share in (("", 1 - row[SHARE]), ("stale_", row[SHARE])):
        is_of_none = not row[f"mismatch/{prefix}{_LARGEST}"]  # exact, which the share, a sum of parts, is not
        for name in _MEANS:
            row[f"mismatch/{prefix}{name}"] /= share if share > 0 else 1.0
        if is_of_none:
            for name in (*_MEANS, _LARGEST):
                del row[f"mismatch/{prefix}{name}"]
    return row
