"""vLLM's scores through the server and the client are those of transformers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gkd.actor.collate import collate
from gkd.actor.loading import load as load_student
from gkd.config import Algorithm, Rollout, Teacher
from gkd.data.model_info import ModelInfo
from gkd.errors import ConfigError
from gkd.inference.engine import EngineSpec
from gkd.inference.requests import GenerateRequest, ScoreRequest
from gkd.inference.torch_scorer import TorchScorer
from gkd.inference.vllm_scorer import RESULT_BYTES
from gkd.losses.objective import objective
from gkd.scoring.client import ScoringClient
from gkd.scoring.server import ScoringServer
from gkd.types import Prompt, Sample, SampleRequest, Sampling, ScoredSample, Spans, Target, VersionSpan
from tests.scoring.table import FULL_VOCABULARY, KEY
from tests.vllm.conftest import CHUNK, VLLM_LENGTH, VLLM_VOCABULARY


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Any:
    """The same model in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def teacher(vllm_engine: Any) -> Iterator[ScoringClient]:
    """A client of a server of the session's vLLM engine, which works on this server's thread."""
    server, stop = ScoringServer(vllm_engine, "hash", "127.0.0.1", 0, KEY), threading.Event()
    thread = threading.Thread(target=server.serve, args=(stop,))
    thread.start()
    client = ScoringClient([server.address], "hash", FULL_VOCABULARY, key=KEY, max_length=VLLM_LENGTH)
    client.connect(30)
    yield client
    client.close()
    stop.set()
    thread.join(60)
    assert not thread.is_alive()


def a_request(
    n_prompt: int, n_response: int, top_k: int, temperature: float = 1.0, vocabulary: int | None = None, seed: int = 0
) -> ScoreRequest:
    ids = np.random.default_rng(seed).integers(
        0, min(vocabulary or VLLM_VOCABULARY, VLLM_VOCABULARY), n_prompt + n_response
    )
    ids = ids.astype(np.int32)
    return ScoreRequest(ids, ((n_prompt, len(ids)),), top_k, temperature, vocabulary)


def check(request: ScoreRequest, target: Target, reference: Any) -> None:
    """The target is log_softmax(logits / T) of the reference at the requested positions, to 1e-4."""
    positions = np.concatenate([np.arange(start, stop) for start, stop in request.spans])
    tokens = torch.tensor(request.token_ids.astype(np.int64))
    with torch.no_grad():
        logits = reference(tokens[None]).logits[0, positions - 1, : request.vocabulary]
    logprobs = torch.log_softmax(logits / request.temperature, -1).numpy()
    rows = np.arange(len(positions))
    k = min(request.top_k, logprobs.shape[1])
    assert target.ids.shape == target.logprobs.shape == (len(rows), k) and target.temperature == request.temperature
    np.testing.assert_allclose(target.token_logprobs, logprobs[rows, request.token_ids[positions]], atol=1e-4)
    np.testing.assert_allclose(target.logprobs, np.take_along_axis(logprobs, target.ids, -1), atol=1e-4)
    np.testing.assert_allclose(target.logprobs, -np.sort(-logprobs, -1)[:, :k], atol=1e-4)
    assert all(len(set(row)) == k for row in target.ids.tolist())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("top_k", [0, 1, 8, VLLM_VOCABULARY, FULL_VOCABULARY])
def test_scores_are_those_of_transformers(
    teacher: ScoringClient, reference: Any, top_k: int, temperature: float
) -> None:
    requests = [a_request(1 + 3 * i, 20 - i, top_k, temperature, seed=i) for i in range(6)]
    for request, future in [(r, teacher.submit(r)) for r in requests]:
        check(request, future.result(30), reference)


