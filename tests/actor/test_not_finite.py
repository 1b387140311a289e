"""A gradient that is not finite: which of the batch's losses are not, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gkd.actor import training
from gkd.actor.loading import load
from gkd.actor.optimizer import adamw
from gkd.actor.staging import Staging
from gkd.actor.training import RankTrainer
from gkd.config.compose import compose
from gkd.errors import UpdateFailed
from tests.actor import models

CPU = torch.device("cpu")


@pytest.mark.parametrize("broken", ["reference", "student"])
def test_the_losses_that_are_not_finite_are_named(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.make("llama").save_pretrained(tmp_path)
    config = compose(["+recipe=grpo", "algorithm.kl.coef=0.1"])
    scored = [replace(one, reference=np.zeros(len(one.sample.sampled_ids), np.float32)) for one in
              models.scored(4, models.VOCAB)]  # fmt: skip
    monkeypatch.setattr(training, "fetch_samples", lambda *_: scored)
    samples = [models.on_driver("ref", i, one) for i, one in enumerate(scored)]
    student = load(tmp_path)
    trainer = RankTrainer(student, adamw(student, config.actor), Staging(CPU), config, 0, 1, CPU)
    before = [p.detach().clone() for p in student.parameters()]
    if broken == "reference":
        scored[1].reference[0] = np.nan
        expected = "actor/kl_loss, actor/kl_reference, actor/loss"
    else:  # in the backward pass alone
        next(iter(student.parameters())).register_hook(lambda gradient: gradient * np.nan)
        expected = "every loss"
    with pytest.raises(UpdateFailed, match=rf"step 7 .*\b{expected}\b.*;") as raised:
        trainer.update(samples, [1.0 / s.n_sampled for s in samples], sum(s.n_sampled for s in samples), 7)
    assert "policy" not in str(raised.value)
    assert all(torch.equal(a, b) for a, b in zip(before, student.parameters(), strict=True))
