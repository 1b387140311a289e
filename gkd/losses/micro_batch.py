"""Samples laid end to end: one micro-batch, without padding.

Shapes: S sequences, L tokens in all, N sampled positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gkd.losses.targets import ABSENT_TAIL, PositionTargets, send
from gkd.types import ScoredSample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """S sequences laid end to end.

    token_ids, position_ids: [L], positions counted from each sequence's start; cu_seqlens [S + 1]: where each sequence
    starts; rows [N]: index of the token whose hidden state predicts each sampled token (the token before it); bounds
    [S + 1]: where each sequence's rows start. Of each sampled token, [N]: response_ids; weights in the loss;
    advantages; sampler_logprobs; old_logprobs, those of the weights before the batch's first update, None where that is
    this one; reference_logprobs, None without a reference. targets are the teacher's, of N positions, None without one.

    S = 0 is allowed: a rank that has nothing left takes part in the others' passes with one token and no sampled
    position.
    """

    token_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    rows: Tensor
    bounds: Tensor
    response_ids: Tensor
    weights: Tensor
    advantages: Tensor
    sampler_logprobs: Tensor
    old_logprobs: Tensor | None
    reference_logprobs: Tensor | None
    targets: PositionTargets | None

    def positions(self, start: int, stop: int) -> MicroBatch:
        """Return the same with the sampled tokens from ``start`` to ``stop`` alone; ``bounds`` and ``rows`` stay."""
        names = ("response_ids", "weights", "advantages", "sampler_logprobs", "old_logprobs", "reference_logprobs")
        values = {name: getattr(self, name) for name in names}
        parts: dict[str, Any] = {name: None if all_ is None else all_[start:stop] for name, all_ in values.items()}
        targets = None if self.targets is None else self.targets.rows(start, stop)
        return replace(self, targets=targets, **parts)

    def pad(self, n_tokens: int) -> MicroBatch:
        """Return the same with at least ``n_tokens`` tokens: more sequences, as short as the others, without rows."""
        n_more = n_tokens - len(self.token_ids)
        if n_more <= 0:
            return self
        steps = torch.arange(n_more, dtype=torch.int64, device=self.token_ids.device)
        # Computed where it is: a copy from the host would wait for all that the GPU has to do.
        numbers = torch.arange(1, -(-n_more // self.max_seqlen) + 1, dtype=self.cu_seqlens.dtype, device=steps.device)
        ends = (len(self.token_ids) + self.max_seqlen * numbers).clamp_(max=n_tokens)
        return replace(
            self,
            token_ids=torch.cat([self.token_ids, torch.zeros_like(steps)]),
            position_ids=torch.cat([self.position_ids, steps % self.max_seqlen]),
            cu_seqlens=torch.cat([self.cu_seqlens, ends]),
        )

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same on a device, see :func:`gkd.losses.targets.send`."""

        def move(value: Any) -> Any:
            if isinstance(value, PositionTargets):
                return value.to(device)
            return send(value, device) if isinstance(value, Tensor) else value

        return MicroBatch(**{field.name: move(getattr(self, field.name)) for field in fields(self)})


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