def check_tails(score: Callable[[list[ScoreRequest]], list[Target]], reference: Any) -> None:
    """They are sums over the rest of the vocabulary in float64, from 1e-11 to nearly 1."""
    exact, seen = copy.deepcopy(reference).double(), []
    requests = [
        a_request(4, 60, 16, t, vocabulary, i) for t in (0.08, 0.15, 1.0) for i, vocabulary in ((1, None), (2, 90))
    ]
    for request, target in zip(requests, score(requests), strict=True):
        ((start, stop),) = request.spans
        with torch.no_grad():
            logits = exact(torch.tensor(request.token_ids.astype(np.int64))[None]).logits[0, start - 1 : stop - 1]
        logits = logits[:, : request.vocabulary]
        p = torch.softmax(logits / request.temperature, -1).numpy()
        np.put_along_axis(p, target.ids, 0.0, -1)
        # The logits themselves are float32 in one and float64 in the other, and their errors are divided by T.
        np.testing.assert_allclose(np.exp(target.tail_logprobs.astype(float)), p.sum(-1), rtol=1e-3)
        seen += p.sum(-1).tolist()
    assert sum(1e-9 < tail < 1e-6 for tail in seen) > 20
    assert all(target.tail_logprobs is None for target in score([a_request(4, 9, k) for k in (0, FULL_VOCABULARY)]))


def test_tails_are_those_of_the_whole_row_however_small(teacher: ScoringClient, reference: Any) -> None:
    check_tails(lambda requests: [future.result(30) for future in map(teacher.submit, requests)], reference)


@pytest.mark.parametrize(
    ("n_prompt", "n_response"), [(1, VLLM_LENGTH - 1), (CHUNK, CHUNK), (VLLM_LENGTH - 1, 1), (1, CHUNK)]
)
def test_a_sequence_across_prefill_chunks(
    teacher: ScoringClient, reference: Any, n_prompt: int, n_response: int
) -> None:
    """Up to the longest there is, alone and with others that share its chunks."""
    requests = [a_request(n_prompt, n_response, 8, seed=i) for i in range(4)]
    for request, future in [(r, teacher.submit(r)) for r in requests]:
        check(request, future.result(30), reference)


def test_k_temperature_and_vocabulary_may_differ_from_request_to_request(
    teacher: ScoringClient, reference: Any
) -> None:
    requests = [
        a_request(4, 10, k, temperature, vocabulary, seed)
        for seed, (k, temperature, vocabulary) in enumerate(
            [(3, 1.0, None), (FULL_VOCABULARY, 0.7, None), (0, 1.0, None), (8, 2.5, 90), (90, 1.0, 90), (5, 0.7, 200)]
            * 4
        )
    ]
    for request, future in [(r, teacher.submit(r)) for r in requests]:
        check(request, future.result(60), reference)


def test_both_engines_answer_alike(teacher: ScoringClient, tiny_llama: Path) -> None:
    """vLLM's targets are those of the torch engine: ids, log-probabilities, tails, continuations."""
    info = ModelInfo.read(str(tiny_llama), "teacher.model.path")
    engine = TorchScorer(EngineSpec("teacher", str(tiny_llama), info, Teacher(engine="torch"), "cpu", "float32"))
    kinds = [(0, 1.0, None), (1, 0.7, None), (8, 1.0, 90), (FULL_VOCABULARY, 2.0, None)]
    scores = [a_request(3 + 5 * i, 30 + i, *kind, seed=i) for i, kind in enumerate(kinds * 2)]
    requests = [*scores, *(GenerateRequest(score.token_ids[:9], 12) for score in scores)]
    for key, request in enumerate(requests):
        engine.add(key, request)
    own: dict[int, Any] = {}
    while engine.has_unfinished_requests():
        own |= dict(engine.step())
    for key, future in [(key, teacher.submit(request)) for key, request in enumerate(requests)]:
        reply, answer = future.result(30), own[key]
        if not isinstance(reply, Target):
            np.testing.assert_array_equal(reply, answer)
            continue
        assert reply.temperature == answer.temperature
        assert (reply.ids.dtype, reply.ids.shape) == (answer.ids.dtype, answer.ids.shape)
        np.testing.assert_allclose(reply.token_logprobs, answer.token_logprobs, atol=1e-4)
        np.testing.assert_allclose(reply.logprobs, answer.logprobs, atol=1e-4)
        assert (reply.ids != answer.ids).sum() <= 0.01 * reply.ids.size  # near ties
        assert (reply.tail_logprobs is None) == (answer.tail_logprobs is None)
        if reply.tail_logprobs is not None:
            np.testing.assert_allclose(reply.tail_logprobs, answer.tail_logprobs, atol=1e-4)


