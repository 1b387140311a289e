"""On-policy distillation: bring the student to the teacher on the student's own samples.

This is GKD (Agarwal et al., arXiv 2306.13649) with all data sampled from the student.
Every response token counts the same; the loss is the mean over all response positions of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gkd.actor.model import Head, Objective
from gkd.actor.packing import MicroBatch
from gkd.config import Loss
from gkd.losses.chunked import chunked_loss


def objective(micro: MicroBatch, loss: Loss, chunk: int, on_policy: bool) -> Objective:
    """Sum of the loss over a micro-batch's response positions, and of the metrics by their names.

    ``on_policy``: whether the sampler's log-probabilities are those of the plain model (temperature 1, no nucleus), so
    that they can be held against the trainer's.
    """

    def evaluate(hidden: Tensor, head: Head) -> tuple[Tensor, dict[str, Tensor]]:
        weights = torch.ones(len(hidden), device=hidden.device)
        total, found = chunked_loss(hidden, head, micro.targets, loss, chunk, weights)
        token_logprobs = found.pop("token_logprobs")
        value = total.detach()
        metrics = {"actor/loss": value, "distill/loss": value, "actor/entropy": found.pop("entropy").sum()}
        metrics |= {f"distill/{name}": value.sum() for name, value in found.items()}
        if on_policy:
            metrics |= mismatch(token_logprobs, micro.sampler_logprobs)
        return total, metrics

    return evaluate


def mismatch(trainer_logprobs: Tensor, sampler_logprobs: Tensor) -> dict[str, Tensor]:
    """How far trainer and sampler disagree on the same weights, over N tokens: sums, and the largest ratio.

    KL(sampler || trainer) by the k3 estimate r - 1 - log r with r = trainer / sampler (Schulman, 2020).
    """
    log_ratio = trainer_logprobs - sampler_logprobs
    ratio = log_ratio.exp()
    return {
        "mismatch/kl": (ratio - 1 - log_ratio).sum(),
        "mismatch/is_ratio_mean": ratio.sum(),
        "mismatch/is_ratio_max": ratio.max() if len(ratio) else ratio.sum(),
    }
