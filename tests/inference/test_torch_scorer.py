"""The torch engine's scores are transformers', and do not depend on what is scored beside them."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gkd.config import Reference, Scorer, Teacher
from gkd.data.model_info import ModelInfo
from gkd.errors import ConfigError, RunFailed
from gkd.inference.engine import EngineSpec
from gkd.inference.requests import GenerateRequest, Limits, RequestRejected, ScoreRequest
from gkd.inference.torch_scorer import TorchScorer
from gkd.modeling import attention
from gkd.modeling.backbone import is_packed
from gkd.modeling.linear import PackedLinear
from gkd.scoring.worker import ScorerSpec, ScoringWorker
from gkd.types import Int32, Target
from tests.actor.test_families import PADDED
from tests.families import EOS, N_TOKENS, SHAPE, make
from tests.scoring.conftest import Connect, Serve
from tests.scoring.table import FULL_VOCABULARY, KEY
from tests.vllm.inference.test_scoring import a_request, check, check_tails

# Packed and padded, tied and scaled heads, experts, windows, learned positions, states.
KINDS = ("qwen2 tied", "mistral", "gpt2", "gemma2", "gpt_oss", "qwen3_moe", "granite", "deepseek_v3", "falcon_h1")
INFO = ModelInfo(SHAPE["vocab_size"], SHAPE["max_position_embeddings"], [EOS], N_TOKENS)


def spec_of(path: Path, **settings: Any) -> EngineSpec:
    return EngineSpec("teacher", str(path), INFO, Teacher(engine="torch", **settings), "cpu", "float32")


def run(engine: TorchScorer, requests: list[Any]) -> list[Any]:
    for key, request in enumerate(requests):
        engine.limits.check(request)
        engine.add(key, request)
    results: dict[int, Any] = {}
    while engine.has_unfinished_requests():
        results |= dict(engine.step())
    return [results[key] for key in range(len(requests))]


def mixed() -> list[ScoreRequest]:
    """Requests of every kind and of many lengths."""
    kinds = [(3, 1.0, None), (FULL_VOCABULARY, 0.7, None), (0, 1.0, None), (8, 2.5, 90), (90, 1.0, 90), (5, 0.7, 200)]
    single = [a_request(1 + 3 * i, 20 + 2 * i, k, t, v, i) for i, (k, t, v) in enumerate(itertools.chain(kinds, kinds))]
    several = replace(a_request(8, 40, 4, seed=99), spans=((8, 20), (26, 27), (31, 48)))
    return [*single, several, a_request(127, 1, 4, seed=100), a_request(1, 127, 4, seed=101), a_request(1, 1, 4)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path, model = tmp_path_factory.mktemp("llama"), make("llama", 0)
    model.save_pretrained(path)
    return path, model


@pytest.fixture(scope="module")
def engine(llama: tuple[Path, Any]) -> TorchScorer:
    return TorchScorer(spec_of(llama[0]))


@pytest.mark.parametrize("family", KINDS)
def test_scores_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Whatever the family does, requests of every kind in as few passes as go together."""
    model = make(family, 0)
    model.save_pretrained(tmp_path)
    engine, requests = TorchScorer(spec_of(tmp_path)), mixed()
    for request, target in zip(requests, run(engine, requests), strict=True):
        check(request, target, model)
    assert engine.forward_passes < len(requests)
    assert is_packed(engine.model) == (family not in PADDED)


def test_tails_are_those_of_the_whole_row_however_small(engine: TorchScorer) -> None:
    check_tails(lambda requests: run(engine, requests), make("llama", 0))


def same(a: Target, b: Target) -> bool:
    tails = [np.zeros(0) if t.tail_logprobs is None else t.tail_logprobs for t in (a, b)]
    pairs = [(a.token_logprobs, b.token_logprobs), (a.ids, b.ids), (a.logprobs, b.logprobs), (tails[0], tails[1])]
    return all(np.array_equal(*pair) for pair in pairs)


def test_a_sequence_scores_the_same_bits_whatever_is_scored_beside_it(llama: tuple[Path, Any]) -> None:
    """What comes first differs from run to run, and runs repeat all the same."""
    engine, requests = TorchScorer(spec_of(llama[0])), mixed()
    assert any(isinstance(module, PackedLinear) for module in engine.model.modules())
    alone = [run(engine, [request])[0] for request in requests]
    together = run(engine, requests)
    again = run(engine, requests[::-1])[::-1]
    assert all(same(a, b) and same(a, c) for a, b, c in zip(alone, together, again, strict=True))


