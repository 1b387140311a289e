"""How the sampler of transformers' models draws tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gkd.config import Config, load
from gkd.data.model_info import ModelInfo
from gkd.errors import ConfigError, RunFailed
from gkd.inference.engine import EngineSpec
from gkd.inference.hf import HFSampler, _Draw, _Stops
from gkd.types import Sampling
from tests.data.models import save_model

ROWS, STEPS, VOCABULARY = 7, 5, 300


def test_every_row_draws_what_a_multinomial_with_its_own_generator_draws() -> None:
    seeds = list(range(100, 100 + ROWS))
    draw = _Draw(Sampling(STEPS, temperature=0.7), seeds, 0, 0)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for step in range(STEPS):
        scores = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(step))
        chosen = draw(torch.zeros(ROWS, step, dtype=torch.int64), scores.clone()).argmax(-1)
        rows = (scores / 0.7).log_softmax(-1).exp()
        expected = [torch.multinomial(row, 1, generator=g) for row, g in zip(rows, generators, strict=True)]
        assert torch.equal(chosen, torch.cat(expected))


def test_a_token_that_the_response_has_already_is_penalised_by_the_penalty_once() -> None:
    """Tokens of the prompt are not (vLLM's presence_penalty)."""
    draw = _Draw(Sampling(STEPS, temperature=0.0, presence_penalty=0.5), [0, 1], 0, 2)
    scores = torch.tensor([[1.0, 1.4, 0.0, 0.0], [1.0, 1.6, 0.0, 0.0]])
    ids = torch.tensor([[0, 3, 1, 1], [0, 3, 1, 2]])  # of which two are the prompt's
    assert draw.choose(ids, scores.clone())[:, 0].tolist() == [0, 1]
    penalised = scores - torch.tensor([[0.0, 0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0]])
    assert torch.equal(draw.logprobs[0], penalised.log_softmax(-1).gather(-1, torch.tensor([[0], [1]]))[:, 0])


class Letters:
    """A tokenizer: token 0 is a, 1 is b and so on."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens  # which end a response as other texts do
        return "".join(chr(ord("a") + token) for token in ids)


def test_a_response_ends_with_the_token_that_completes_a_text_to_stop_at() -> None:
    stops = _Stops(Letters(), ["bc", "x"], n_prompt=2)
    ids = torch.tensor([[1, 2, 0, 1, 2, 3], [1, 2, 3, 3, 3, 23], [1, 2, 3, 3, 3, 3]])  # "bc" in the prompts is nothing
    done = [stops(ids[:, :length], None).tolist() for length in range(2, 7)]
    assert done == [[False] * 3] * 3 + [[True, False, False], [True, True, False]]
    assert stops.ends == {0: 3, 1: 4}


def test_texts_that_end_answers_of_one_set_are_known_to_the_engine() -> None:
    sets = {"data": {"val_sets": {"hard": {"files": ["x"], "stop": ["b", "a"]}}}}
    config = load({"rollout": {"engine": "hf", "stop": ["a"]}, **sets})
    assert EngineSpec.for_rollout(config, "", ModelInfo(1, 1, [], 1), 1, 0, "cpu").stops == ("a", "b")


def test_logits_that_are_not_finite_end_the_run() -> None:
    scores = torch.zeros(ROWS, VOCABULARY)
    scores[3, 5] = torch.nan
    draw = _Draw(Sampling(STEPS), list(range(ROWS)), 0, 0)
    with pytest.raises(RunFailed, match="not finite"):
        draw(torch.zeros(ROWS, 0, dtype=torch.int64), scores)


def test_weights_that_are_not_all_there_are_not_sampled_from(tmp_path: Path) -> None:
    file = save_model(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    name = sorted(name for name in tensors if "mlp" in name)[0]
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match="mlp"):
        HFSampler(EngineSpec.for_rollout(Config(), str(tmp_path), ModelInfo(1, 1, [], 1), 1, 0, "cpu"))
