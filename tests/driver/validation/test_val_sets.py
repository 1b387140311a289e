"""data.val_sets: which are due, how they are sampled, and what comes of it. The engines are played by functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gkd.driver.validation.val_sets
from gkd.config import load
from gkd.driver.validation.final_scores import write_scores
from gkd.driver.validation.val_sets import ValSets
from gkd.errors import RunFailed
from gkd.evaluation.comparison import read_all
from gkd.evaluation.questions import load_questions
from gkd.evaluation.rating import score
from gkd.types import Sample, SampleRequest, Sampling, ScoredSample
from tests.data.models import WORDS, word_tokenizer
from tests.samples import training_sample

TOKENIZER = word_tokenizer()
ROWS = [{"prompt": "a", "answer": "b"}, {"prompt": "a a", "answer": "c"}, {"prompt": "a b", "answer": "c"}]


class Engines:
    """Replies with "b" to even samples and "c" to odd ones, the latter cut."""

    def __init__(self) -> None:
        self.requests: list[SampleRequest] = []
        self.attended: list[float] = []

    def submit(self, requests: Sequence[SampleRequest], order: int) -> Sequence[SampleRequest]:
        self.requests += requests
        return requests

    def attend(self, wait_s: float) -> None:
        self.attended.append(wait_s)

    def collect(self, requests: Sequence[SampleRequest], timeout_s: float) -> list[Any]:
        return [training_sample(prompt_id=r.prompt.id, ref=r) for r in requests]

    def fetch(self, samples: Sequence[Any]) -> list[ScoredSample]:
        return [
            ScoredSample(
                Sample.single_turn(
                    r, np.array([WORDS.index("bc"[r.index % 2])]), np.zeros(1), 0, "length" if r.index % 2 else "stop"
                )
            )
            for r in (sample.ref for sample in samples)
        ]


def make(tmp_path: Path, **sets: dict[str, Any]) -> tuple[ValSets, Engines]:
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    values = {name: {"files": [str(file)], "answer_key": "answer", **own} for name, own in sets.items()}
    config = load({"data": {"val_sets": values}, "trainer": {"val_every": 10, "total_steps": 35}})
    question_sets = [
        load_questions(name, settings, TOKENIZER, 8, section="data.val_sets")
        for name, settings in config.data.val_sets.items()
    ]
    engines, actor = Engines(), SimpleNamespace(version=0)
    return ValSets(config, question_sets, TOKENIZER, engines, actor), engines  # type: ignore[arg-type]


def test_a_set_says_how_its_answers_are_drawn(tmp_path: Path) -> None:
    own = {"temperature": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 0.2, "stop": ["c"]}
    sets, engines = make(tmp_path, own={**own, "max_response_length": 4})
    sets.run(sets.select_due_sets(0))
    assert {request.sampling for request in engines.requests} == {Sampling(4, 0.5, 1.0, 3, 0.1, 0.2, ("c",))}


def test_answers_of_other_weights_end_the_run(tmp_path: Path) -> None:
    sets, _ = make(tmp_path, own={})
    sets.actor.version = 2
    with pytest.raises(RunFailed, match=r"prompt 0, .*version 0\b.* 2$"):
        sets.run(sets.select_due_sets(0))


def test_engines_are_attended_to_while_a_judge_takes_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of that is waited for."""

    def score_slowly(*args: Any) -> dict[str, dict[str, float]]:
        *_, attend = args
        attend()
        return score(*args)

    monkeypatch.setattr(gkd.driver.validation.val_sets, "score", score_slowly)
    sets, engines = make(tmp_path, usual={})
    assert "val/usual/accuracy" in sets.run(sets.select_due_sets(0))
    assert engines.attended == [0.0]


def test_every_set_has_its_own_interval(tmp_path: Path) -> None:
    sets, _ = make(tmp_path, usual={}, seldom={"every": 25})
    due = {step: {name.split("/")[1] for name in sets.run(sets.select_due_sets(step))} for step in (0, 7, 10, 25, 35)}
    assert due == {0: {"usual", "seldom"}, 7: set(), 10: {"usual"}, 25: {"seldom"}, 35: {"usual", "seldom"}}


