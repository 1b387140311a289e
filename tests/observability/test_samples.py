"""samples.jsonl: what is kept of a sample, compared with the arrays that it came from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gkd.config import load
from gkd.observability.metrics import JsonLines
from gkd.observability.page.samples import Texts, read_samples
from gkd.observability.samples import SampleLog
from gkd.types import Prompt, Sample, SampleRequest, Sampling, ScoredSample, Target, VersionSpan
from tests.data.models import word_tokenizer
from tests.samples import training_sample

N, K = 6, 8


def scored(from_dataset: bool = False, top: int = K) -> ScoredSample:
    random = np.random.default_rng(0)
    prompt = Prompt(3, np.array([1, 2], np.int32), "one two", answer="three")
    request = SampleRequest(prompt, 0, 0, Sampling(N), from_dataset=from_dataset)
    logprobs = np.log(random.uniform(0.1, 1, N)).astype(np.float32)
    sample = Sample.single_turn(request, np.arange(3, 3 + N, dtype=np.int32), logprobs, 4, "stop")
    likely = -np.sort(random.exponential(size=(N, top)).astype(np.float32), axis=1)
    ids = np.tile(np.arange(top, dtype=np.int32), (N, 1))
    token = np.array([-0.5, -np.inf, *[-1.0] * (N - 2)], np.float32)
    return ScoredSample(sample, Target(token, ids, likely))


def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: ScoredSample, n_tokens: int) -> dict[str, Any]:
    monkeypatch.setattr("gkd.observability.samples.fetch_samples", lambda *_: [sample])
    config = load({"trainer": {"n_logged_tokens": n_tokens}})
    with JsonLines(tmp_path / "samples.jsonl") as file:
        SampleLog(file, config, word_tokenizer()).write(5, [training_sample(0, 3, 0, n=N, version=4)])
    (line,) = (tmp_path / "samples.jsonl").read_text().splitlines()
    row: dict[str, Any] = json.loads(line)
    return row


def test_groups_of_one_prompt_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a step has the end of an epoch and the beginning of the next one."""
    monkeypatch.setattr("gkd.observability.samples.fetch_samples", lambda places, _: [scored()] * len(places))
    batch = [
        training_sample(key, prompt, index, n=key, version=4)
        for key, (prompt, index) in enumerate([(3, 0), (3, 1), (1, 0), (1, 1), (3, 0), (3, 1)], 1)
    ]
    with JsonLines(tmp_path / "samples.jsonl") as file:
        SampleLog(file, load({"trainer": {"n_logged_samples": 6}}), word_tokenizer()).write(5, batch)
    rows = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert [(row["prompt_id"], row["index"], row["length"]) for row in rows] == [
        (1, 0, 3), (1, 1, 4), (3, 0, 1), (3, 1, 2), (3, 0, 5), (3, 1, 6)
    ]  # fmt: skip


def test_tokens_have_the_log_probabilities_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = scored()
    row, tokenizer = written(tmp_path, monkeypatch, sample, 4), word_tokenizer()
    assert (row["step"], row["prompt_id"], row["index"], row["length"], row["version"]) == (5, 3, 0, N, 4)
    tokens, target = row["tokens"], sample.teacher
    assert target is not None
    assert tokens["text"] == [tokenizer.decode([token]) for token in sample.sample.sampled_ids[:4]]
    assert tokens["student"] == pytest.approx(sample.sample.sampled_logprobs[:4].tolist(), abs=1e-4)
    assert tokens["teacher"] == [-0.5, None, -1.0, -1.0]  # the second token is one that the teacher never writes
    assert [[name for name, _ in position] for position in tokens["top"]] == [
        [tokenizer.decode([token]) for token in range(5)]
    ] * 4
    assert [[p for _, p in position] for position in tokens["top"]] == [
        pytest.approx(likely[:5].tolist(), abs=1e-4) for likely in target.logprobs[:4]
    ]


def test_a_row_has_the_weights_of_every_stretch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where new weights came while the sample was under way (schedule.in_flight)."""
    assert written(tmp_path, monkeypatch, scored(), 0)["versions"] == [[4, N]]
    in_flight = replace(training_sample(0, 3, 0, n=N), versions=(VersionSpan(2, 5, 3), VersionSpan(5, 2 + N, 4)))
    with JsonLines(tmp_path / "in_flight") as file:
        SampleLog(file, load({}), word_tokenizer()).write(5, [in_flight])
    row = json.loads((tmp_path / "in_flight").read_text())
    assert row["version"] == 3 and row["versions"] == [[3, 3], [4, N - 3]]


def test_what_was_not_measured_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tokens" not in written(tmp_path, monkeypatch, scored(), 0)
    (tmp_path / "samples.jsonl").unlink()
    own = written(tmp_path, monkeypatch, scored(from_dataset=True, top=0), 99)
    assert own["tokens"].keys() == {"text", "teacher"} and len(own["tokens"]["text"]) == N


def test_samples_of_the_first_prompts_are_kept_with_their_own_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their order in the batch, so that steps over the same prompts can be compared."""
    responses = {(prompt, index): scored() for prompt in (2, 5, 9) for index in (0, 1)}
    for number, own in enumerate(responses.values()):
        own.sample.token_ids[2:] = number
    monkeypatch.setattr("gkd.observability.samples.fetch_samples", lambda its, *_: [s.ref for s in its])
    places = [(9, 0), (5, 1), (2, 1), (9, 1), (2, 0), (5, 0)]
    keys = {(5, 0): 0, (5, 1): 1, (9, 0): 2, (9, 1): 3, (2, 0): 4, (2, 1): 5}  # as they were asked for
    samples = [training_sample(keys[place], *place, n=N, ref=responses[place]) for place in places]
    with JsonLines(tmp_path / "samples.jsonl") as file:
        SampleLog(file, load({"trainer": {"n_logged_samples": 3}}), word_tokenizer()).write(5, samples)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(row["prompt_id"], row["index"]) for row in rows] == [(2, 0), (2, 1), (5, 0)]
    decode = word_tokenizer().decode
    assert [row["response"] for row in rows] == [decode([n] * N, skip_special_tokens=True) for n in range(3)]


def test_the_reward_is_the_one_that_is_learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gkd.observability.samples.fetch_samples", lambda samples, *_: [scored()] * len(samples))
    config = load({
        "algorithm": {"name": "grpo", "overlong": {"action": "penalty", "buffer": 4}},
        "rollout": {"n": 3, "max_response_length": 8},
        "reward": {"functions": ["accuracy", "length", "format"], "weights": [2.0, 0.5, 0.0]},
    })  # fmt: skip
    of_functions: list[dict[str, float | str]] = [
        {"accuracy": 1.0, "length": -0.5, "format": 1.0},
        {"accuracy": 1.0, "length": -0.5, "format": "late"},  # which does not count
        {"accuracy": "late", "length": -0.5, "format": 1.0},
    ]
    samples = [training_sample(i, 3, i, n=N, rewards=rewards) for i, rewards in enumerate(of_functions)]
    with JsonLines(tmp_path / "samples.jsonl") as file:
        SampleLog(file, config, word_tokenizer()).write(5, samples)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["rewards"] for row in rows] == of_functions
    assert [row.get("reward") for row in rows] == [1.25, 1.25, None]  # half of the penalty, for 6 of 8 tokens
    page = read_samples(tmp_path / "samples.jsonl", Texts())
    assert [row.get("reward") for row in page] == [1.25, 1.25, None]
