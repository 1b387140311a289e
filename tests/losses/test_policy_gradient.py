"""Surrogates, penalties and corrections against sums over tokens written out, in float64."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gkd.config.learning import Estimator
from gkd.losses import policy_gradient as pg
from gkd.losses.cispo import Cispo
from gkd.losses.clip import Clip

V = 7
lengths = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def a_case(sizes: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """log q (with gradient), log old and advantages of N tokens, and the bounds of their sequences."""
    generator = torch.Generator().manual_seed(seed + 31 * len(sizes))
    n = sum(sizes)
    log_q = (-torch.rand(n, dtype=torch.float64, generator=generator) * 3).requires_grad_()
    log_old = log_q.detach() + 0.4 * torch.randn(n, dtype=torch.float64, generator=generator)
    advantages = torch.randn(len(sizes), dtype=torch.float64, generator=generator)
    bounds = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()])
    return log_q, log_old, advantages.repeat_interleave(torch.tensor(sizes)), bounds


@given(lengths, st.floats(0.01, 0.5), st.floats(0.01, 0.9))
@hypothesis_settings(max_examples=30)
def test_clipped_is_ppo_token_by_token_with_its_gradient(sizes: list[int], low: float, high: float) -> None:
    log_q, log_old, advantages, _ = a_case(sizes)
    surrogate = Clip(Clip.Config(clip_low=low, clip_high=high), (0.2, 0.2))
    value = surrogate(log_q, pg.ratio_of(log_q - log_old), advantages)
    clips = surrogate.clips(pg.ratio_of(log_q - log_old)).tolist()
    slope = torch.autograd.grad(value.sum(), log_q)[0]
    for i, (q, old, a) in enumerate(zip(log_q.tolist(), log_old.tolist(), advantages.tolist(), strict=True)):
        r = math.exp(q - old)
        assert value[i].item() == pytest.approx(-min(r * a, min(max(r, 1 - low), 1 + high) * a), rel=1e-12)
        assert clips[i] == (not 1 - low <= r <= 1 + high)
        # PPO learns nothing from a token that has moved past the range in the direction its advantage asks for.
        stopped = (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)
        assert slope[i].item() == pytest.approx(0.0 if stopped else -a * r, rel=1e-12)


@pytest.mark.parametrize(("name", "low", "high"), [("token", 0.2, 0.2), ("sequence", 3e-4, 4e-4)])
def test_a_ratio_is_clipped_by_its_papers_range(name: str, low: float, high: float) -> None:
    surrogate = Clip(Clip.Config(), pg.USUAL_RANGES[name])
    ratios = torch.tensor([1 - 1.01 * low, 1 - 0.99 * low, 1 + 0.99 * high, 1 + 1.01 * high], dtype=torch.float64)
    assert surrogate.clips(ratios).tolist() == [True, False, False, True]


@given(lengths)
@hypothesis_settings(max_examples=20)
def test_cispo_truncates_the_weight_from_above_alone_and_keeps_every_gradient(sizes: list[int]) -> None:
    log_q, log_old, advantages, _ = a_case(sizes)
    ratio = pg.ratio_of(log_q - log_old)
    surrogate = Cispo(Cispo.Config(clip_high=0.1), (0.2, 0.2))
    value = surrogate(log_q, ratio, advantages)
    assert surrogate.clips(ratio).tolist() == [r > 1.1 for r in ratio.tolist()]
    slope = torch.autograd.grad(value.sum(), log_q)[0]
    for i, (q, old, a) in enumerate(zip(log_q.tolist(), log_old.tolist(), advantages.tolist(), strict=True)):
        weight = min(math.exp(q - old), 1.1)
        assert value[i].item() == pytest.approx(-weight * a * q, rel=1e-12)
        assert slope[i].item() == pytest.approx(-weight * a, rel=1e-12)


@given(lengths)
@hypothesis_settings(max_examples=20)
def test_means_and_sums_over_sequences(sizes: list[int]) -> None:
    log_q, _, _, bounds = a_case(sizes)
    for function, divide in ((pg.sequence_mean, True), (pg.sequence_sum, False)):
        values = function(log_q, bounds)
        expected = []
        for start, stop in pairwise(bounds.tolist()):
            total = sum(log_q[start:stop].tolist())
            expected += [total / (stop - start) if divide else total] * (stop - start)
        assert values.tolist() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(lambda x: pg.sequence_mean(x, bounds), (log_q,))


def test_a_rank_without_samples_takes_part() -> None:
    none, bounds = torch.zeros(0, requires_grad=True), torch.zeros(1, dtype=torch.int64)
    assert pg.sequence_mean(none, bounds).shape == (0,)
    Clip(Clip.Config(), (0.2, 0.2))(none, pg.ratio_of(pg.sequence_mean(none, bounds)), none.detach()).sum().backward()
    assert none.grad is not None


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy, with gradient, and log-probabilities of a reference, [V]."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(V, dtype=torch.float64, generator=generator).requires_grad_()
    return logits, torch.randn(V, dtype=torch.float64, generator=generator).log_softmax(-1)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_penalty_is_on_average_what_its_name_says(estimator: Estimator, moved: bool) -> None:
    """The average over the tokens that a policy sampled, Q or an older one, summed over the vocabulary."""
    logits, reference = distributions(3)
    log_q = logits.log_softmax(-1)
    log_old = distributions(8)[1] if moved else log_q.detach()
    forward = (log_q.exp() * (log_q - reference)).sum()  # KL(Q || reference)
    values = pg.kl_penalty(log_q, reference, estimator, log_old)
    if estimator != "k2":  # unbiased
        torch.testing.assert_close((log_old.exp() * values).sum(), forward)
    d, ratio = (log_q - reference).detach(), (log_q - log_old).detach().exp()
    plain = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[estimator]
    torch.testing.assert_close(values.detach(), ratio * plain)
    slope = torch.autograd.grad((log_old.exp() * values).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(slope, torch.autograd.grad(forward, logits)[0])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mask", [False, True])
def test_importance_weights_one_by_one(level: str, mask: bool) -> None:
    trainer, sampler, _, bounds = a_case([3, 1, 4, 2], seed=5)
    weights = pg.importance_weights(trainer, sampler, bounds, level, mask, 1.3).tolist()
    assert not pg.importance_weights(trainer, sampler, bounds, level, mask, 1.3).requires_grad
    ratios = [math.exp(a - b) for a, b in zip(trainer.tolist(), sampler.tolist(), strict=True)]
    expected: list[float] = []
    for start, stop in pairwise(bounds.tolist()):
        own = ratios[start:stop]
        if level == "sequence":
            own = [math.prod(own)] * len(own)
        expected += [r * (1 / 1.3 <= r <= 1.3) if mask else min(r, 1.3) for r in own]
    assert weights == pytest.approx(expected, rel=1e-9)
    assert len(set(weights)) > 1  # the case tells something


def test_bad_sequences_that_have_moved_far_are_left_out() -> None:
    log_q = torch.tensor([-1.0, -3.0, -1.0, -3.0, -1.0, -1.0])
    log_old = torch.full((6,), -1.0)
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    bounds = torch.tensor([0, 2, 4, 6])
    assert pg.sequence_mask(log_q, log_old, advantages, bounds, 0.5).tolist() == [0, 0, 1, 1, 1, 1]
    assert pg.sequence_mask(log_q, log_old, advantages, bounds, 1.5).tolist() == [1] * 6


def test_a_ratio_cannot_overflow() -> None:
    assert pg.ratio_of(torch.tensor([1e4, 19.0])).tolist() == pytest.approx([math.exp(20), math.exp(19)], rel=1e-5)
