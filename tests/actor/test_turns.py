"""Trajectories of several turns: what is learned from is what the student wrote, wherever it stands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gkd.actor.collate import collate
from gkd.actor.loading import load
from gkd.config import Algorithm, Rollout
from gkd.losses.objective import objective
from gkd.types import Prompt, Sample, SampleRequest, Sampling, ScoredSample, Spans, Target, VersionSpan
from tests.actor.models import VOCAB, make

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


def target_of(sample: Sample, log_p: np.ndarray, k: int) -> Target:
    """Return the top ``k`` of a teacher with ``log_p`` [N, V] at the positions that the student wrote."""
    ids = np.argsort(-log_p, -1)[:, :k].astype(np.int32)
    rest = np.exp(log_p)
    np.put_along_axis(rest, ids, 0.0, 1)
    tail = np.log(rest.sum(1)).astype(np.float32) if k < VOCAB else None
    own = np.take_along_axis(log_p, sample.token_ids[sample.sampled][:, None].astype(np.int64), 1)[:, 0]
    return Target(own, ids, np.take_along_axis(log_p, ids, 1), tail_logprobs=tail)


@pytest.mark.parametrize("k", [VOCAB, 6])
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # packed, and padded
def test_the_gradient_of_a_trajectory_of_three_turns_is_that_of_the_plain_model(
    family: str, k: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    samples = [trajectory(rng, spans) for spans in TURNS]
    n = sum(int(sample.sampled.sum()) for sample in samples)
    teachers = [rng.normal(size=(int(sample.sampled.sum()), VOCAB)) for sample in samples]
    log_ps = [(z - np.log(np.exp(z).sum(-1, keepdims=True))).astype(np.float32) for z in teachers]
    targets = [target_of(sample, log_p, k) for sample, log_p in zip(samples, log_ps, strict=True)]
    plain = make(family)
    plain.save_pretrained(tmp_path)

    expected = torch.zeros(())
    for sample, target in zip(samples, targets, strict=True):
        assert sample.spans in TURNS
        log_q = plain(torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
        for row, position in enumerate(np.flatnonzero(sample.sampled)):
            q = log_q[position - 1].exp()
            ids, log_p = torch.from_numpy(target.ids[row].astype(np.int64)), torch.from_numpy(target.logprobs[row])
            kl = (q[ids] * (log_q[position - 1, ids] - log_p)).sum()
            if target.tail_logprobs is not None:
                rest = q.sum() - q[ids].sum()
                kl = kl + rest * (rest.log() - float(target.tail_logprobs[row]))
            expected = expected + kl / n
    expected.backward()

    student = load(tmp_path)
    scored = [ScoredSample(sample, target) for sample, target in zip(samples, targets, strict=True)]
    micro = collate(scored, VOCAB, [1 / n] * len(scored), [0.0] * len(scored))
    total, _ = student(micro, objective(micro, Algorithm(), Rollout(), 7))
    total.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-4)
    gradients = {name: p.grad for name, p in student.lm.named_parameters()}
    for name, parameter in plain.named_parameters():
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-4 * largest, msg=name)
