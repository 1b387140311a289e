"""Samples laid end to end as micro-batches, see :class:`gkd.losses.micro_batch.MicroBatch`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gkd.losses.micro_batch import MicroBatch
from gkd.losses.targets import ABSENT_TAIL, PositionTargets
from gkd.types import ScoredSample


def collate(
    scored: Sequence[ScoredSample],
    top_k: int | None,
    weights: Sequence[float],
    advantages: Sequence[float],
    old: Sequence[Tensor] | None = None,
) -> MicroBatch:
    """Lay samples end to end, each with the weight and the advantage of its tokens and their ``old`` log-probabilities.

    ``top_k`` is the K of their targets, None where they have none; a batch without samples has as well.

    Exactly the sampled tokens have a row, the end token like the others, so that nothing else carries loss: neither the
    prompt, nor what stands between turns, nor the position after the end.
    """
    if not scored:
        return _make_empty(top_k, old is not None)
    samples = [s.sample for s in scored]
    lengths = [len(sample.token_ids) for sample in samples]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.flatnonzero(np.concatenate([sample.sampled for sample in samples]))
    counts = [int(np.count_nonzero(sample.sampled)) for sample in samples]
    references = [s.reference for s in scored if s.reference is not None]
    assert len(references) in (0, len(scored)), "the reference scored some samples and not others"
    token_ids = torch.from_numpy(np.concatenate([sample.token_ids for sample in samples]).astype(np.int64))
    response_ids = token_ids[torch.from_numpy(positions)]
    return MicroBatch(
        token_ids=token_ids,
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        max_seqlen=max(lengths),
        rows=torch.from_numpy(positions - 1),
        bounds=torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])),
        response_ids=response_ids,
        weights=_repeat(weights, counts),
        advantages=_repeat(advantages, counts),
        sampler_logprobs=torch.from_numpy(np.concatenate([sample.sampled_logprobs for sample in samples])),
        old_logprobs=None if old is None else torch.cat(list(old)),
        reference_logprobs=torch.from_numpy(np.concatenate(references)) if references else None,
        targets=None if top_k is None else _targets(scored, response_ids),
    )


def _repeat(values: Sequence[float], counts: Sequence[int]) -> Tensor:
    """Turn one value a sample into one a sampled token."""
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(counts))


def _targets(scored: Sequence[ScoredSample], response_ids: Tensor) -> PositionTargets:
    targets = [s.teacher for s in scored if s.teacher is not None]
    assert len(targets) == len(scored), "the teacher scored some samples and not others"
    tails = [
        np.full(len(t.ids), ABSENT_TAIL, np.float32) if t.tail_logprobs is None else t.tail_logprobs for t in targets
    ]
    return PositionTargets(
        token_ids=response_ids,
        teacher_token_logprobs=torch.from_numpy(np.concatenate([t.token_logprobs for t in targets])),
        ids=torch.from_numpy(np.concatenate([t.ids for t in targets]).astype(np.int64)),
        logprobs=torch.from_numpy(np.concatenate([t.logprobs for t in targets])),
        tail_logprobs=torch.from_numpy(np.concatenate(tails)) if targets[0].ids.shape[1] else None,
    )


def _make_empty(top_k: int | None, has_old: bool) -> MicroBatch:
    none = torch.zeros(0)
    targets = None
    if top_k is not None:
        targets = PositionTargets(none.long(), none, none.long().reshape(0, top_k), none.reshape(0, top_k), none)
    return MicroBatch(
        token_ids=torch.zeros(1, dtype=torch.int64),
        position_ids=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        max_seqlen=1,
        rows=none.long(),
        bounds=torch.zeros(1, dtype=torch.int64),
        response_ids=none.long(),
        weights=none,
        advantages=none,
        sampler_logprobs=none,
        old_logprobs=none if has_old else None,
        reference_logprobs=none,
        targets=targets,
    )