def of_a_prompt(n: int, n_prompt: int) -> list[ScoreRequest]:
    """Responses of 10 to 12 tokens to one prompt, the last by spans with some between that are not scored."""
    prompt = a_request(n_prompt, 0, 4, seed=7).token_ids
    responses = [a_request(0, 10 + i % 3, 4, seed=i).token_ids for i in range(n)]
    requests = [
        ScoreRequest(np.concatenate([prompt, ids]), ((n_prompt, n_prompt + len(ids)),), 4 + i % 2)
        for i, ids in enumerate(responses)
    ]
    return [*requests[:-1], replace(requests[-1], spans=((n_prompt, n_prompt + 3), (n_prompt + 5, n_prompt + 9)))]


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "qwen3_moe"])
def test_a_prompt_is_computed_once_for_its_samples_which_score_the_same_bits(family: str, tmp_path: Path) -> None:
    model = make(family, 0)
    model.save_pretrained(tmp_path)
    engine, n_computed = TorchScorer(spec_of(tmp_path)), list[int]()
    engine.model.get_input_embeddings().register_forward_hook(lambda _, args, __: n_computed.append(args[0].numel()))
    requests = [*of_a_prompt(4, n_prompt=20), a_request(20, 11, 4, seed=3)]
    alone = [run(engine, [request])[0] for request in requests]
    n_computed.clear()
    together = run(engine, requests)
    n_tokens = sum(len(request.token_ids) for request in requests)
    assert n_computed == [n_tokens - 3 * 20]
    assert all(map(same, alone, together)) or family == "qwen3_moe"  # of experts, rows are added in another order
    for request, target in zip(requests, together, strict=True):
        check(request, target, model)


def test_every_sample_has_a_prompt_of_its_own_where_the_kernel_would_not_find_it(
    llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "can_share_beginnings", lambda device: device != "cpu")
    engine, requests, n_computed = TorchScorer(spec_of(llama[0])), of_a_prompt(4, n_prompt=20), list[int]()
    engine.model.get_input_embeddings().register_forward_hook(lambda _, args, __: n_computed.append(args[0].numel()))
    run(engine, requests)
    assert n_computed == [sum(len(request.token_ids) for request in requests)]


def test_more_samples_of_a_prompt_fit_into_a_pass(llama: tuple[Path, Any]) -> None:
    """Of which the prompt counts once, and twice as many keys as tokens are enough."""
    engine = TorchScorer(replace(spec_of(llama[0]), max_num_batched_tokens=100))
    targets = run(engine, of_a_prompt(8, n_prompt=20))
    assert engine.forward_passes == 2  # of 6 and 2, for 6 times 32 are 192
    assert all(map(same, targets, run(TorchScorer(spec_of(llama[0])), of_a_prompt(8, n_prompt=20))))


def test_a_pass_has_a_bound_and_one_longer_sequence_still_runs(llama: tuple[Path, Any]) -> None:
    requests = [a_request(2, 30, 4, seed=i) for i in range(8)]
    engine = TorchScorer(replace(spec_of(llama[0]), max_num_batched_tokens=64))
    targets = run(engine, requests)
    assert engine.forward_passes == 4
    assert all(map(same, targets, run(TorchScorer(spec_of(llama[0])), requests)))
    assert len(run(engine, [a_request(2, 100, 4)])) == 1


def test_answers_of_a_pass_come_while_the_next_is_under_way(llama: tuple[Path, Any]) -> None:
    """As on a GPU: the last one is not forgotten."""
    engine, requests = TorchScorer(replace(spec_of(llama[0]), max_num_batched_tokens=64)), mixed()
    expected = run(engine, requests)
    engine._overlaps = True
    for key, request in enumerate(requests):
        engine.add(key, request)
    assert not list(engine.step()) and engine.has_unfinished_requests()
    results: dict[int, Any] = {}
    while engine.has_unfinished_requests():
        results |= dict(engine.step())
    assert all(same(results[key], expected[key]) for key in range(len(requests)))


