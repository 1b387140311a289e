"""Sets as models are asked them: keys that all models share, rows, difficulty, and what is refused."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gkd.config import Rollout
from gkd.config import load as load_config
from gkd.config.eval_set import EvalSet
from gkd.errors import ConfigError
from gkd.evaluation.plan import measurements
from gkd.evaluation.questions import Questions, load_questions, sampling_of
from tests.data.models import TEMPLATE, save_model, word_tokenizer
from tests.error_text import contains_in_order

ROWS = [
    {"prompt": "a b", "answer": "c", "level": 1, "documents": ["d"]},
    {"prompt": "a b", "answer": "c", "level": 2},
    {"prompt": "a b c d a b", "answer": "c", "level": 2},
    {"prompt": [{"role": "user", "content": "a"}], "answer": "d", "level": 2},
]


def load(tmp_path: Path, rows: list[dict[str, Any]], tokenizer: Any = None, **settings: Any) -> Questions:
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    eval_set = EvalSet(files=[str(file)], answer_key="answer", **settings)
    return load_questions("letters", eval_set, tokenizer or word_tokenizer(template=TEMPLATE), 5)


def test_keys_are_of_the_rows_and_not_of_a_models_template(tmp_path: Path) -> None:
    first = load(tmp_path, ROWS)
    other = load(tmp_path, ROWS, word_tokenizer(template=TEMPLATE.replace("assistant", "user")))
    assert [q.key for q in first.questions] == [q.key for q in other.questions]
    assert first.questions[-1].prompt.token_ids.tolist() != other.questions[-1].prompt.token_ids.tolist()
    assert len({q.key for q in first.questions}) == 3  # equal rows are two questions
    assert first.questions[1].key == f"{first.questions[0].key}-2"


def test_what_a_row_lacks_is_named_as_the_sets_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no key 'question' \(evaluate\.sets\.letters\.prompt_key\)"):
        load(tmp_path, ROWS, prompt_key="question")


def test_rows_and_difficulty_belong_to_the_questions_that_fit(tmp_path: Path) -> None:
    questions = load(tmp_path, ROWS, difficulty="level")
    assert questions.n_too_long == 1
    assert [(q.prompt.id, q.difficulty, q.row["level"]) for q in questions.questions] == [
        (0, "1", 1),
        (1, "2", 2),
        (3, "2", 2),
    ]
    assert questions.questions[0].row["documents"] == ["d"]
    few = load(tmp_path, ROWS, limit=2)
    assert len(few.questions) == 2
    both = [load_questions("letters", few.settings, word_tokenizer(template=TEMPLATE), 5, limit) for limit in (1, 3)]
    assert [len(own.questions) for own in both] == [1, 2]  # the lower of both limits


def test_questions_of_some_difficulties_keep_their_keys_and_limits_count_these(tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": "a b", "answer": " ", "level": 3}]
    everything = load(tmp_path, ROWS, difficulty="level").questions
    chosen = load(tmp_path, rows, difficulty="level", difficulties=[2]).questions  # another one needs no answer
    assert [q.key for q in chosen] == [q.key for q in everything if q.difficulty == "2"]
    both = load(tmp_path, ROWS, difficulty="level", difficulties=["1", "2"], limit=2).questions
    assert [q.prompt.id for q in both] == [0, 1]
    assert [q.prompt.id for q in load(tmp_path, ROWS, difficulty="level", difficulties="2", limit=1).questions] == [1]


def test_questions_without_an_answer_are_left_out_and_counted_by_file(tmp_path: Path) -> None:
    """As of a run's data.val_files, of which the run itself compares those alone that have one."""
    whole, partly = tmp_path / "whole.jsonl", tmp_path / "partly.jsonl"
    whole.write_text('{"prompt": "a", "answer": "b"}\n')
    partly.write_text("".join(f'{{"prompt": "a", "answer": {answer}}}\n' for answer in ("null", '"c"', '" "')))
    own = {"files": [str(whole), str(partly)], "answer_key": "answer"}
    questions = load_questions("own", EvalSet(**own), word_tokenizer(), 5)
    assert [q.prompt.id for q in questions.questions] == [0, 2]
    assert questions.unanswered == {str(partly): (2, 3)}
    endpoints = {name: {"url": "http://127.0.0.1/v1", "model": "a"} for name in ("one", "other")}
    config, lines = load_config({"evaluate": {"sets": {"own": own}, "endpoints": endpoints}}), list[str]()
    measurements(config, False, lines.append)
    (line,) = lines  # and not one a model
    assert contains_in_order(line, "own", "2 of 3", str(partly))


