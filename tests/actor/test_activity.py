"""What the actor notes of itself for timeline.json: each activity with the version of the weights it was done with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gkd.actor import rank_state, training
from gkd.actor.loading import load
from gkd.actor.optimizer import adamw
from gkd.actor.rank_state import RankState
from gkd.actor.staging import Staging
from gkd.actor.training import RankTrainer
from gkd.cluster.workers.activity import Activity
from gkd.config import Algorithm
from gkd.config.compose import compose
from tests.actor import models

CPU = torch.device("cpu")


def test_every_activity_has_the_version_of_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gkd.cluster.workers.activity.HERE", here := Activity())
    models.make("llama").save_pretrained(tmp_path)
    config, student, scored = compose(["+recipe=on_policy_distill"]), load(tmp_path), models.scored(2, models.VOCAB)
    monkeypatch.setattr(training, "fetch_samples", lambda *_: scored)
    monkeypatch.setattr(rank_state, "write_pretrained", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "barrier", lambda *_, **__: None)
    samples, weights = [models.on_driver("ref", i, one) for i, one in enumerate(scored)], [1.0, 1.0]
    trainer = RankTrainer(student, adamw(student, config.actor), Staging(CPU), config, 0, 1, CPU)
    state = RankState(trainer, str(tmp_path), torch.float32)
    for step in (1, 2):
        trainer.compute_logprobs(samples, old=True, reference=False)
        trainer.update(samples, weights, 2, step)
        trainer.evaluate(samples, weights, 2, Algorithm())
        state.offload()
        state.onload()
        state.save(str(tmp_path / "saved"))
    assert [(span.name, span.version) for span in here.take()[1]] == [
        (name, step - (name in ("log-probabilities", "update")))
        for step in (1, 2)
        for name in ("log-probabilities", "update", "validate", "offload", "onload", "save")
    ]
