"""The loss of a micro-batch: its known limits, a formula written out in float64, and TRL's on the same tensors."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gkd.actor.packing import MicroBatch, collate
from gkd.algorithms.aggregation import token_weights
from gkd.algorithms.objective import objective
from gkd.config import Algorithm, Rollout
from gkd.sample import Scored
from tests.actor import models

LIMIT = 12


def a_batch(
    n: int = 6, seed: int = 0, aggregation: str = "sequence_mean", one_token: bool = False
) -> tuple[MicroBatch, torch.Tensor]:
    """A micro-batch with advantages, old and reference log-probabilities, and logits [N, V], float64 with gradient."""
    rng = np.random.default_rng(seed)
    samples = models.scored(n, seed=seed)
    if one_token:
        samples = [s for s in models.scored(200, seed=seed) if len(s.sample.response_ids) == 1][:n]
        assert len(samples) == n
    lengths = [len(s.sample.response_ids) for s in samples]
    references = [-rng.random(r).astype(np.float32) * 3 for r in lengths]
    samples = [Scored(s.sample, s.target, r) for s, r in zip(samples, references, strict=True)]
    weights = token_weights(lengths, [True] * n, aggregation, LIMIT)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(lengths), models.VOCAB, dtype=torch.float64, generator=generator).requires_grad_()
    ids = torch.from_numpy(np.concatenate([s.sample.response_ids for s in samples]).astype(np.int64))
    log_q = logits.detach().log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    old = (log_q + 0.3 * torch.randn(len(ids), dtype=torch.float64, generator=generator)).float().split(lengths)
    return collate(samples, models.VOCAB, weights, rng.normal(size=n).tolist(), old), logits


def loss_and_slope(micro: MicroBatch, logits: torch.Tensor, **algorithm: Any) -> tuple[float, torch.Tensor]:
    evaluate = objective(micro, Algorithm.model_validate(algorithm), Rollout(n=2), chunk=5)
    total, _ = evaluate(logits, lambda x: x)
    return total.item(), torch.autograd.grad(total, logits)[0]


def without_old(micro: MicroBatch) -> MicroBatch:
    fields = {name: getattr(micro, name) for name in micro.__slots__}
    return MicroBatch(**(fields | {"old_logprobs": None}))


def test_gspo_of_one_token_responses_is_grpo() -> None:
    micro, logits = a_batch(one_token=True)
    clip = {"clip_low": 0.1, "clip_high": 0.2}
    ours, slope = loss_and_slope(micro, logits, name="gspo", policy=clip)
    expected, reference = loss_and_slope(micro, logits, name="grpo", policy=clip)
    assert ours == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(slope, reference)
    longer, logits = a_batch()
    assert loss_and_slope(longer, logits, name="gspo", policy=clip)[0] != pytest.approx(
        loss_and_slope(longer, logits, name="grpo", policy=clip)[0], rel=1e-3
    )


@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
def test_at_ratio_one_it_is_the_plain_policy_gradient(name: str, surrogate: str) -> None:
    micro, logits = a_batch()
    micro = without_old(micro)
    _, slope = loss_and_slope(micro, logits, name=name, policy={"surrogate": surrogate})
    log_q = logits.log_softmax(-1).gather(-1, micro.response_ids[:, None])[:, 0]
    if name == "gspo":  # the same for a whole response: every token has its mean
        log_q = torch.cat(
            [log_q[a:b].mean().expand(b - a) if surrogate == "clip" else log_q[a:b]
             for a, b in pairwise(micro.bounds.tolist())]
        )  # fmt: skip
    plain = -(micro.weights * micro.advantages * log_q).sum()
    torch.testing.assert_close(slope, torch.autograd.grad(plain, logits)[0])


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_equal_rewards_give_no_gradient(name: str) -> None:
    micro, logits = a_batch()
    micro.advantages.zero_()
    total, slope = loss_and_slope(micro, logits, name=name)
    assert total == 0.0
    assert torch.equal(slope, torch.zeros_like(slope))


@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_the_whole_loss_written_out(name: str, aggregation: str) -> None:
    """Every part at once: clipped surrogate, truncated correction, the teacher's KL in the advantage, and a penalty."""
    micro, logits = a_batch(seed=4, aggregation=aggregation)
    total, _ = loss_and_slope(
        micro, logits, name=name, aggregation=aggregation, policy={"clip_low": 0.1, "clip_high": 0.3},
        advantage={"teacher_kl": 0.05}, kl={"coef": 0.2}, correction={"level": "token", "cap": 1.5},
    )  # fmt: skip
    log_q = logits.detach().log_softmax(-1).gather(-1, micro.response_ids[:, None])[:, 0].tolist()
    assert micro.old_logprobs is not None and micro.reference_logprobs is not None and micro.targets is not None
    old, reference, sampler, teacher = (
        x.tolist()
        for x in (
            micro.old_logprobs, micro.reference_logprobs, micro.sampler_logprobs, micro.targets.teacher_token_logprobs
        )
    )  # fmt: skip
    expected, n_tokens, n = 0.0, len(log_q), len(micro.bounds) - 1
    for a, b in pairwise(micro.bounds.tolist()):
        mean = sum(log_q[t] - old[t] for t in range(a, b)) / (b - a)
        for t in range(a, b):
            ratio = math.exp(mean if name == "gspo" else log_q[t] - old[t])
            advantage = float(micro.advantages[t]) - 0.05 * (old[t] - teacher[t])
            surrogate = -min(ratio * advantage, min(max(ratio, 0.9), 1.3) * advantage)
            surrogate *= min(math.exp(old[t] - sampler[t]), 1.5)
            d = log_q[t] - reference[t]
            weight = {"token_mean": 1 / n_tokens, "sequence_mean": 1 / (n * (b - a)), "constant": 1 / (n * LIMIT)}
            expected += weight[aggregation] * (surrogate + 0.2 * (math.exp(-d) - 1 + d))
    assert total == pytest.approx(expected, rel=1e-5)