def test_a_long_prompt_is_computed_once_for_its_samples(
    vllm_engine: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where what is cached reaches into a response, whose rows would be missing, the sample is scored again."""
    cached: list[int] = []
    step = vllm_engine.llm_engine.step

    def stepped() -> Any:
        outputs = step()
        cached.extend(output.num_cached_tokens for output in outputs)
        return outputs

    monkeypatch.setattr(vllm_engine.llm_engine, "step", stepped)

    def scored(request: ScoreRequest) -> list[int]:
        cached.clear()
        vllm_engine.add(0, request)
        while vllm_engine.has_unfinished_requests():
            for _, target in vllm_engine.step():
                check(request, target, reference)
        return list(cached)

    prompt = a_request(90, 1, 0, seed=50).token_ids[:90]
    samples = [np.concatenate([prompt, a_request(30, 1, 0, seed=60 + i).token_ids[:30]]) for i in range(3)]
    requests = [ScoreRequest(ids, ((90, 120),), 8, t) for ids, t in zip(samples, (1.0, 0.7, 0.7), strict=True)]
    assert [scored(request) for request in requests] == [[0], [64], [64]]  # two blocks
    assert scored(requests[0]) == [96, 0]
    short = ScoreRequest(samples[1], ((40, 120),), 8)  # most of it is response, of which samples often begin alike
    assert scored(short) == [0]
    prompt = a_request(96, 1, 0, seed=51).token_ids[:96]  # three blocks: a hit has the row of the first response token
    samples = [np.concatenate([prompt, a_request(30, 1, 0, seed=70 + i).token_ids[:30]]) for i in range(2)]
    assert [scored(ScoreRequest(ids, ((96, 126),), 8)) for ids in samples] == [[0], [0]]


def test_a_trajectory_of_three_turns_is_scored_and_trained_on_where_the_student_wrote(
    teacher: ScoringClient, reference: Any, tmp_path: Path
) -> None:
    """A prompt and three turns, with something of others after the first two: the gradient is plain autograd's."""
    rng = np.random.default_rng(0)
    several = a_sample(rng, 8, ((8, 20), (26, 27), (31, CHUNK + 9)))
    samples = [a_sample(rng, 3, ((3, 14),)), several, a_sample(rng, 5, ((5, 6),))]
    requests = [ScoreRequest(sample.token_ids, sample.spans, FULL_VOCABULARY) for sample in samples]
    targets = [teacher.submit(request).result(30) for request in requests]
    for request, target in zip(requests, targets, strict=True):
        check(request, target, reference)
    plain = other_llama(reference.config)
    plain.save_pretrained(tmp_path)

    expected, n = torch.zeros(()), sum(len(sample.sampled_ids) for sample in samples)
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            log_p = reference(ids).logits[0].log_softmax(-1)
        log_q = plain(ids).logits[0].log_softmax(-1)
        for position in np.flatnonzero(sample.sampled):
            row = position - 1
            expected = expected + (log_q[row].exp() * (log_q[row] - log_p[row])).sum() / n
    expected.backward()

    student = load_student(tmp_path)
    batch = [ScoredSample(sample, target) for sample, target in zip(samples, targets, strict=True)]
    micro = collate(batch, VLLM_VOCABULARY, [1 / n] * 3, [0.0] * 3)
    total, _ = student(micro, objective(micro, Algorithm(), Rollout(), 7))
    total.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-4)
    gradients = {name: p.grad for name, p in student.lm.named_parameters()}
    for name, parameter in plain.named_parameters():
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-4 * largest, msg=name)