def greedy(model: Any, prompt: Int32, n: int) -> list[int]:
    ids = prompt.tolist()
    with torch.no_grad():
        for _ in range(n):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == EOS:
                break
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt2"])
def test_prompts_are_continued_greedily(family: str, tmp_path: Path) -> None:
    """Beside requests to score, up to end tokens or each one's own limit; scores after it are as before."""
    model = make(family, 0)
    model.save_pretrained(tmp_path)
    engine = TorchScorer(spec_of(tmp_path))
    prompts = [GenerateRequest(a_request(2 + i, 1, 0, seed=100 + i).token_ids, 3 + 5 * (i % 3)) for i in range(9)]
    scores = mixed()[:3]
    results = run(engine, [*prompts, *scores])
    longest = 0
    for prompt, answer in zip(prompts, results, strict=False):
        assert answer.tolist() == greedy(model, prompt.prompt_ids, prompt.max_tokens)
        longest = max(longest, len(answer))
    assert engine.forward_passes > longest  # each token's own, by which others see that it gets on
    for request, target in zip(scores, results[len(prompts) :], strict=True):
        check(request, target, model)


def test_prompts_that_fit_one_by_one_are_not_continued_past_the_positions_together(tmp_path: Path) -> None:
    """A long prompt with few tokens to come beside a short one with many: learned positions end at 128."""
    model = make("gpt2", 0)
    model.save_pretrained(tmp_path)
    prompts = [GenerateRequest(a_request(n, 1, 0, seed=n).token_ids[:n], 128 - n) for n in (100, 8, 101, 9)]
    for prompt, answer in zip(prompts, run(TorchScorer(spec_of(tmp_path)), prompts), strict=True):
        assert answer.tolist() == greedy(model, prompt.prompt_ids, prompt.max_tokens)


def test_a_client_is_served(engine: TorchScorer, llama: tuple[Path, Any], serve: Serve, connect: Connect) -> None:
    client = connect(serve(engine).server.address, top_k=FULL_VOCABULARY, max_length=128)
    for request, future in [(r, client.submit(r)) for r in mixed() * 4]:
        check(request, future.result(30), llama[1])


@pytest.mark.parametrize("settings", [Teacher, Reference])
@pytest.mark.parametrize("name", ["teacher", "teacher:math", "reference"])
def test_errors_name_the_model_and_its_section(
    name: str, settings: type[Scorer], llama: tuple[Path, Any], tmp_path: Path
) -> None:
    section, at = name.partition(":")[0], str(llama[0])
    long = EngineSpec(name, at, INFO, settings(max_model_len=500), "cpu", "float32")
    with pytest.raises(ConfigError, match=rf"^{section}\.max_model_len=500: .*\b{name}\b.*\b128 positions"):
        TorchScorer(long)
    with pytest.raises(RunFailed, match=rf"\b{name}\b.*{tmp_path}"):
        TorchScorer(replace(long, settings=settings(), model_path=str(tmp_path)))
    with pytest.raises(RequestRejected, match=rf"\({section}\.max_top_k\)"):
        Limits(name, at, INFO.vocabulary, 4, 100, 1).check(a_request(4, 4, 5))
    setting = {"teacher:math": r"teacher\.models\.math"}.get(name, rf"{name}\.model\.path")
    with pytest.raises(ConfigError, match=rf"^{setting}={tmp_path}\b"):
        ScoringWorker(settings(), ScorerSpec(name, "float32", str(tmp_path), "cpu", "hash", "127.0.0.1", KEY))