def test_distillation_and_reward_add_up() -> None:
    micro, logits = a_batch()
    both, slope = loss_and_slope(micro, logits, name="on_policy_distill", reward_weight=0.3)
    distilled, first = loss_and_slope(micro, logits, name="on_policy_distill")
    rewarded, second = loss_and_slope(micro, logits, name="grpo")
    assert both == pytest.approx(distilled + 0.3 * rewarded, rel=1e-9)
    torch.testing.assert_close(slope, first + 0.3 * second)


def test_the_supervised_term_is_the_cross_entropy_on_the_datas_own_answers_alone() -> None:
    micro, logits = a_batch()
    a, b = micro.bounds.tolist()[1:3]  # the second sample is the data's own answer
    micro.sampler_logprobs[a:b] = torch.nan
    total, slope = loss_and_slope(micro, logits, name="on_policy_distill", on_policy_share=0.5, supervised_weight=0.3)
    distilled, first = loss_and_slope(micro, logits, name="on_policy_distill")
    log_q = logits.log_softmax(-1).gather(-1, micro.response_ids[:, None])[:, 0]
    expected = -0.3 * (micro.weights * log_q)[a:b].sum()
    assert total == pytest.approx(distilled + expected.item(), rel=1e-6)
    torch.testing.assert_close(slope, first + torch.autograd.grad(expected, logits)[0])
    _, measured = objective(micro, Algorithm(), Rollout(), chunk=5)(logits, lambda x: x)
    assert torch.equal(measured.sums["mismatch/kl"][a:b], torch.zeros(b - a))
    assert torch.isfinite(measured.sums["mismatch/kl"]).all()


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.8), (1.4, 0.6)])
@pytest.mark.parametrize("name", ["on_policy_distill", "grpo"])
def test_the_disagreement_is_with_what_was_sampled_from(name: str, temperature: float, top_p: float) -> None:
    """Zero where the sampler says what brute force over the nucleus says, and k3 of the difference elsewhere."""
    micro, logits = a_batch()
    micro = dataclasses.replace(micro, old_logprobs=None)
    for row, (token, scores) in enumerate(zip(micro.response_ids.tolist(), logits.double().tolist(), strict=True)):
        weights = [math.exp(score / temperature) for score in scores]
        held, nucleus = 0.0, 0.0
        for weight in sorted(weights, reverse=True):
            if held < top_p * sum(weights) or nucleus == 0:
                nucleus += weight
            held += weight
        micro.sampler_logprobs[row] = math.log(weights[token] / nucleus)
    algorithm, rollout = Algorithm(name=name), Rollout(n=2, temperature=temperature, top_p=top_p)
    _, measured = objective(micro, algorithm, rollout, chunk=5)(logits, lambda x: x)
    assert measured.sums["mismatch/kl"].abs().max() < 1e-6
    micro.sampler_logprobs[0] -= 0.5
    _, measured = objective(micro, algorithm, rollout, chunk=5)(logits, lambda x: x)
    assert measured.sums["mismatch/kl"][0] == pytest.approx(math.exp(0.5) - 1.5, abs=1e-5)
    assert measured.largest["mismatch/is_ratio_max"] == pytest.approx(math.exp(0.5), abs=1e-5)


