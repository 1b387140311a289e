"""The loss of a micro-batch: its known limits, and a formula written out in float64."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gkd.actor.collate import collate
from gkd.algorithms.aggregation import token_weights
from gkd.config import Algorithm, Rollout, load
from gkd.losses.micro_batch import MicroBatch
from gkd.losses.objective import objective
from gkd.types import ScoredSample
from tests.actor import models

LIMIT = 12
WRONG_SURROGATES = """
from gkd.losses.surrogate import Surrogate

class Reinforce(Surrogate):
    by_token = True
    def __call__(self, log_q, ratio, advantages):
        return -advantages * log_q
    def clips(self, ratio):
        return ratio > 1e9

class Averaged(Reinforce):
    def __call__(self, log_q, ratio, advantages):
        return -(advantages * log_q).mean()

class Detached(Reinforce):
    def __call__(self, log_q, ratio, advantages):
        return -advantages * log_q.detach()

class ClipsNothing(Reinforce):
    def clips(self, ratio):
        return None
"""


def a_batch(
    n: int = 6, seed: int = 0, aggregation: str = "sequence_mean", one_token: bool = False
) -> tuple[MicroBatch, torch.Tensor]:
    """A micro-batch with advantages, old and reference log-probabilities, and logits [N, V], float64 with gradient."""
    rng = np.random.default_rng(seed)
    samples = models.scored(n, seed=seed)
    if one_token:
        samples = [s for s in models.scored(200, seed=seed) if len(s.sample.sampled_ids) == 1][:n]
        assert len(samples) == n
    lengths = [len(s.sample.sampled_ids) for s in samples]
    references = [-rng.random(r).astype(np.float32) * 3 for r in lengths]
    samples = [ScoredSample(s.sample, s.teacher, r) for s, r in zip(samples, references, strict=True)]
    weights = token_weights(lengths, [True] * n, aggregation, LIMIT)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(lengths), models.VOCAB, dtype=torch.float64, generator=generator).requires_grad_()
    ids = torch.from_numpy(np.concatenate([s.sample.sampled_ids for s in samples]).astype(np.int64))
    log_q = logits.detach().log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    old = (log_q + 0.3 * torch.randn(len(ids), dtype=torch.float64, generator=generator)).float().split(lengths)
    return collate(samples, models.VOCAB, weights, rng.normal(size=n).tolist(), old), logits


def loss_and_slope(
    micro: MicroBatch, logits: torch.Tensor, rollout: Rollout | None = None, **algorithm: Any
) -> tuple[float, torch.Tensor]:
    evaluate = objective(micro, Algorithm.model_validate(algorithm), rollout or Rollout(n=2), chunk=5)
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
    """Every part at once: clipped surrogate, capped importance weights, teacher's KL in the advantage, and a penalty.

    And the gradient: how much each token's log-probability is pushed. With advantages that differ within a response,
    GSPO pushes each token by its own (GSPO-token, eq. 14).
    """
    micro, logits = a_batch(seed=4, aggregation=aggregation)
    total, slope = loss_and_slope(
        micro, logits, name=name, aggregation=aggregation, policy={"clip_low": 0.1, "clip_high": 0.3},
        advantage={"teacher_kl": 0.05}, kl={"coef": 0.2}, importance_sampling={"level": "token", "cap": 1.5},
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
    pushes = torch.zeros(n_tokens, dtype=torch.float64)
    for a, b in pairwise(micro.bounds.tolist()):
        mean = sum(log_q[t] - old[t] for t in range(a, b)) / (b - a)
        for t in range(a, b):
            own = math.exp(log_q[t] - old[t])
            ratio = math.exp(mean) if name == "gspo" else own
            advantage = float(micro.advantages[t]) - 0.05 * (old[t] - teacher[t])
            clipped = min(max(ratio, 0.9), 1.3) * advantage < ratio * advantage
            surrogate = -min(ratio * advantage, min(max(ratio, 0.9), 1.3) * advantage)
            d, factor = log_q[t] - reference[t], min(math.exp(old[t] - sampler[t]), 1.5)
            k3 = math.exp(-d) - 1 + d
            weight = {"token_mean": 1 / n_tokens, "sequence_mean": 1 / (n * (b - a)), "constant": 1 / (n * LIMIT)}
            expected += weight[aggregation] * factor * (surrogate + 0.2 * own * k3)
            push = (0.0 if clipped else -ratio * advantage) + 0.2 * own * (k3 + 1 - math.exp(-d))
            pushes[t] = weight[aggregation] * factor * push
    assert total == pytest.approx(expected, rel=1e-5)
    plain = (pushes * logits.log_softmax(-1).gather(-1, micro.response_ids[:, None])[:, 0]).sum()
    torch.testing.assert_close(slope, torch.autograd.grad(plain, logits)[0], rtol=1e-5, atol=1e-8)


def test_distillation_and_reward_add_up() -> None:
    micro, logits = a_batch()
    both, slope = loss_and_slope(micro, logits, name="on_policy_distill", reward_weight=0.3)
    distilled, first = loss_and_slope(micro, logits, name="on_policy_distill")
    rewarded, second = loss_and_slope(micro, logits, name="grpo")
    assert both == pytest.approx(distilled + 0.3 * rewarded, rel=1e-9)
    torch.testing.assert_close(slope, first + 0.3 * second)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_supervised_term_is_the_cross_entropy_on_the_datas_own_answers_alone(temperature: float) -> None:
    """Of the plain model, at whatever temperature the rest was sampled."""
    micro, logits = a_batch()
    a, b = micro.bounds.tolist()[1:3]  # the second sample is the data's own answer
    micro.sampler_logprobs[a:b] = torch.nan
    rollout = Rollout(temperature=temperature)
    mixed = {"on_policy_share": 0.5, "supervised_weight": 0.3}
    total, slope = loss_and_slope(micro, logits, rollout, name="on_policy_distill", **mixed)
    distilled, first = loss_and_slope(micro, logits, rollout, name="on_policy_distill")
    log_q = logits.log_softmax(-1).gather(-1, micro.response_ids[:, None])[:, 0]
    expected = -0.3 * (micro.weights * log_q)[a:b].sum()
    assert total == pytest.approx(distilled + expected.item(), rel=1e-6)
    torch.testing.assert_close(slope, first + torch.autograd.grad(expected, logits)[0])
    _, measured = objective(micro, Algorithm(), Rollout(), chunk=5)(logits, lambda x: x)
    assert torch.equal(measured.sums["mismatch/kl"][a:b], torch.zeros(b - a))
    assert torch.isfinite(measured.sums["mismatch/kl"]).all()
    ratios = measured.sums["mismatch/is_ratio_mean"]  # whose sum is divided by the tokens that were sampled
    assert not ratios[a:b].any() and ratios[:a].all()


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


def test_the_disagreement_is_with_the_weights_that_sampled_also_after_an_update() -> None:
    """What later updates of the same batch change is no disagreement."""
    micro, logits = a_batch()
    assert micro.old_logprobs is not None
    micro.sampler_logprobs.copy_(micro.old_logprobs)
    _, measured = objective(micro, Algorithm(name="grpo"), Rollout(n=2), chunk=5)(logits, lambda x: x)
    assert not measured.sums["mismatch/kl"].any() and measured.largest["mismatch/is_ratio_max"] == 1.0


def test_a_token_that_the_teacher_rules_out_has_a_finite_advantage() -> None:
    micro, logits = a_batch()
    assert micro.targets is not None
    micro.targets.teacher_token_logprobs[0] = -torch.inf
    total, slope = loss_and_slope(micro, logits, name="grpo", advantage={"teacher_kl": 0.05})
    assert math.isfinite(total) and torch.isfinite(slope).all()


def test_nothing_that_needs_a_policy_is_learned_from_the_datas_own_answers() -> None:
    """Nobody sampled them, so no average over them is one over the policy's tokens."""
    micro, logits = a_batch()
    a, b = micro.bounds.tolist()[1:3]
    how: dict[str, Any] = {"name": "on_policy_distill", "kl": {"coef": 0.2}, "importance_sampling": {"level": "token"}}
    micro.sampler_logprobs[a:b] = torch.nan
    total, slope = loss_and_slope(micro, logits, **how)
    distilled, first = loss_and_slope(micro, logits, name="on_policy_distill")
    assert math.isfinite(total) and total != pytest.approx(distilled, rel=1e-6)
    torch.testing.assert_close(slope[a:b], first[a:b], rtol=0, atol=0)
    assert not torch.allclose(slope[:a], first[:a])
    _, measured = objective(micro, Algorithm(**how), Rollout(), chunk=5)(logits, lambda x: x)
    for name in ("actor/importance_weight", "actor/kl_reference"):  # means over what the student sampled
        assert not measured.sums[name][a:b].any() and measured.sums[name][:a].all()


