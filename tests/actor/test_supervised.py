"""Supervised training against transformers' own loss: the data's answers, their prompts left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gkd.actor.collate import collate
from gkd.actor.loading import load
from gkd.algorithms.aggregation import token_weights
from gkd.config import Algorithm, Rollout
from gkd.losses.objective import objective
from gkd.rollout.dataset_answers import make_dataset_sample
from gkd.types import Prompt, SampleRequest, Sampling, ScoredSample
from tests.actor.models import VOCAB, make

EOS = [1]


def answers() -> list[ScoredSample]:
    """Five prompts of different lengths with answers, the last of which is cut."""
    rng, samples = np.random.default_rng(0), []
    for i, (p, n) in enumerate([(3, 5), (1, 2), (7, 1), (4, 9), (2, 6)]):
        ids = rng.integers(2, VOCAB, n).astype(np.int32)
        ids[-1] = 1 if i < 4 else ids[-1]
        request = SampleRequest(Prompt(i, rng.integers(2, VOCAB, p).astype(np.int32), ""), 0, 0, Sampling(9))
        samples.append(ScoredSample(make_dataset_sample(request, ids, EOS, version=3)))
    return samples


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_loss_and_gradient_are_those_of_transformers_with_labels(aggregation: str, tmp_path: Path) -> None:
    make("qwen2 tied").save_pretrained(tmp_path)
    student, reference = load(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    scored = answers()
    lengths = [len(s.sample.sampled_ids) for s in scored]
    losses = []
    for s in scored:
        ids = torch.from_numpy(s.sample.token_ids.astype(np.int64))[None]
        labels = ids.masked_fill(~torch.from_numpy(s.sample.sampled)[None], -100)
        losses.append(reference(input_ids=ids, labels=labels).loss)
    shares = torch.tensor(lengths) / sum(lengths) if aggregation == "token_mean" else torch.full((5,), 0.2)
    expected = (torch.stack(losses) * shares).sum()
    expected.backward()

    weights = token_weights(lengths, [True] * len(scored), aggregation, 9)
    micro = collate(scored, None, weights, [0.0] * len(scored))
    # Nothing was sampled, so how responses would be drawn has no part in it.
    rollout = Rollout(temperature=0.5, top_k=3, presence_penalty=1.0)
    total, measured = student(micro, objective(micro, Algorithm(name="sft"), rollout, chunk=4))
    total.backward()

    torch.testing.assert_close(total, expected)
    assert measured.losses.keys() == {"actor/loss", "actor/supervised_loss"}
    assert not [name for name in measured.sums if name.startswith("mismatch")] and not measured.largest
    slopes = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in student.lm.named_parameters():
        torch.testing.assert_close(parameter.grad, slopes[name], msg=name)


def test_an_answer_that_was_cut_has_no_end() -> None:
    assert [s.sample.finish_reason for s in answers()] == ["stop"] * 4 + ["length"]
    assert {s.sample.versions[0].version for s in answers()} == {3}