@pytest.mark.parametrize("settings", [{}, {"rewards": ["format"]}, {"difficulty": "level", "difficulties": ["1"]}])
def test_limits_count_the_questions_that_have_an_answer(tmp_path: Path, settings: dict[str, Any]) -> None:
    rows = [{"prompt": f"a {'b' * (n > 2)}", "answer": "c" if n > 2 else None, "level": 1} for n in range(6)]
    everything = load(tmp_path, rows, **settings).questions
    assert [q.prompt.id for q in everything] == [3, 4, 5]
    assert [q.key for q in load(tmp_path, rows, limit=2, **settings).questions] == [q.key for q in everything[:2]]
    unanswered = [{**row, "answer": None} for row in rows]
    assert len(load(tmp_path, unanswered, limit=2, rewards=["format"]).questions) == 2


def test_difficulties_are_values_in_a_column() -> None:
    for wrong in ({"difficulties": ["easy"]}, {"difficulty": "level", "difficulties": []}):
        with pytest.raises(ValidationError, match=r"difficult"):
            EvalSet.model_validate({"files": ["x"], **wrong})


def test_a_set_ends_answers_as_the_run_does_unless_it_says_how() -> None:
    rollout, sets = Rollout(stop=["END"]), (EvalSet(files=["x"], stop=stop) for stop in (None, [], ["\n"]))
    assert [sampling_of(rollout, own).stop for own in sets] == [("END",), (), ("\n",)]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (
            [{"prompt": "a", "answer": "b", "level": "easy"}, {"prompt": "a", "answer": " ", "level": "hard"}],
            {"difficulty": "level", "difficulties": ["hard"]},
            r"sets\.letters\.difficulties: .*\(answer_key=answer\)",
        ),
        (
            [{"prompt": "a", "answer": " "}],
            {},
            r"sets.letters: .*\(answer_key=answer\)",
        ),
        (
            ROWS,
            {"difficulty": "levl"},
            r"'levl' \(evaluate.sets.letters.difficulty\) \(.*level\?\)",
        ),
        (
            [{"prompt": "a", "answer": "b", "level": level} for level in ("easy", "hard")],
            {"difficulty": "level", "difficulties": ["hard", "eazy"]},
            r"sets\.letters\.difficulties: .*\beazy\b.*\beasy\?.*\beasy, hard$",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: list[dict[str, Any]], settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, rows, **settings)


@pytest.mark.parametrize(("names", "clash"), [(("m_a", "b", "m", "a_b"), True), (("m_a", "b", "m", "b_a"), False)])
def test_results_that_would_have_one_file_are_refused(
    names: tuple[str, str, str, str], clash: bool, tmp_path: Path
) -> None:
    """Before anything is asked: the second one would replace the first."""
    (tmp_path / "x.jsonl").write_text('{"prompt": "a b", "answer": "c"}\n')
    own, (one, first, other, second) = {"files": [str(tmp_path / "x.jsonl")], "answer_key": "answer"}, names
    endpoints = {name: {"url": "http://127.0.0.1/v1", "model": "a"} for name in (one, other)}
    config = load_config({"evaluate": {"sets": {first: own, second: own}, "endpoints": endpoints}})
    if clash:
        with pytest.raises(ConfigError, match=r"evaluate\.sets\.a_b: .*\bm\b.*\bm_a\b.*\bb\b.*results/m_a_b_1\.json"):
            measurements(config, False, print)
    else:
        assert len(measurements(config, False, print)) == 4


@pytest.mark.parametrize(
    ("models", "templated", "warned"),
    [
        (["base"], None, []),
        (["chat"], None, ["evaluate.sets.text"]),
        (["base", "chat", "same"], None, ["evaluate.sets.text"]),
        (["chat", "same"], False, []),
        (["chat", "same"], True, []),
    ],
)
def test_a_model_that_is_to_chat_and_gets_plain_text_is_warned_of_once_a_set(
    models: list[str], templated: bool | None, warned: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in models:
        save_model(tmp_path / name, tokenizer=word_tokenizer(template=None if name == "base" else TEMPLATE))
    rows = {"text": "a", "messages": [{"role": "user", "content": "a"}]}
    sets: dict[str, Any] = {}
    for name in rows if "base" not in models else ["text"]:
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps({"prompt": rows[name], "answer": "c"}) + "\n")
        sets[name] = {"files": [str(file)], "answer_key": "answer"}
    sets["text"]["apply_chat_template"] = templated
    paths = {name: str(tmp_path / name) for name in models}
    config = load_config({"models": paths, "evaluate": {"sets": sets}, "rollout": {"engine": "hf"}})
    with caplog.at_level(logging.WARNING, "gkd"):
        assert len(measurements(config, False, print)) == len(models) * len(sets)
    settings = re.findall(r"([\w.]+)\.apply_chat_template=true", caplog.text)
    assert settings == warned