def test_a_model_that_cannot_score_is_refused(llama: tuple[Path, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    llama[1].save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight \(1 tensors"):
        TorchScorer(spec_of(tmp_path))
    with pytest.raises(ValueError, match=r"engine=torch .*tensor_parallel_size=2"):
        Teacher(engine="torch", tensor_parallel_size=2, n_gpus_per_node=2)


def test_rows_of_a_pass_have_a_bound_padding_included(tmp_path: Path) -> None:
    """Where a model takes padded rows, one long sequence makes all beside it as long."""
    make("gemma2", 0).save_pretrained(tmp_path)
    engine = TorchScorer(replace(spec_of(tmp_path), max_num_batched_tokens=120))
    engine.device = "cuda"  # which joins sequences of any lengths
    for key, length in enumerate((90, 10, 10, 10, 10)):
        engine.add(key, a_request(length - 2, 2, 4, seed=key))
    passes = []
    while engine.has_unfinished_requests():
        passes.append([len(request.token_ids) for _, request in engine._take_scores()])
    assert passes == [[90], [10, 10, 10, 10]]


def test_rows_on_a_cpu_are_as_long_as_attention_pads_them(tmp_path: Path) -> None:
    """Three of 33 tokens are 192 positions, not 99."""
    make("gemma2", 0).save_pretrained(tmp_path)
    engine = TorchScorer(replace(spec_of(tmp_path), max_num_batched_tokens=130))
    for key in range(3):
        engine.add(key, a_request(31, 2, 4, seed=key))
    assert [[key for key, _ in engine._take_scores()] for _ in range(2)] == [[0, 1], [2]]


def a_scorer(*waiting: ScoreRequest | GenerateRequest) -> Any:
    """One without a model, for which these wait."""
    scorer: Any = object.__new__(TorchScorer)
    scorer.device, scorer._takes_rows, scorer._shares_prompts, scorer._n_tokens = "cpu", False, True, 1000
    scorer.limits = Limits("teacher", "", 200, 8, 128, 64)
    scorer._waiting = deque(enumerate(waiting))
    return scorer


def test_what_waits_for_the_next_pass_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step: thousands may wait, with long prompts."""
    scorer, described = a_scorer(*of_a_prompt(8, n_prompt=20), *of_a_prompt(50, n_prompt=21)), list[ScoreRequest]()
    scorer._n_tokens, describe = 100, TorchScorer._describe
    monkeypatch.setattr(TorchScorer, "_describe", lambda self, its: described.append(its) or describe(self, its))
    assert [key for key, _ in scorer._take_scores()] == list(range(6))
    assert len(described) < 20


def test_on_a_cpu_those_share_a_pass_that_attention_pads_alike() -> None:
    """Or numbers would depend on what is scored beside them, in the last bit."""
    scorer = a_scorer(*(a_request(1, length - 1, 4) for length in (10, 40, 20, 32, 64)))
    assert [[key for key, _ in scorer._take_scores()] for _ in range(3)] == [[0, 2, 3], [1, 4], []]


def test_prompts_are_continued_together_once_one_has_waited_longest_and_no_score_is_lost() -> None:
    """However much of others' is to be scored all the time."""
    prompt = GenerateRequest(np.array([1, 2], np.int32), 4)
    early, late, later = (a_request(1, length, 4) for length in (9, 39, 79))  # none of which share a pass
    scorer = a_scorer(early, late, prompt, later, prompt)
    assert [key for key, _ in scorer._take_scores()] == [0]
    assert scorer._take_prompts() == [] and len(scorer._waiting) == 4
    assert [key for key, _ in scorer._take_scores()] == [1]
    assert scorer._take_prompts() == [(2, prompt), (4, prompt)]
    assert list(scorer._waiting) == [(3, later)]


def test_ids_that_a_request_leaves_out_are_no_tokens_of_it() -> None:
    """Of a student with fewer rows than the scorer."""
    limits, ids = Limits("teacher", "", 200, 8, 128, 64), np.array([1, 150, 2], np.int32)
    limits.check(ScoreRequest(ids, ((1, 3),), 4))
    limits.check(ScoreRequest(ids, ((1, 3),), 4, vocabulary=151))
    with pytest.raises(RequestRejected, match=r"token 150 .*\b150\b"):
        limits.check(ScoreRequest(ids, ((1, 3),), 4, vocabulary=150))


def test_a_models_own_settings_of_sampling_change_no_continuation(tmp_path: Path) -> None:
    make("llama", seed=0).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.5}')
    engine = TorchScorer(spec_of(tmp_path))
    assert engine.model.generation_config.repetition_penalty in (None, 1.0)


@pytest.mark.parametrize("family", ["falcon", "doge"])
def test_samples_of_a_prompt_are_whole_where_a_model_takes_them_padded(family: str, tmp_path: Path) -> None:
    model = make(family, 0)
    model.save_pretrained(tmp_path)
    engine, requests = TorchScorer(spec_of(tmp_path)), of_a_prompt(4, n_prompt=20)
    assert not is_packed(engine.model)
    for request, target in zip(requests, run(engine, requests), strict=True):
        check(request, target, model)
    assert engine.forward_passes == 1


def test_the_longest_of_a_pass_is_any_of_it() -> None:
    """And not the latest: all rows are as long."""
    scorer = a_scorer(*(a_request(1, length - 1, 4) for length in (40, 10, 10, 10)))
    scorer.device, scorer._takes_rows, scorer._n_tokens = "cuda", True, 120
    assert [[key for key, _ in scorer._take_scores()] for _ in range(2)] == [[0, 1, 2], [3]]


def test_linear_layers_are_left_where_others_compute_with_their_weights(tmp_path: Path) -> None:
    """As Mamba's do: each of a packed one's is a copy."""
    make("mamba", 0).save_pretrained(tmp_path)
    engine = TorchScorer(spec_of(tmp_path))
    assert not any(isinstance(module, PackedLinear) for module in engine.model.modules())
