"""How the sampler of transformers' models draws tokens."""

from __future__ import annotations

import pytest
import torch

from gkd.errors import RunFailed
from gkd.inference.hf import _Draw
from gkd.types import Sampling

ROWS, STEPS, VOCABULARY = 7, 5, 300


def test_every_row_draws_what_a_multinomial_with_its_own_generator_draws() -> None:
    seeds = list(range(100, 100 + ROWS))
    draw = _Draw(Sampling(STEPS, temperature=0.7), seeds, 0, 0)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for step in range(STEPS):
        scores = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(step))
        chosen = draw(torch.zeros(ROWS, step, dtype=torch.int64), scores.clone()).argmax(-1)
        rows = (scores / 0.7).log_softmax(-1).exp()
        wanted = [torch.multinomial(row, 1, generator=g) for row, g in zip(rows, generators, strict=True)]
        assert torch.equal(chosen, torch.cat(wanted))


def test_logits_that_are_not_finite_end_the_run() -> None:
    scores = torch.zeros(ROWS, VOCABULARY)
    scores[3, 5] = torch.nan
    draw = _Draw(Sampling(STEPS), list(range(ROWS)), 0, 0)
    with pytest.raises(RunFailed, match="not finite"):
        draw(torch.zeros(ROWS, 0, dtype=torch.int64), scores)
