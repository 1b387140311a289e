"""Models some of whose layers are given rows, laid end to end with prompts in common, against rows all through."""

from __future__ import annotations

import torch
from torch import Tensor

from gkd.actor.loading import load
from gkd.actor.model import Student
from gkd.config import Algorithm, Rollout
from gkd.losses.micro_batch import MicroBatch
from gkd.losses.objective import objective
from gkd.modeling.backbone import use_padded_rows
from tests.actor import models
from tests.gpu.checks.context import Context, require
from tests.losses.test_micro_batch import micro_batch

MOST = 1e-3  # relative, of float32


def note_models_with_rows(context: Context) -> None:
    """Note how far loss and gradients are apart, in float32; experts of gpt-oss are not rehearsed."""
    samples = [*models.group(4, n_prompt=6), *models.scored(5, seed=1)]
    for family in models.IN_ROWS:
        if context.rehearsal and family == "gpt_oss":
            continue
        path = context.scratch / family
        models.make(family).save_pretrained(path)
        student = load(path)
        require(student.is_packed and student.takes_rows, f"{family} is packed")
        student.to("cuda")
        ours = _loss_and_gradients(student, micro_batch(samples, shared=True))
        with use_padded_rows(student.lm):
            theirs = _loss_and_gradients(student, micro_batch(samples))
        apart = [float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)]
        worst = max(value if value == value else float("inf") for value in apart)
        context.note({f"rows_{family}": worst})
        require(worst < MOST, f"{family}: differs by {worst:.2e}")


def _loss_and_gradients(student: Student, micro: MicroBatch) -> list[Tensor]:
    micro = micro.to(torch.device("cuda"))
    student.zero_grad()
    loss, _ = student(micro, objective(micro, Algorithm(), Rollout(n=2), 100))
    loss.backward()
    return [loss.detach(), torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])]
