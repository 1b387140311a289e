"""What dropout leaves out depends on the place in the run: another part at every update, rank and chunk."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from gkd.actor import training
from gkd.actor.loading import load
from gkd.actor.optimizer import adamw
from gkd.actor.rank_state import RankState
from gkd.actor.staging import Staging
from gkd.actor.training import RankTrainer, dropout_seed
from gkd.config.compose import compose
from tests.actor import models

CPU = torch.device("cpu")


def test_no_two_places_of_a_run_have_one_seed() -> None:
    places = list(itertools.product((0, 1), range(200), range(16), range(20)))  # seed, updates, rank, chunk
    assert len({dropout_seed(*place) for place in places}) > len(places) - 20  # of 31 bits: a few are equal by chance
    one = dropout_seed(0, 5, 3, 2)
    assert one not in {dropout_seed(1, 5, 3, 2), dropout_seed(0, 6, 3, 2), dropout_seed(0, 5, 4, 2),
                       dropout_seed(0, 5, 3, 1), dropout_seed(0, 5, 3, 0)}  # fmt: skip


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer of an adapter with dropout, whose updates change nothing, and what it learns from."""
    models.make("llama").save_pretrained(tmp_path)
    config = compose(["+recipe=on_policy_distill", "actor.lora.r=4", "actor.lora.dropout=0.5", "actor.lr=1e-30"])
    scored = models.scored(4, models.VOCAB)
    samples = [models.on_driver("ref", i, one) for i, one in enumerate(scored)]
    monkeypatch.setattr(training, "fetch_samples", lambda *_: scored)

    def start() -> tuple[RankTrainer, tuple[Any, Any, int]]:
        torch.manual_seed(0)
        student = load(tmp_path, lora=config.actor.lora)
        for name, parameter in student.named_parameters():
            if "lora_B" in name:  # which begins at 0, where dropout changes nothing
                torch.nn.init.normal_(parameter)
        trainer = RankTrainer(student, adamw(student, config.actor), Staging(CPU), config, 0, 1, CPU)
        return trainer, (samples, [1.0 / s.n_sampled for s in samples], 10)

    return start


def norm(trainer: RankTrainer, args: tuple[Any, Any, int], step: int) -> float:
    return trainer.update(*args, step)["actor/grad_norm"]


def test_updates_on_the_same_samples_drop_others_and_a_run_that_goes_on_drops_the_same(
    make: Any, tmp_path: Path
) -> None:
    trainer, args = make()
    norms = [norm(trainer, args, step) for step in (1, 2, 3)]
    assert len(set(norms)) == 3
    again, _ = make()
    assert [norm(again, args, step) for step in (1, 2)] == norms[:2]
    state = RankState(again, "", torch.float32)
    other, _ = make()
    norm(other, args, 1)
    RankState(other, "", torch.float32).take_over(state.keep())
    assert norm(other, args, 3) == norms[2] == norm(again, args, 3)
    again.staging.set(None, ())  # in the middle of a step, by whose beginning samples are fresh or stale
    RankState(other, "", torch.float32).take_over(state.keep())
    fresh, _ = make()
    RankState(fresh, "", torch.float32).take_over(state.keep())
    assert fresh.version == other.version == again.version == 2


def test_chunks_of_a_step_drop_others(make: Any) -> None:
    trainer, args = make()
    gradients = []
    for chunk in (0, 1):
        before = [p.grad.clone() if p.grad is not None else 0 for p in trainer.student.parameters() if p.requires_grad]
        trainer.accumulate(*args, chunk)
        after = [p.grad for p in trainer.student.parameters() if p.requires_grad]
        gradients.append(torch.cat([(a - b).flatten() for a, b in zip(after, before, strict=True)]))
    assert not torch.allclose(gradients[0], gradients[1], rtol=0.1)


def test_what_ratios_are_against_is_the_student_without_dropout(make: Any) -> None:
    """As it sampled; with dropout importance weights and the first update's ratios would be noise."""
    trainer, (samples, _, _) = make()
    trainer.compute_logprobs(samples, old=True, reference=False)
    other, _ = make()
    for module in other.student.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    other.compute_logprobs(samples, old=True, reference=False)
    assert trainer.old.keys() == other.old.keys()
    assert all(torch.equal(value, other.old[place]) for place, value in trainer.old.items())
    assert trainer.student.training
