"""Gradients from samples of other policies: on average those of what is to be learned, summed over a vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gkd.config import Algorithm, Rollout, load
from gkd.losses.micro_batch import MicroBatch
from gkd.losses.objective import logprobs, objective
from gkd.losses.targets import PositionTargets
from gkd.modeling.sequences import PackedSequences
from tests.actor import models


def every_token(
    sampler: torch.Tensor, logits: torch.Tensor, old: torch.Tensor | None, seed: int = 0
) -> tuple[MicroBatch, torch.Tensor, torch.Tensor]:
    """A response of one token for each of V, weighted by how often the sampler [V] draws it, after one prompt.

    Sums over it are averages over what is sampled. Returns also the logits [V, V], all rows those of ``logits`` [V],
    and the advantages [V].
    """
    generator = torch.Generator().manual_seed(seed)
    n = len(sampler)
    advantages = torch.randn(n, dtype=torch.float64, generator=generator)
    teacher, reference = torch.randn(2, n, dtype=torch.float64, generator=generator).log_softmax(-1)
    drawn = torch.where(sampler > 0, sampler, 1.0)
    none = torch.zeros(n, 0)
    micro = MicroBatch(
        sequences=PackedSequences(*torch.zeros(2, n, dtype=torch.int64), torch.arange(n + 1), 1),
        rows=torch.arange(n), bounds=torch.arange(n + 1),
        response_ids=torch.arange(n), weights=sampler, advantages=advantages, sampler_logprobs=drawn.log(),
        old_logprobs=old, reference_logprobs=reference,
        targets=PositionTargets(torch.arange(n), teacher, none.long(), none),
    )  # fmt: skip
    return micro, logits.expand(n, n), advantages


def off_policy(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [V] with gradient, log-probabilities [V] of an older policy, and an engine's probabilities [V]."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(models.VOCAB, dtype=torch.float64, generator=generator)
    moved, apart = 0.4 * torch.randn(2, models.VOCAB, dtype=torch.float64, generator=generator)
    return logits.requires_grad_(), (logits.detach() + moved).log_softmax(-1), (logits.detach() + apart).softmax(-1)


WIDE = {"clip_low": 1e6, "clip_high": 1e6}


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ({"name": "grpo", "policy": WIDE}, "reward"),
        ({"name": "gspo", "policy": WIDE}, "reward"),
        ({"name": "grpo", "policy": {"surrogate": "cispo", "clip_high": 1e6}}, "reward"),
        ({"name": "on_policy_distill", "loss": {"name": "sampled_reverse_kl"}}, "teacher"),
        *(
            ({"name": "grpo", "kl": {"coef": 0.3, "estimator": k}, "policy": WIDE}, "penalty")
            for k in ("k1", "k2", "k3")
        ),
    ],
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_off_policy_the_gradient_is_on_average_the_one_on_policy(how: dict[str, Any], kind: str, level: str) -> None:
    """Summed over all that an engine could have sampled, after an update since, it is that of what is to be learned."""
    logits, old, sampler = off_policy()
    micro, rows, advantages = every_token(sampler, logits, old)
    algorithm = Algorithm.model_validate({**how, "importance_sampling": {"level": level, "cap": 1e6}})
    total, _ = objective(micro, algorithm, Rollout(n=2), chunk=7)(rows, lambda x: x)
    gradient = torch.autograd.grad(total, logits, retain_graph=True)[0]
    log_q = logits.log_softmax(-1)
    assert micro.reference_logprobs is not None and micro.targets is not None
    if kind == "teacher":
        exact = (log_q.exp() * (log_q - micro.targets.teacher_token_logprobs)).sum()
    else:
        exact = -(log_q.exp() * advantages).sum()
    if kind == "penalty":
        exact = exact + 0.3 * (log_q.exp() * (log_q - micro.reference_logprobs)).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(exact, logits)[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 0.7), (0.8, 0.9), (1.3, 0.4), (0.8, 1.0)])
@pytest.mark.parametrize("how", [{"name": "grpo"}, {"name": "grpo", "kl": {"coef": 0.3}}, {"name": "gspo"}])
def test_from_a_nucleus_the_gradient_is_that_of_the_nucleus(
    how: dict[str, Any], temperature: float, top_p: float
) -> None:
    """What is sampled from is the policy: its probabilities are those of the nucleus, normalised over it."""
    logits, _, _ = off_policy()
    held, nucleus = 0.0, []
    likely = (logits.detach() / temperature).softmax(-1).tolist()
    for token in sorted(range(len(likely)), key=lambda v: -likely[v]):
        if held < top_p:
            nucleus.append(token)
        held += likely[token]
    inside = torch.full_like(logits.detach(), -torch.inf)
    inside[nucleus] = 0.0
    log_q = (logits / temperature + inside).log_softmax(-1)
    micro, rows, advantages = every_token(log_q.detach().exp(), logits, None)
    rollout = Rollout(n=2, temperature=temperature, top_p=top_p)
    total, measured = objective(micro, Algorithm.model_validate(how), rollout, chunk=7)(rows, lambda x: x)
    gradient = torch.autograd.grad(total, logits, retain_graph=True)[0]
    own = log_q[nucleus]
    exact = -(own.exp() * advantages[nucleus]).sum()
    if "kl" in how:
        assert micro.reference_logprobs is not None
        exact = exact + 0.3 * (own.exp() * (own - micro.reference_logprobs[nucleus])).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(exact, logits)[0], rtol=1e-9, atol=1e-12)
    assert measured.sums["mismatch/kl"][nucleus].abs().max() < 1e-12
    # Log-probabilities that are kept for later updates are of the nucleus as well.
    config = load({"rollout": {"n": 2, "temperature": temperature, "top_p": top_p}})
    kept = logprobs(micro, config)(rows, lambda x: x)
    torch.testing.assert_close(kept[nucleus], own)