def a_sample(rng: np.random.Generator, n_prompt: int, spans: Spans) -> Sample:
    """Random tokens, of which the student wrote those in ``spans``, the last one to the end; a version each."""
    ids = rng.integers(0, VLLM_VOCABULARY, spans[-1][1]).astype(np.int32)
    sampled = np.zeros(len(ids), np.bool_)
    for start, stop in spans:
        sampled[start:stop] = True
    logprobs = np.where(sampled, -rng.random(len(ids)), np.nan).astype(np.float32)
    request = SampleRequest(Prompt(0, ids[:n_prompt], ""), 0, 0, Sampling(len(ids)))
    versions = tuple(VersionSpan(*span, version) for version, span in enumerate(spans))
    sample = Sample(request, ids, sampled, logprobs, versions, "stop")
    assert sample.spans == spans
    return sample


def other_llama(config: Any) -> Any:
    """A student of the same shapes."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    return LlamaForCausalLM(config).float()


def test_what_the_engine_takes_is_what_the_model_has(vllm_engine: Any) -> None:
    """But for the token that vLLM samples, which needs room."""
    assert (vllm_engine.limits.max_length, vllm_engine.limits.vocabulary) == (VLLM_LENGTH, VLLM_VOCABULARY)


MOST = 24  # tokens


def test_generation_is_transformers_greedy(teacher: ScoringClient, reference: Any) -> None:
    """Also while others are scored at another temperature, and past prompts that end early."""
    scored = [teacher.submit(a_request(5, 30, 4, 0.5, seed=i)) for i in range(8)]
    prompts = [a_request(2 + i, 1, 0, seed=100 + i).token_ids for i in range(12)]
    futures = [teacher.submit(GenerateRequest(prompt, MOST)) for prompt in prompts]
    lengths = set()
    for prompt, future in zip(prompts, futures, strict=True):
        ids = torch.tensor(prompt.astype(np.int64))[None]
        settings = {"max_new_tokens": MOST, "do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            expected = reference.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :]
        np.testing.assert_array_equal(future.result(30), expected.numpy())
        lengths.add(len(expected))
    assert all(f.result(30) for f in scored)
    assert len(lengths) > 1 and MOST in lengths, "some end by themselves and some do not"


def test_results_in_the_engine_are_bounded(vllm_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request too large for the bound still runs, alone."""
    monkeypatch.setattr("gkd.inference.vllm_scorer.RESULT_BYTES", 1)
    assert RESULT_BYTES > 1
    requests = {key: a_request(2, 3, 4, seed=key) for key in range(3)}
    for key, request in requests.items():
        vllm_engine.add(key, request)
    while vllm_engine.has_unfinished_requests():
        for key, _ in vllm_engine.step():
            del requests[key]
        assert len(vllm_engine._running) <= 1
    assert not requests


def test_a_checkpoint_tells_rows_positions_and_end_tokens(tiny_llama: Path) -> None:
    described = ModelInfo(VLLM_VOCABULARY, VLLM_LENGTH, [2], 0)
    assert ModelInfo.read(str(tiny_llama), "teacher.model.path") == described


def test_a_length_beyond_the_positions_is_refused_before_anything_loads(tiny_llama: Path) -> None:
    from gkd.inference.vllm_scorer import VLLMScorer

    described = ModelInfo.read(str(tiny_llama), "teacher.model.path")
    with pytest.raises(ConfigError, match=r"teacher\.max_model_len=500: .*\b128 positions"):
        VLLMScorer(EngineSpec("teacher", str(tiny_llama), described, Teacher(max_model_len=500), "cpu", "float32"))