def test_scores_are_split_by_the_sets_difficulty(tmp_path: Path) -> None:
    sets, _ = make(tmp_path, own={"samples": 2, "temperature": 1.0, "difficulty": "prompt", "limit": 2})
    metrics = sets.run(sets.select_due_sets(0))
    assert {name: value for name, value in metrics.items() if "difficulty" in name} == {
        f"val/own/difficulty/{prompt}/accuracy": 0.5 for prompt in ("a", "a a")
    }
    write_scores(sets.last_scores.values(), tmp_path)
    (results,) = read_all([tmp_path])
    assert {name: (group["n"], group["scores"]["accuracy"]["value"]) for name, group in results.groups.items()} == {
        "a": (1, 0.5), "a a": (1, 0.5)
    }  # fmt: skip


def test_figures_are_means_over_questions_with_the_error_of_the_accuracy(tmp_path: Path) -> None:
    sets, engines = make(tmp_path, hard={"samples": 2, "temperature": 0.7, "max_response_length": 5})
    metrics = sets.run(sets.select_due_sets(0))
    expected = {
        "accuracy": 0.5,
        "pass@2": 1.0,
        "maj@2": 0.5,
        "length": 1.0,
        "truncated": 0.5,
        "stderr": 0.0,
    }
    assert metrics == pytest.approx({f"val/hard/{name}": value for name, value in expected.items()})
    (last,) = sets.last_scores.values()
    assert (last.name, last.samples, [own["accuracy"] for own in last.questions.values()]) == ("hard", 2, [0.5] * 3)
    assert [(r.prompt.id, r.index) for r in engines.requests] == [(i, k) for i in range(3) for k in range(2)]
    assert {(r.sampling.temperature, r.sampling.max_tokens) for r in engines.requests} == {(0.7, 5)}
    assert len({r.seed for r in engines.requests}) == 6
    first = [r.seed for r in engines.requests]
    sets.run(sets.select_due_sets(10))
    assert [r.seed for r in engines.requests[6:]] == first  # the same at every validation


def test_one_answer_a_question_has_the_pass_k_that_is_named(tmp_path: Path) -> None:
    sets, _ = make(tmp_path, own={"pass_k": [1]})
    metrics = sets.run(sets.select_due_sets(0))
    assert {name for name in metrics if "@" in name} == {"val/own/pass@1"}
    assert metrics["val/own/pass@1"] == metrics["val/own/accuracy"]


def test_the_text_that_ends_answers_is_no_part_of_them(tmp_path: Path) -> None:
    sets, _ = make(tmp_path, usual={"max_response_length": 4}, ended={"max_response_length": 4, "stop": ["c"]})
    sets.rollout.fetch = lambda samples: [  # type: ignore[method-assign]
        ScoredSample(Sample.single_turn(r, np.array([WORDS.index(w) for w in "bc"]), np.zeros(2), 0, "stop"))
        for r in (sample.ref for sample in samples)
    ]
    metrics = sets.run(sets.select_due_sets(0))
    assert metrics["val/usual/accuracy"] == 0.0  # "b c"
    assert metrics["val/ended/accuracy"] == pytest.approx(1 / 3)  # "b"
    sets, _ = make(tmp_path, ended={"max_response_length": 4, "stop": ["c"]})
    sets.rollout.fetch = lambda samples: [  # type: ignore[method-assign]
        ScoredSample(Sample.single_turn(r, np.array([WORDS.index(w) for w in "bcd"]), np.zeros(3), 0, "stop"))
        for r in (sample.ref for sample in samples)
    ]
    assert sets.run(sets.select_due_sets(0))["val/ended/accuracy"] == pytest.approx(
        1 / 3
    )  # a token had more than that text


def test_one_greedy_answer_is_the_default(tmp_path: Path) -> None:
    sets, engines = make(tmp_path, usual={})
    assert sets.run(sets.select_due_sets(0))["val/usual/accuracy"] == pytest.approx(1 / 3)
    assert {r.sampling.temperature for r in engines.requests} == {0.0}
