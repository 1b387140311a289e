"""Samples laid end to end as micro-batches, see :class:`gkd.losses.micro_batch.MicroBatch`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from gkd.losses.micro_batch import MicroBatch
from gkd.losses.targets import ABSENT_TAIL, PositionTargets
from gkd.modeling.layout import SequenceLayout
from gkd.modeling.sequences import PackedSequences
from gkd.types import Array, ScoredSample


def collate(
    scored: Sequence[ScoredSample],
    top_k: int | None,
    weights: Sequence[float],
    advantages: Sequence[float],
    old: Sequence[Tensor] | None = None,
    shared: bool = False,
) -> MicroBatch:
    """Lay samples end to end, each with the weight and the advantage of its tokens and their ``old`` log-probabilities.

    ``top_k``: K of the targets, None for none, which a batch without samples is given as other ranks' have it.
    ``shared``: whether samples of one prompt have its tokens in common, which is not for models in rows all through.

    Exactly the sampled tokens have a row, the end token like the others, so that nothing else carries loss: neither the
    prompt, nor what stands between turns, nor the position after the end.
    """
    samples = [s.sample for s in scored]
    positions = [np.flatnonzero(s.sampled) for s in samples]
    counts = [len(indices) for indices in positions]
    references = [s.reference for s in scored if s.reference is not None]
    assert len(references) in (0, len(scored)), "the reference scored some samples and not others"
    layout = SequenceLayout(
        [s.token_ids for s in samples], [int(indices[0]) if shared and len(indices) else 0 for indices in positions]
    )
    response_ids = _lay([sample.sampled_ids for sample in samples], np.int64)
    return MicroBatch(
        # One token where there is none, whose hidden state nothing looks at.
        sequences=PackedSequences.from_layout(layout).pad(1),
        rows=_lay([layout.locate(i, indices - 1) for i, indices in enumerate(positions)], np.int64),
        bounds=_starts(counts),
        response_ids=response_ids,
        weights=_repeat(weights, counts),
        advantages=_repeat(advantages, counts),
        sampler_logprobs=_lay([sample.sampled_logprobs for sample in samples], np.float32),
        old_logprobs=None if old is None else torch.cat([torch.zeros(0), *old]),
        reference_logprobs=_lay(references, np.float32) if references or not scored else None,
        targets=None if top_k is None else _targets(scored, response_ids, top_k),
    )


def _lay(arrays: Sequence[Array], dtype: DTypeLike) -> Tensor:
    """Lay arrays of ``dtype``, or one that it holds, end to end."""
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *arrays]))


def _starts(lengths: Sequence[int]) -> Tensor:
    """Return where each of S stretches begins, and where the last one ends, [S + 1]."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int64)


def _repeat(values: Sequence[float], counts: Sequence[int]) -> Tensor:
    """Turn one value a sample into one a sampled token."""
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(counts, dtype=torch.int64))


def _targets(scored: Sequence[ScoredSample], response_ids: Tensor, top_k: int) -> PositionTargets:
    targets = [s.teacher for s in scored if s.teacher is not None]
    assert len(targets) == len(scored), "the teacher scored some samples and not others"
    none = np.zeros((0, targets[0].ids.shape[1] if targets else top_k))
    tails = [
        np.full(len(t.ids), ABSENT_TAIL, np.float32) if t.tail_logprobs is None else t.tail_logprobs for t in targets
    ]
    return PositionTargets(
        token_ids=response_ids,
        teacher_token_logprobs=_lay([t.token_logprobs for t in targets], np.float32),
        ids=torch.from_numpy(np.concatenate([none.astype(np.int64), *(t.ids for t in targets)])),
        logprobs=torch.from_numpy(np.concatenate([none.astype(np.float32), *(t.logprobs for t in targets)])),
        tail_logprobs=_lay(tails, np.float32) if none.shape[1] else None,
    )
