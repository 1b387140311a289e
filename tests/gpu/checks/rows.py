"""Models some of whose layers are given rows, laid end to end with prompts in common, against rows all through."""

from __future__ import annotations

import torch

from gkd.actor.loading import load
from gkd.modeling.backbone import use_padded_rows
from tests.actor import models
from tests.gpu.checks.compiled import loss_and_gradients, worst_apart
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
        shared, whole = (micro_batch(samples, shared=once).to(torch.device("cuda")) for once in (True, False))
        ours = loss_and_gradients(student, shared)
        with use_padded_rows(student.lm):
            worst = worst_apart(ours, loss_and_gradients(student, whole))
        context.note({f"rows_{family}": worst})
        require(worst < MOST, f"{family}: differs by {worst:.2e}")