def test_the_mask_of_far_sequences_looks_at_what_the_engine_said() -> None:
    """In the first update of a batch too, where the trainer has not moved at all."""
    micro, logits = a_batch()
    micro = without_old(micro)
    log_q = logits.detach().log_softmax(-1).gather(-1, micro.response_ids[:, None])[:, 0]
    micro.sampler_logprobs.copy_(log_q)
    micro.advantages.fill_(-1.0)
    a, b = micro.bounds.tolist()[1:3]
    micro.sampler_logprobs[a:b] += 0.4
    how = {"name": "grpo", "policy": {"sequence_mask_kl": 0.3}}
    _, slope = loss_and_slope(micro, logits, **how)
    assert slope[a:b].abs().max() == 0 < slope[:a].abs().max()
    micro.advantages[a:b] = 1.0  # good ones stay
    assert loss_and_slope(micro, logits, **how)[1][a:b].abs().max() > 0


PENALIZED = """
from gkd.losses.surrogate import Surrogate

class Plain(Surrogate):
    by_token = True

    def __call__(self, log_q, ratio, advantages):
        return -ratio * advantages

    def clips(self, ratio):
        return ratio > 1e9

class ByToken(Plain):
    needs_reference = True

    def __call__(self, log_q, ratio, advantages, reference=None):
        d = log_q - reference
        return ratio * (0.2 * ((-d).exp() - 1 + d) - advantages)

class Whole(ByToken):
    by_token = False
"""


