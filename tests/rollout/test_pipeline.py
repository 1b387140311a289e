"""What becomes of a finished sample: real servers and clients around the engine that computes from a table."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gkd.config import Config, load
from gkd.inference.requests import ScoreRequest, ScorerRejected
from gkd.rewards.completion import Completion
from gkd.rollout.pipeline import ScoringPipeline
from gkd.scoring.client import ScoringClient
from gkd.types import Prompt, Sample, SampleRequest, Sampling, Scoring, VersionSpan
from tests.data.models import word_tokenizer
from tests.error_text import contains_in_order
from tests.scoring.conftest import Serve
from tests.scoring.table import KEY, VOCABULARY, expected

SPANS = ((3, 5), (8, 9), (11, 16))


@pytest.fixture
def delivered() -> queue.Queue[Any]:
    return queue.Queue()


@pytest.fixture
def pipeline(tmp_path: Path, delivered: queue.Queue[Any], serve: Serve) -> Iterator[ScoringPipeline]:
    """One that is connected to a teacher and a reference."""
    word_tokenizer().save_pretrained(tmp_path)
    made = ScoringPipeline(Config(), str(tmp_path), 2, delivered.put)
    made.connect({
        name: {"addresses": [serve().server.address], "tokenizer_hash": "hash", "key": KEY, "scorer": name}
        for name in ("teacher", "reference")
    })  # fmt: skip
    yield made
    made.close()


def sample(scoring: Scoring, teacher_ids: list[int] | None = None) -> Sample:
    """Three turns; between them are tokens that the student did not write."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY - 1, SPANS[-1][1]).astype(np.int32)
    sampled = np.zeros(len(ids), np.bool_)
    for start, stop in SPANS:
        sampled[start:stop] = True
    own = None if teacher_ids is None else np.array(teacher_ids, np.int32)
    request = SampleRequest(Prompt(7, ids[:3], "", teacher_ids=own), 1, 0, Sampling(16, 0.5), scoring, key=9)
    versions = tuple(VersionSpan(*span, version) for span, version in zip(SPANS, (4, 5, 5), strict=True))
    return Sample(request, ids, sampled, np.zeros(len(ids), np.float32), versions, "length")


def test_teacher_and_reference_score_what_the_student_wrote(
    pipeline: ScoringPipeline, delivered: queue.Queue[Any]
) -> None:
    """The teacher after its own prompt; the reference at the temperature of the sampling."""
    submitted = sample(Scoring(top_k=4, temperature=2.0, reference=True), teacher_ids=[20, 21, 22, 23, 24])
    pipeline.submit(submitted)
    ((training, scored),) = delivered.get(timeout=30)
    assert scored.sample is submitted
    ids = np.concatenate([[20, 21, 22, 23, 24], submitted.token_ids[3:]])
    moved = tuple((start + 2, stop + 2) for start, stop in SPANS)
    target = expected(ScoreRequest(ids, moved, 4, 2.0))
    np.testing.assert_array_equal(scored.teacher.ids, target.ids)
    np.testing.assert_array_equal(scored.teacher.logprobs, target.logprobs)
    np.testing.assert_array_equal(scored.teacher.token_logprobs, target.token_logprobs)
    reference = expected(ScoreRequest(submitted.token_ids, SPANS, 0, 0.5)).token_logprobs
    np.testing.assert_array_equal(scored.reference, reference)
    assert training.kl_reference == pytest.approx(-reference.sum(), rel=1e-6)  # log-probabilities are 0 where sampled
    assert (training.key, training.prompt_id, training.index, training.worker) == (9, 7, 1, 2)
    assert (training.n_tokens, training.n_sampled, training.version) == (16, 8, 4)


def test_scorers_are_asked_in_the_order_of_training(
    pipeline: ScoringPipeline, delivered: queue.Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[tuple[float, int]] = []
    submit = ScoringClient.submit

    def record(client: ScoringClient, request: Any, order: tuple[float, int]) -> Any:
        orders.append(order)
        return submit(client, request, order)

    monkeypatch.setattr(ScoringClient, "submit", record)
    wanted = sample(Scoring(top_k=4, reference=True), teacher_ids=[20, 21, 22])
    pipeline.submit(replace(wanted, request=replace(wanted.request, order=3.5)))
    delivered.get(timeout=30)
    assert orders == [(3.5, 9)] * 2


def test_a_reward_is_given_what_the_student_wrote_and_the_steps_of_the_oldest_weights(
    tmp_path: Path, delivered: queue.Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    completions: list[Completion] = []

    def submit(completion: Completion) -> dict[str, Any]:
        completions.append(completion)
        return {}

    pool = SimpleNamespace(submit=submit, submit_group=lambda group: [{} for _ in group], close=lambda: None)
    monkeypatch.setattr("gkd.rollout.pipeline.RewardPool", lambda settings, temporary: pool)
    word_tokenizer().save_pretrained(tmp_path)
    config = load({"algorithm": {"name": "grpo"}, "rollout": {"n": 2}, "trainer": {"total_steps": 9}})
    pipeline = ScoringPipeline(config, str(tmp_path), 2, delivered.put)
    pipeline.submit(sample(Scoring(rewards=True)))
    ((training, _),) = delivered.get(timeout=30)
    pipeline.close()
    (own,) = completions
    assert (own.step, own.total_steps) == (training.version, 9) == (4, 9)
    assert (own.n_tokens, own.max_tokens, own.truncated) == (8, 16, True)


def test_a_prompt_that_the_reward_models_chat_template_refuses_has_no_reward_of_it(
    tmp_path: Path, delivered: queue.Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = SimpleNamespace(submit=lambda completion: {}, submit_group=lambda group: [{} for _ in group], close=int)
    monkeypatch.setattr("gkd.rollout.pipeline.RewardPool", lambda settings, temporary: pool)
    template = "{{ raise_exception('system role') }}"
    word_tokenizer().save_pretrained(tmp_path / "student")
    word_tokenizer(("<unk>", "<eos>", "a"), template=template).save_pretrained(tmp_path / "rates")
    config = load({
        "algorithm": {"name": "grpo"}, "rollout": {"n": 2}, "reward": {"functions": ["reward_model"]},
        "reward_model": {"model": {"path": str(tmp_path / "rates")}},
    })  # fmt: skip
    pipeline = ScoringPipeline(config, str(tmp_path / "student"), 0, delivered.put)
    pipeline.submit(sample(Scoring(rewards=True)))
    ((training, _),) = delivered.get(timeout=30)
    pipeline.close()
    reason = training.rewards["reward_model"]
    assert isinstance(reason, str) and contains_in_order(
        reason, "reward_model.model.path", "chat template", "prompt 7", "system role"
    )


def test_who_is_not_wanted_does_not_score(pipeline: ScoringPipeline, delivered: queue.Queue[Any]) -> None:
    pipeline.submit(sample(Scoring()))
    ((_, scored),) = delivered.get(timeout=30)
    assert scored.teacher is None and scored.reference is None


def test_what_a_scorer_refuses_comes_out_in_its_name(pipeline: ScoringPipeline, delivered: queue.Queue[Any]) -> None:
    submitted = sample(Scoring(reference=True))
    submitted.token_ids[-1] = VOCABULARY
    pipeline.submit(submitted)
    error = delivered.get(timeout=30)
    assert isinstance(error, ScorerRejected)
    assert (error.scorer, error.code) == ("reference", "out_of_vocabulary")
