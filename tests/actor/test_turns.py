"""Trajectories of several turns: scored and learned from is what the student wrote, wherever it stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gkd.actor.collate import collate
from gkd.actor.loading import load
from gkd.config import Algorithm, Rollout, Teacher
from gkd.data.model_info import ModelInfo
from gkd.inference.engine import EngineSpec
from gkd.inference.requests import ScoreRequest
from gkd.inference.torch_scorer import TorchScorer
from gkd.losses.objective import objective
from gkd.types import Prompt, Sample, SampleRequest, Sampling, ScoredSample, Spans, Target, VersionSpan
from tests.actor.models import SHAPE, VOCAB, make

TURNS: tuple[Spans, ...] = (((3, 9),), ((5, 11), (14, 15), (20, 31)), ((4, 5),))
"""Where the student wrote: in one turn, in three with something of others after the first two, one token."""


def trajectory(rng: np.random.Generator, spans: Spans) -> Sample:
    """Return random tokens, of which the student wrote those in ``spans``, by weights of a version each."""
    ids = rng.integers(2, VOCAB, spans[-1][1]).astype(np.int32)
    sampled = np.zeros(len(ids), np.bool_)
    for start, stop in spans:
        sampled[start:stop] = True
    logprobs = np.where(sampled, -rng.random(len(ids)), np.nan).astype(np.float32)
    request = SampleRequest(Prompt(0, ids[: spans[0][0]], ""), 0, 0, Sampling(len(ids)))
    versions = tuple(VersionSpan(*span, version) for version, span in enumerate(spans))
    return Sample(request, ids, sampled, logprobs, versions, "stop")


@pytest.mark.parametrize("versions", [(), (VersionSpan(5, 31, 0),), (VersionSpan(5, 11, 0),)])
def test_versions_are_of_all_that_the_student_wrote_and_of_nothing_else(versions: tuple[VersionSpan, ...]) -> None:
    """Staleness is that of every sampled token: an engine of one's own is answered where the sample is made."""
    sample = trajectory(np.random.default_rng(0), TURNS[1])
    with pytest.raises(ValueError, match="versions"):
        dataclasses.replace(sample, versions=versions)


def score(path: Path, samples: Sequence[Sample], k: int) -> list[Target]:
    """Return the top ``k`` of the model in ``path`` at the positions that the student wrote, from the torch engine."""
    info = ModelInfo(VOCAB, SHAPE["max_position_embeddings"], [SHAPE["eos_token_id"]], VOCAB)
    engine = TorchScorer(EngineSpec("teacher", str(path), info, Teacher(engine="torch"), "cpu", "float32"))
    for key, sample in enumerate(samples):
        request = ScoreRequest(sample.token_ids, spans=sample.spans, top_k=k)
        engine.limits.check(request)
        engine.add(key, request)
    targets: dict[int, Any] = {}
    while engine.has_unfinished_requests():
        targets |= dict(engine.step())
    return [targets[key] for key in range(len(samples))]


def log_probs(model: Any, sample: Sample) -> torch.Tensor:
    """Return the plain model's log-probabilities [N, V] of the next token before each one that the student wrote."""
    logits = model(torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0]
    return logits.log_softmax(-1)[np.flatnonzero(sample.sampled) - 1]


def require_equal_gradients(lm: torch.nn.Module, plain: torch.nn.Module) -> None:
    gradients = {name: p.grad for name, p in lm.named_parameters()}
    for name, parameter in plain.named_parameters():
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-4 * largest, msg=name)


@pytest.mark.parametrize("k", [VOCAB, 6])
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # packed, and padded
def test_the_gradient_of_a_scored_trajectory_of_three_turns_is_that_of_the_plain_models(
    family: str, k: int, tmp_path: Path
) -> None:
    """Reverse KL to a teacher: through the engine and the actor, and by autograd from both models' own logits."""
    rng = np.random.default_rng(0)
    samples = [trajectory(rng, spans) for spans in TURNS]
    n = sum(int(sample.sampled.sum()) for sample in samples)
    plain, teacher = make(family), make(family, seed=1)
    plain.save_pretrained(tmp_path / "student")
    teacher.save_pretrained(tmp_path / "teacher")

    expected = torch.zeros(())
    for sample in samples:
        assert sample.spans in TURNS
        log_q = log_probs(plain, sample)
        with torch.no_grad():
            log_p, ids = log_probs(teacher, sample).sort(-1, descending=True)
        log_q = log_q.gather(-1, ids)
        expected = expected + (log_q[:, :k].exp() * (log_q - log_p)[:, :k]).sum() / n
        if k < VOCAB:
            rest_q, rest_p = log_q[:, k:].logsumexp(-1), log_p[:, k:].logsumexp(-1)
            expected = expected + (rest_q.exp() * (rest_q - rest_p)).sum() / n
    expected.backward()

    targets = score(tmp_path / "teacher", samples, k)
    student = load(tmp_path / "student")
    scored = [ScoredSample(sample, target) for sample, target in zip(samples, targets, strict=True)]
    micro = collate(scored, VOCAB, [1 / n] * len(scored), [0.0] * len(scored))
    total, _ = student(micro, objective(micro, Algorithm(), Rollout(), 7))
    total.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-4)
    require_equal_gradients(student.lm, plain)


@pytest.mark.parametrize("ratio", ["token", "sequence"])  # GRPO's, and GSPO's: one of all that the student wrote
def test_the_policy_gradient_of_three_turns_is_that_of_the_plain_models(ratio: str, tmp_path: Path) -> None:
    """PPO's clipped surrogate in a second update of a batch, by autograd from the model's own logits."""
    rng, clip = np.random.default_rng(0), 0.02
    samples, advantages = [trajectory(rng, spans) for spans in TURNS], [0.7, -1.3, 0.4]
    n = sum(int(sample.sampled.sum()) for sample in samples)
    plain = make("llama")
    plain.save_pretrained(tmp_path / "student")

    old, expected, n_clipped = [], torch.zeros(()), 0
    for sample, advantage in zip(samples, advantages, strict=True):
        ids = torch.from_numpy(sample.sampled_ids.astype(np.int64))
        log_q = log_probs(plain, sample).gather(-1, ids[:, None])[:, 0]
        before = log_q.detach() + torch.from_numpy(rng.normal(0.02, 0.05, len(ids))).float()
        change = log_q - before
        r = (change if ratio == "token" else change.mean().expand(len(ids))).exp()
        surrogate = torch.minimum(r * advantage, r.clamp(1 - clip, 1 + clip) * advantage)
        n_clipped += int((surrogate != r * advantage).sum())
        expected = expected - surrogate.sum() / n
        old.append(before)
    assert 0 < n_clipped < n  # of both kinds
    expected.backward()

    student = load(tmp_path / "student")
    policy = {"ratio": ratio, "clip_low": clip, "clip_high": clip}
    algorithm = Algorithm(name="grpo", policy=policy, importance_sampling={"level": None})
    micro = collate([ScoredSample(sample) for sample in samples], None, [1 / n] * 3, advantages, old)
    total, _ = student(micro, objective(micro, algorithm, Rollout(), 7))
    total.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-4)
    require_equal_gradients(student.lm, plain)
