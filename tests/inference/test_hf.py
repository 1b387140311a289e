"""How the sampler of transformers' models draws tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gkd.config import Config, load
from gkd.data.model_info import ModelInfo
from gkd.errors import ConfigError, RunFailed
from gkd.inference.engine import EngineSpec
from gkd.inference.hf import HFSampler, _Draw, _Stops
from gkd.types import Prompt, SampleRequest, Sampling
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


def test_rows_without_a_token_are_neither_drawn_nor_counted() -> None:
    draw = _Draw(Sampling(STEPS, temperature=0.0), [0], 3, 0)
    scores = torch.tensor([[0.0, 1.0, 2.0, 9.0]])
    assert draw.choose(torch.zeros(1, 0, dtype=torch.int64), scores.clone()).tolist() == [[2]]
    assert torch.equal(draw.logprobs[0], scores[:, :3].log_softmax(-1)[:, 2])


def test_what_is_left_out_follows_from_the_probabilities_at_the_temperature() -> None:
    """Of 0.4 and twice 0.3 a nucleus of 0.45 has two; at temperature 0.5 of 0.47 and twice 0.26 it has one."""
    draw = _Draw(Sampling(STEPS, temperature=0.5, top_p=0.45), list(range(ROWS)), 0, 0)
    scores = torch.tensor([[0.4, 0.3, 0.3]]).log().repeat(ROWS, 1)
    assert draw.choose(torch.zeros(ROWS, 0, dtype=torch.int64), scores).tolist() == [[0]] * ROWS
    assert draw.logprobs[0].tolist() == [0.0] * ROWS


def a_request(index: int, sampling: Sampling, n_prompt: int = 3) -> SampleRequest:
    return SampleRequest(Prompt(index, np.arange(n_prompt, dtype=np.int32), ""), 0, 0, sampling)


def test_requests_that_are_sampled_alike_go_together_as_many_as_there_are_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of a validation go apart from those that are learned from."""
    sampler: Any = object.__new__(HFSampler)
    sampler.max_batch = 2
    monkeypatch.setattr(sampler, "_generate", lambda chosen, sampling: [(key, sampling) for key, _ in chosen])
    warm, greedy = Sampling(STEPS), Sampling(STEPS, temperature=0.0)
    sampler.waiting = [(key, a_request(key, how)) for key, how in enumerate((warm, greedy, warm, warm, greedy))]
    steps = [sampler.step() for _ in range(4)]
    assert steps == [[(0, warm), (2, warm)], [(1, greedy), (4, greedy)], [(3, warm)], []]


@pytest.mark.parametrize(
    ("end", "stopped", "length", "reason"),
    [(-1, None, 6, "length"), (2, None, 3, "stop"), (-1, 4, 4, "stop"), (4, 2, 2, "stop"), (1, 4, 2, "stop")],
)
def test_a_response_ends_at_whichever_comes_first(end: int, stopped: int | None, length: int, reason: str) -> None:
    sampler: Any = object.__new__(HFSampler)
    sampler.version = 7
    tokens, logprobs = np.arange(6, dtype=np.int32), np.zeros(6, np.float32)
    sample = sampler._finish(a_request(0, Sampling(6)), tokens, logprobs, end, stopped)
    assert (sample.sampled_ids.tolist(), sample.finish_reason) == (list(range(length)), reason)
    assert sample.versions == ((3, 3 + length, 7),)


def test_prompt_and_response_are_within_the_models_positions() -> None:
    sampler: Any = object.__new__(HFSampler)
    sampler.info, sampler.waiting = SimpleNamespace(positions=10), []
    sampler.add(0, a_request(0, Sampling(7)))
    with pytest.raises(ValueError, match=r"\b11 tokens .*\b10 positions"):
        sampler.add(1, a_request(1, Sampling(8)))
    assert [key for key, _ in sampler.waiting] == [0]


def test_a_models_own_settings_of_sampling_are_left_out(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.5}')
    sampler = HFSampler(EngineSpec.for_rollout(Config(), str(tmp_path), ModelInfo(1, 1, [], 1), 1, 0, "cpu"))
    assert sampler.model.generation_config.repetition_penalty in (None, 1.0)
