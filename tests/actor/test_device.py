"""All that an update computes with lies on the model's device: shown on the meta device, which mixes with no other.

What would be left on the host, as torch.arange(n) without a device, is a failure of the first update on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from gkd.actor import training
from gkd.actor.loading import load
from gkd.actor.optimizer import adamw
from gkd.actor.staging import Staging
from gkd.actor.training import RankTrainer
from gkd.config.compose import compose
from gkd.modeling import attention
from gkd.modeling.rows import current_bounds
from gkd.types import VersionSpan
from tests.actor import models

META = torch.device("meta")
LOSSES = ("forward_kl", "reverse_kl", "jsd", "sampled_reverse_kl")
SAMPLED = ("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p", "rollout.presence_penalty")


@pytest.fixture
def attend() -> Iterator[Callable[[], None]]:
    """A GPU's kernel takes the sequences' bounds as they lie there, where a CPU's padding would look at them."""

    def shaped(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        assert current_bounds.get(query.shape[2]).tokens.device == query.device
        groups = query.shape[1] // key.shape[1]
        return (query + (key + value).repeat_interleave(groups, 1)).transpose(1, 2), None

    plain = attention.packed_attention
    yield lambda: attention.AttentionInterface.register(attention.NAME, shaped)
    attention.AttentionInterface.register(attention.NAME, plain)


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        *(("on_policy_distill", {"algorithm.loss.name": name}) for name in LOSSES),
        *(("on_policy_distill", {"algorithm.loss.name": name, "algorithm.loss.top_k": 7}) for name in LOSSES[:3]),
        *(("grpo", {name: value}) for name, value in zip(SAMPLED, (0.7, 0.9, 5, 0.1, 1.2), strict=True)),
        ("grpo", {"algorithm.kl.coef": 0.1, "actor.epochs": 2}),
        ("grpo", {"algorithm.importance_sampling.level": "sequence", "schedule.max_staleness": 2}),
        ("gspo", {"actor.gradient_checkpointing": True}),
        ("distill_and_reward", {"algorithm.policy.sequence_mask_kl": 0.1}),
        ("sft", {}),
    ],
)
def test_a_chunk_is_computed_where_the_model_is(
    recipe: str, overrides: dict[str, object], attend: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"actor.max_tokens_per_micro_batch": 40, "actor.loss_chunk": 14, **overrides}
    config = compose([f"+recipe={recipe}", *(f"{name}={json.dumps(value)}" for name, value in values.items())])
    models.make("llama").save_pretrained(tmp_path)
    student = load(tmp_path, config.actor.gradient_checkpointing).to(META)
    attend()  # which loading tries
    trainer = RankTrainer(student, adamw(student, config.actor), Staging(META), config, 0, 1, META)
    scored = models.scored(6, models.VOCAB)
    if config.algorithm.needs_reference:
        scored = [replace(s, reference=s.sample.sampled_logprobs) for s in scored]
    samples = [models.on_driver("ref", i, sample, (-1.0) ** i) for i, sample in enumerate(scored)]
    versions = [VersionSpan(s.n_tokens - s.n_sampled, s.n_tokens, 0) for s in samples]
    samples = [replace(s, versions=(span,)) for s, span in zip(samples, versions, strict=True)]
    monkeypatch.setattr(training, "fetch_samples", lambda *_: scored)
    trainer.accumulate(samples, [1.0 / s.n_sampled for s in samples], 10)
    gradients = [p.grad for p in student.parameters() if p.grad is not None]
    assert gradients and all(gradient.device == META for gradient in gradients)