class _Accelerator:
    """One process: gathering and reducing change nothing."""

    num_processes = 1
    sync_gradients = False

    def gather(self, value: Any) -> Any:
        return value

    gather_for_metrics = gather

    def reduce(self, value: Any, reduction: str) -> Any:
        return value


TRL_CASES = [
    ("grpo", "sequence_mean", "grpo", "token"),
    ("grpo", "token_mean", "dapo", "token"),
    ("grpo", "constant", "dr_grpo", "token"),
    ("gspo", "sequence_mean", "grpo", "sequence"),
]


@pytest.mark.parametrize(("name", "aggregation", "loss_type", "level"), TRL_CASES)
def test_trl_computes_the_same_on_the_same_tensors(name: str, aggregation: str, loss_type: str, level: str) -> None:
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed (the extra trl)")
    micro, logits = a_batch(seed=7, aggregation=aggregation)
    bounds = micro.bounds.tolist()
    longest = max(b - a for a, b in pairwise(bounds))
    log_q = logits.log_softmax(-1).gather(-1, micro.response_ids[:, None])[:, 0]

    def padded(values: torch.Tensor) -> torch.Tensor:
        rows = [torch.nn.functional.pad(values[a:b], (0, longest - (b - a))) for a, b in pairwise(bounds)]
        return torch.stack(rows)

    mask = padded(torch.ones(len(log_q)))
    entropies = padded(torch.zeros(len(log_q)))
    trainer = SimpleNamespace(
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=0.2, loss_type=loss_type,
        importance_sampling_level=level, epsilon_low=0.1, epsilon_high=0.3, use_vllm=False, max_completion_length=LIMIT,
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False, accelerator=_Accelerator(),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True), _metrics={"train": __import__("collections").defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (padded(log_q), entropies, None),
    )  # fmt: skip
    assert micro.old_logprobs is not None and micro.reference_logprobs is not None
    inputs = {
        "prompt_ids": torch.zeros(len(bounds) - 1, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(bounds) - 1, 1),
        "completion_ids": padded(micro.response_ids),
        "completion_mask": mask,
        "advantages": padded(micro.advantages)[:, 0],
        "old_per_token_logps": padded(micro.old_logprobs),
        "ref_per_token_logps": padded(micro.reference_logprobs),
        "num_items_in_batch": mask.sum(),
    }
    theirs = grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)
    ours, slope = loss_and_slope(
        micro, logits, name=name, aggregation=aggregation, kl={"coef": 0.2}, policy={"clip_low": 0.1, "clip_high": 0.3}
    )
    assert ours == pytest.approx(theirs.item(), rel=1e-6)
    torch.testing.assert_close(slope, torch.autograd.grad(theirs, logits)[0], rtol=1e-6, atol=1e-9)
