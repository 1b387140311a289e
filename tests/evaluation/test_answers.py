"""answers.jsonl: what is in it is not asked again, whatever ended the program that wrote it."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import pytest

from gkd.config import load
from gkd.config.eval_set import EvalSet
from gkd.config.evaluation import Endpoint
from gkd.errors import ConfigError
from gkd.evaluation.answers import AnswerKey, AnswerLog, RecordedAnswer, fingerprint
from gkd.evaluation.endpoint import EndpointModel
from gkd.evaluation.plan import Measurement, describe_engine
from gkd.evaluation.questions import Questions
from gkd.types import Sampling
from tests.evaluation.test_answering import jobs

KEY = AnswerKey("f", "sums", "q1", 0, "s", "plain")
ANSWERED = RecordedAnswer("1 \u2028 2\n", 3.0, 1, 3, False, 0.25)


def test_answers_are_there_again_and_a_line_that_was_cut_is_not(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path / "answers.jsonl")
    log.add(KEY, ANSWERED, {"model": "base"})
    log.add(replace(KEY, index=1), ANSWERED, {})
    log.close()
    whole = log.path.read_bytes()
    log.path.write_bytes(whole[:-20])  # killed while it wrote the second
    again = AnswerLog(log.path)
    assert again.answers == {KEY: ANSWERED}
    again.add(replace(KEY, index=1), ANSWERED, {})
    again.close()
    assert log.path.read_bytes() == whole


@pytest.mark.parametrize("field", ["fingerprint", "set", "question", "sampling", "strategy"])
def test_another_key_is_another_answer(tmp_path: Path, field: str) -> None:
    log = AnswerLog(tmp_path / "answers.jsonl")
    log.add(KEY, ANSWERED, {})
    assert replace(KEY, **{field: "other"}) not in log.answers
    log.close()


@pytest.mark.parametrize(
    ("strategy", "temperature", "same"),
    [("plain", 0.0, True), ("plain", 0.7, False), ("self_consistency", 0.0, False), ("self_consistency", 0.7, False)],
)
def test_another_seed_is_another_answer_where_anything_is_drawn(strategy: str, temperature: float, same: bool) -> None:
    """A strategy may draw at a temperature of its own."""
    model = EndpointModel("a", Endpoint(url="http://127.0.0.1/v1", model="a"))
    questions = Questions("sums", EvalSet(files=["sums.jsonl"]), [], 0)
    measured = Measurement(model, questions, strategy, Sampling(8, temperature), strategy)
    (job,) = jobs(1)
    assert (measured.key(job, 0) == measured.key(job, 1)) == same


def test_another_engine_or_type_of_numbers_is_another_answer() -> None:
    """Both are in the results; those of the default ones are kept as before."""
    by = [
        describe_engine(load(settings))
        for settings in ({}, {"rollout": {"engine": "hf"}}, {"model": {"dtype": "float32"}}, {"rollout": {"n": 2}})
    ]
    model = EndpointModel("a", Endpoint(url="http://127.0.0.1/v1", model="a"))
    questions, sampling = Questions("sums", EvalSet(files=["sums.jsonl"]), [], 0), Sampling(8, 0.0)
    keys = [Measurement(model, questions, "plain", sampling, "plain", own).key(jobs(1)[0], 0) for own in by]
    assert keys[0] == keys[3] == Measurement(model, questions, "plain", sampling, "plain").key(jobs(1)[0], 0)
    assert len(set(keys)) == 3


def test_a_disk_that_is_full_is_named_and_loses_no_whole_answer(tmp_path: Path) -> None:
    log, limits = AnswerLog(tmp_path / "answers.jsonl"), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limits[1]))
        with pytest.raises(OSError, match=r"answers\.jsonl"):
            for index in range(100):
                log.add(replace(KEY, index=index), ANSWERED, {})
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    again = AnswerLog(log.path)
    assert again.answers == log.answers and len(again.answers) > 1
    again.close()


def test_two_programs_do_not_write_one_file_and_other_files_are_left_alone(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path / "answers.jsonl")
    with pytest.raises(ConfigError, match=r"answers\.jsonl now"):
        AnswerLog(log.path)
    log.close()
    log.path.write_text('{"fingerprint": "f"}\n')
    with pytest.raises(ConfigError, match=r"answers\.jsonl line 1\b"):
        AnswerLog(log.path)
    assert log.path.read_text() == '{"fingerprint": "f"}\n'


def test_a_model_that_was_trained_further_has_another_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"0" * 5_000)
    before = fingerprint(str(tmp_path))
    (tmp_path / "README.md").write_text("says nothing of the model")
    assert fingerprint(str(tmp_path)) == before
    weights.write_bytes(b"0" * 2_500 + b"1" + b"0" * 2_499)
    assert fingerprint(str(tmp_path)) != before
