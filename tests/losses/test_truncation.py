"""Truncation and penalty against brute force, token by token, and the samplers of transformers and vLLM."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from gkd.config import Algorithm, Rollout
from gkd.losses.objective import objective
from gkd.losses.truncation import apply_presence_penalty, log_mass, truncate_logprobs
from gkd.types import Sampling
from tests.losses.test_off_policy import every_token, off_policy

CASES: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 500},
    {"min_p": 0.3},
    {"top_k": 4, "min_p": 0.2},
    {"top_p": 0.6, "top_k": 5},
    {"top_p": 0.8, "min_p": 0.15},
    {"top_p": 0.7, "top_k": 6, "min_p": 0.05},
]


def staying(probabilities: list[float], top_p: float = 1.0, top_k: int | None = None, min_p: float = 0.0) -> list[int]:
    """The tokens that stay, found one at a time in float64."""
    order = sorted(range(len(probabilities)), key=lambda v: -probabilities[v])
    order = [v for v in order if probabilities[v] >= min_p * probabilities[order[0]]][:top_k]
    total, held, kept = sum(probabilities[v] for v in order), 0.0, []
    for v in order:
        if held < top_p * total:
            kept.append(v)
        held += probabilities[v]
    return kept


@pytest.mark.parametrize("how", CASES, ids=str)
def test_what_stays_is_what_brute_force_finds(how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    log_q = (2 * torch.randn(20, 12, dtype=torch.float64)).log_softmax(-1)
    truncated, mass = truncate_logprobs(log_q, Sampling(1, **how)), log_mass(log_q, Sampling(1, **how))
    for row, probabilities in enumerate(log_q.exp().tolist()):
        kept = staying(probabilities, **how)
        total = sum(probabilities[v] for v in kept)
        assert mass[row].item() == pytest.approx(math.log(total), abs=1e-12)
        expected = [math.log(p / total) if v in kept else -math.inf for v, p in enumerate(probabilities)]
        assert truncated[row].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("how", [{"top_k": 3}, {"min_p": 0.4}, {"top_p": 0.7, "top_k": 4, "min_p": 0.1}], ids=str)
@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_the_gradient_is_that_of_what_was_sampled_from(how: dict[str, Any], name: str) -> None:
    """Summed over all tokens that an engine could have sampled, it is the gradient of the expected advantage."""
    logits, _, _ = off_policy()
    kept = staying((logits.detach() / 0.8).softmax(-1).tolist(), **how)
    inside = torch.full_like(logits.detach(), -torch.inf)
    inside[kept] = 0.0
    log_q = (logits / 0.8 + inside).log_softmax(-1)
    micro, rows, advantages = every_token(log_q.detach().exp(), logits, None)
    rollout = Rollout(n=2, temperature=0.8, **how)
    total, measured = objective(micro, Algorithm(name=name), rollout, chunk=7)(rows, lambda x: x)
    gradient = torch.autograd.grad(total, logits, retain_graph=True)[0]
    exact = -(log_q[kept].exp() * advantages[kept]).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(exact, logits)[0], rtol=1e-9, atol=1e-12)
    assert measured.sums["mismatch/kl"][kept].abs().max() < 1e-12


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_the_penalty_is_for_tokens_before_a_position_in_its_own_response(chunk: int) -> None:
    rng = np.random.default_rng(0)
    lengths = [5, 1, 7, 3]
    bounds = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]))
    ids = torch.tensor(rng.integers(0, 4, sum(lengths)))
    logits = torch.randn(sum(lengths), 6)
    penalised = torch.cat(
        [
            apply_presence_penalty(part, start * chunk, ids, bounds, 0.7)
            for start, part in enumerate(logits.split(chunk))
        ]
    )
    for row in range(len(ids)):
        first = max(int(b) for b in bounds if b <= row)
        expected = [x - 0.7 * (v in ids[first:row].tolist()) for v, x in enumerate(logits[row].tolist())]
        assert penalised[row].tolist() == pytest.approx(expected, abs=1e-6)


def test_a_nucleus_that_is_full_takes_no_further_token() -> None:
    log_q = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    assert truncate_logprobs(log_q, Sampling(1, top_p=0.5)).exp().tolist() == [[1.0, 0.0, 0.0]]
