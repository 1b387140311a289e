"""Samples laid end to end: one micro-batch, without padding.

Shapes: S sequences, L tokens in all, N response positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gkd.losses.targets import PositionTargets
from gkd.sample import Scored


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """S sequences laid end to end.

    token_ids, position_ids: [L]; cu_seqlens [S + 1]: where each sequence starts; rows [N]: index of the token whose
    hidden state predicts each response token (the token before it); targets of N positions; sampler_logprobs [N].
    S = 0 is allowed: the turn of a rank that has nothing left while the others still do. Such a batch holds one
    token and no response position.
    """

    token_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    rows: Tensor
    targets: PositionTargets
    sampler_logprobs: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device."""
        return MicroBatch(
            self.token_ids.to(device),
            self.position_ids.to(device),
            self.cu_seqlens.to(device),
            self.max_seqlen,
            self.rows.to(device),
            self.targets.to(device),
            self.sampler_logprobs.to(device),
        )


def collate(scored: Sequence[Scored], top_k: int) -> MicroBatch:
    """Lay samples end to end. ``top_k`` is the K of their targets, which a batch without samples has as well.

    The end token is a response token like the others and has a row; what would follow it has none, so the position
    after the end carries no loss.
    """
    if not scored:
        return _empty(top_k)
    lengths = [len(s.sample.request.prompt.token_ids) + len(s.sample.response_ids) for s in scored]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    rows = [
        starts[i] + len(s.sample.request.prompt.token_ids) - 1 + np.arange(len(s.sample.response_ids))
        for i, s in enumerate(scored)
    ]
    ids = [part for s in scored for part in (s.sample.request.prompt.token_ids, s.sample.response_ids)]
    targets = [s.target for s in scored if s.target is not None]
    assert len(targets) == len(scored), "only scored samples are trained on"
    return MicroBatch(
        token_ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        max_seqlen=max(lengths),
        rows=torch.from_numpy(np.concatenate(rows).astype(np.int64)),
        targets=PositionTargets(
            token_ids=torch.from_numpy(np.concatenate([s.sample.response_ids for s in scored]).astype(np.int64)),
            teacher_token_logprobs=torch.from_numpy(np.concatenate([t.token_logprobs for t in targets])),
            ids=torch.from_numpy(np.concatenate([t.ids for t in targets]).astype(np.int64)),
            logprobs=torch.from_numpy(np.concatenate([t.logprobs for t in targets])),
        ),
        sampler_logprobs=torch.from_numpy(np.concatenate([s.sample.logprobs for s in scored])),
    )


def _empty(top_k: int) -> MicroBatch:
    none = torch.zeros(0)
    return MicroBatch(
        token_ids=torch.zeros(1, dtype=torch.int64),
        position_ids=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        max_seqlen=1,
        rows=none.long(),
        targets=PositionTargets(none.long(), none, none.long().reshape(0, top_k), none.reshape(0, top_k)),
        sampler_logprobs=none,
    )