@pytest.mark.parametrize("name", ["ByToken", "Whole"])
def test_a_surrogate_that_needs_a_reference_is_given_its_log_probabilities(name: str, tmp_path: Path) -> None:
    """So that with a penalty of its own it does what algorithm.kl.coef does."""
    (tmp_path / "penalized.py").write_text(PENALIZED)
    micro, logits = a_batch()
    plain, own = ({"surrogate": f"{tmp_path}/penalized.py:{kind}"} for kind in ("Plain", name))
    expected, slope = loss_and_slope(micro, logits, name="grpo", policy=plain, kl={"coef": 0.2})
    penalized = loss_and_slope(micro, logits, name="grpo", policy=own)
    assert penalized[0] == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(penalized[1], slope)
    assert loss_and_slope(micro, logits, name="grpo", policy=plain)[0] != pytest.approx(expected, rel=1e-3)
    config = load({"algorithm": {"name": "grpo", "policy": own}, "rollout": {"n": 2}})
    assert "reference" in config.groups()


@pytest.mark.parametrize(
    ("name", "message"), [("Averaged", r"\(\)"), ("Detached", "a gradient"), ("ClipsNothing", "clips gives NoneType")]
)
def test_a_surrogate_that_is_not_one_value_a_token_is_named(name: str, message: str, tmp_path: Path) -> None:
    """One number for all tokens would count for each."""
    (tmp_path / "surrogates.py").write_text(WRONG_SURROGATES)
    micro, logits = a_batch()
    loss_and_slope(micro, logits, name="grpo", policy={"surrogate": f"{tmp_path}/surrogates.py:Reinforce"})
    with pytest.raises(ValueError, match=rf"algorithm.policy.surrogate=.*:{name}.* {message}"):
        loss_and_slope(micro, logits, name="grpo", policy={"surrogate": f"{tmp_path}/surrogates.py:{name}"})
