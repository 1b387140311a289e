"""A rank computes each prompt of a micro-batch once where it is to and can; its numbers are those of whole samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from gkd.actor import loading, training
from gkd.actor.loading import load
from gkd.actor.optimizer import adamw
from gkd.actor.staging import Staging
from gkd.actor.training import RankTrainer
from gkd.config.compose import compose
from gkd.types import TrainingSample
from tests.actor import models

CPU = torch.device("cpu")
SCORED = [*models.group(3, n_prompt=6), *models.scored(2), *models.group(4, n_prompt=9, seed=1)]
SCORED = [SCORED[i] for i in (5, 0, 3, 6, 1, 7, 4, 2, 8)]
WHOLE = sum(len(its.sample.token_ids) for its in SCORED)


def trainer_of(path: Path, monkeypatch: pytest.MonkeyPatch, *settings: str) -> RankTrainer:
    config = compose(["+recipe=grpo", "actor.epochs=2", *settings])
    student = load(path)
    monkeypatch.setattr(training, "fetch_samples", lambda samples, _: [SCORED[sample.slot] for sample in samples])
    return RankTrainer(student, adamw(student, config.actor), Staging(CPU), config, 0, 1, CPU)


def samples() -> list[TrainingSample]:
    return [models.on_driver("ref", i, each, advantage=(-1.0) ** i) for i, each in enumerate(SCORED)]


def update(trainer: RankTrainer, order: Sequence[int]) -> tuple[float, float]:
    its = [samples()[i] for i in order]
    row = trainer.update(its, [0.1 + 0.01 * i for i in order], sum(sample.n_sampled for sample in its), 1)
    return row["actor/loss"], row["actor/grad_norm"]


@pytest.mark.parametrize(
    ("attention", "shares", "takes", "n_tokens"),
    [
        ("gkd_packed", "true", True, WHOLE - 2 * 6 - 3 * 9),
        ("gkd_packed", "false", True, WHOLE),
        ("gkd_packed", "true", False, WHOLE),  # as on a GPU whose kernel does not take them
        ("gkd_packed_in_rows", "true", True, WHOLE - 2 * 6 - 3 * 9),
        ("sdpa", "true", True, WHOLE),  # padded
    ],
)
def test_prompts_are_computed_once_where_sequences_are_packed(
    attention: str, shares: str, takes: bool, n_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gkd.actor.model.can_share_beginnings", lambda _: takes)
    monkeypatch.setattr(loading, "pack_or_pad", lambda lm, *_: lm.set_attn_implementation(attention))
    models.make("llama").save_pretrained(tmp_path)
    trainer = trainer_of(tmp_path, monkeypatch, f"actor.share_prompts={shares}")
    computed: list[int] = []
    trainer.student.register_forward_pre_hook(lambda _, args: computed.append(len(args[0].sequences)))
    trainer.compute_logprobs(samples(), old=True, reference=False)
    update(trainer, range(len(SCORED)))
    assert computed == [n_tokens] * 2


def test_ratios_are_to_the_log_probabilities_of_the_same_sample_however_it_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are computed in other micro-batches than those of the update, here in another order as well."""
    models.make("llama").save_pretrained(tmp_path)
    results = []
    for shares, before, after in (("false", 8192, 8192), ("true", 8192, 40), ("true", 40, 8192), ("false", 30, 50)):
        trainer = trainer_of(tmp_path, monkeypatch, f"actor.share_prompts={shares}")
        trainer.set_token_budget(before)
        trainer.compute_logprobs(samples()[::-1], old=True, reference=False)
        for (_, slot), logprobs in trainer.old.items():
            logprobs.add_(0.02 * slot - 0.1)  # other weights', of each sample's own
        trainer.set_token_budget(after)
        results.append(update(trainer, [3, 8, 1, 0, 7, 2, 5, 4, 6]))
    for result in results[1:]:
        assert result == pytest.approx(results[0], rel=1e-4)
