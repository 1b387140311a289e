"""Models and data of a run, found and checked before Ray starts."""

from __future__ import annotations

import json
import logging
import re
import shutil
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gkd.cli.train import _find_inputs
from gkd.config import Config, load
from gkd.config.rewards import Reward
from gkd.data.layouts import get_stated_day
from gkd.driver.checkpoints.resume import day_of
from gkd.driver.inputs.find import find_inputs, require_files
from gkd.errors import ConfigError
from gkd.inference.engine import InferenceEngine
from tests.data.models import TEMPLATE, save_model, save_reward_model, word_tokenizer
from tests.data.test_answers import EOS, IM_END, chat_tokenizer
from tests.error_text import contains_in_order


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    save_model(directory / "chat", tokenizer=word_tokenizer(template=TEMPLATE))
    save_model(directory / "base")
    (directory / "text.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    return directory


def own(models: Path, model: str, **data: Any) -> Config:
    files = [str(models / "text.jsonl")]
    return load(
        {
            "algorithm": {"name": "grpo"},
            "rollout": {"n": 2, "engine": "hf"},
            "reward": {"functions": ["accuracy"]},
            "model": {"path": str(models / model)},
            "data": {"train_files": files, "val_files": files, "answer_key": "answer", **data},
        }
    )


@pytest.mark.parametrize(
    ("model", "data", "warned"),
    [
        ("chat", {}, True),
        ("chat", {"apply_chat_template": False}, False),
        ("chat", {"apply_chat_template": True}, False),
        ("base", {}, False),
    ],
)
def test_a_chat_model_that_gets_plain_text_is_warned_of(
    models: Path, model: str, data: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gkd"):
        inputs = find_inputs(own(models, model, **data), lambda line: None)
    assert ("data.apply_chat_template=true" in caplog.text) is warned
    assert ("data.train_files and data.val_files" in caplog.text) is warned
    assert (inputs.train.prompts[0].messages is not None) is bool(data.get("apply_chat_template"))


@pytest.mark.parametrize(
    ("model", "templated", "warned"), [("chat", None, True), ("chat", False, False), ("base", None, False)]
)
def test_plain_text_of_a_set_is_warned_of_by_its_own_setting(
    models: Path, model: str, templated: bool | None, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the prompts of training go through the chat template."""
    sets = {"hard": {"files": [str(models / "text.jsonl")], "answer_key": "answer", "apply_chat_template": templated}}
    with caplog.at_level(logging.WARNING, "gkd"):
        find_inputs(own(models, model, val_sets=sets, apply_chat_template=model == "chat"), lambda line: None)
    warnings = [record.getMessage() for record in caplog.records if "apply_chat_template" in record.getMessage()]
    assert [("data.val_sets.hard.apply_chat_template=true" in line) for line in warnings] == [True] * warned


@pytest.mark.parametrize(
    ("lacking", "settings", "message"),
    [
        ("train", {}, r"row 2 of data\.train_files .*'tests' \(reward\.code\.tests\)"),
        ("val", {}, r"row 2 of data\.val_files .*'tests' \(reward\.code\.tests\)"),
        (None, {"code": {"tests": "asserts"}}, r"row 1 of data\.train_files .*'asserts' \(reward\.code\.tests\)"),
        (None, {}, None),
    ],
)
def test_a_row_without_the_tests_that_its_reward_runs_is_found_before_anything_is_sampled(
    models: Path, tmp_path: Path, lacking: str | None, settings: dict[str, Any], message: str | None
) -> None:
    files = {}
    for name in ("train", "val"):
        files[f"{name}_files"] = [str(tmp_path / f"{name}.jsonl")]
        rows = [{"prompt": "a", "tests": "assert True"}, {"prompt": "a"} | ({"tests": "x"} if name != lacking else {})]
        Path(files[f"{name}_files"][0]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = {"functions": ["code"], **settings}
    config = own(models, "base", **files, answer_key=None)
    config = config.model_copy(update={"reward": Reward(**reward)})
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        assert len(find_inputs(config, lambda line: None).train.prompts) == 2


def test_a_column_that_a_function_of_trls_kind_requires_is_missed_before_anything_is_sampled(
    models: Path, tmp_path: Path
) -> None:
    """Else it would fail on every sample, once all models are loaded."""
    file, trl = tmp_path / "x.jsonl", "tests.rewards.functions:trl"
    for row, message in (({"level": 1}, None), ({"leve": 1}, r"row 1 of data\.train_files .*'level' \(trl\(level\)\)")):
        file.write_text(json.dumps({"prompt": "a", **row}) + "\n")
        config = own(models, "base", train_files=[str(file)], val_files=[str(file)], answer_key=None)
        config = config.model_copy(update={"reward": Reward(functions=[trl, "format"])})
        with pytest.raises(ConfigError, match=message) if message else nullcontext():
            assert len(find_inputs(config, lambda line: None).train.prompts) == 1


def test_a_file_that_the_limit_of_validation_leaves_out_is_named(models: Path) -> None:
    file = str(models / "text.jsonl")
    for limit, n_unused in ((1, 2), (2, 1), (3, 0), (4, 0)):
        lines: list[str] = []
        inputs = find_inputs(own(models, "base", val_files=[file] * 3, val_limit=limit), lines.append)
        assert len(inputs.val.prompts) == min(limit, 3)
        assert [line.partition(":")[0] for line in lines] == [f"data.val_limit={limit}"] * n_unused


def test_a_weighted_file_without_a_prompt_that_fits_is_missed_before_models_are_loaded(
    models: Path, tmp_path: Path
) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "a " * 9, "answer": "b"}) + "\n")
    files = [str(models / "text.jsonl"), str(tmp_path / "long.jsonl")]
    config = own(models, "base", train_files=files, train_weights=[1, 2], max_prompt_length=4)
    with pytest.raises(ConfigError, match=r"data\.train_weights: .*data\.train_files\[1\]"):
        find_inputs(config, lambda line: None)


@pytest.mark.parametrize(
    ("metric", "measured"),
    [
        ("val/acuracy", "val/accuracy, val/reward/\\*, val/hard/\\*"),
        ("val/reverse_kl", "val/accuracy, "),
        ("val/simple/accuracy", "val/accuracy, "),
        ("val/accuracy", None),
        ("val/reward/accuracy", None),
        ("val/hard/accuracy", None),
    ],
)
def test_a_figure_that_no_validation_measures_is_missed_before_models_are_loaded(
    models: Path, metric: str, measured: str | None
) -> None:
    sets = {"hard": {"files": [str(models / "text.jsonl")], "answer_key": "answer"}}
    config = own(models, "base", val_sets=sets)
    for setting in ({"keep_best": metric}, {"stop_early": {"metric": metric}}):
        asked = load({**config.model_dump(exclude_unset=True), "trainer": setting})
        with pytest.raises(ConfigError, match=f"{metric}: .* {measured}") if measured else nullcontext():
            _find_inputs(asked, None, lambda line: None)


def test_a_ground_truth_that_is_a_mapping_is_not_called_absent(models: Path) -> None:
    file = models / "countdown.jsonl"
    file.write_text(json.dumps({"prompt": "a", "reward_model": {"ground_truth": {"target": 1}}}) + "\n")
    with pytest.raises(ConfigError, match=r"answer_key .* text or .*reward_model\.ground_truth.*accuracy"):
        find_inputs(own(models, "base", train_files=[str(file)], answer_key=None), lambda line: None)


def test_questions_of_a_set_that_have_no_answer_are_left_out_with_a_line(models: Path, tmp_path: Path) -> None:
    (file := tmp_path / "x.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer": null}\n')
    sets, lines = {"hard": {"files": [str(file)], "answer_key": "answer"}}, list[str]()
    inputs = find_inputs(own(models, "base", val_sets=sets), lines.append)
    assert [len(questions.questions) for questions in inputs.val_sets] == [1]
    assert any(contains_in_order(line, "data.val_sets.hard", "1 of 2", file) for line in lines)


def test_a_run_goes_on_with_the_questions_of_its_sets_wherever_their_files_are(models: Path, tmp_path: Path) -> None:
    def fingerprints(name: str, answer: str) -> dict[str, str]:
        file = tmp_path / name
        file.write_text(json.dumps({"prompt": "a", "answer": answer}) + "\n")
        sets = {"hard": {"files": [str(file)], "answer_key": "answer"}}
        config = own(models, "base", val_sets=sets)
        return find_inputs(config, lambda line: None).fingerprints(config)

    one, moved, other = fingerprints("x.jsonl", "b"), fingerprints("y.jsonl", "b"), fingerprints("y.jsonl", "c")
    assert one.keys() == {"train", "val", "val_sets.hard", "model.path"}
    assert one == moved and one["val_sets.hard"] != other["val_sets.hard"]


def test_prompts_state_the_day_on_which_their_run_began(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Llama 3.2's template does: a run that went on after midnight was refused for other prompts."""
    monkeypatch.setattr("gkd.data.layouts._STATED", {})
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d') }} a{% for m in messages %}{{ m['content'] }}{% endfor %}"
    save_model(models / "dated", len(tokenizer), tokenizer)
    config = own(models, "dated", apply_chat_template=True)
    saved: Any = SimpleNamespace(data={"day": "2020-02-29"})
    today = _find_inputs(config, None, lambda line: None)
    monkeypatch.setattr("gkd.driver.checkpoints.resume.require_same_data", lambda *_: None)
    monkeypatch.setattr("gkd.driver.checkpoints.resume.differences", lambda *_: "")
    began = _find_inputs(config, saved, lambda line: None)
    assert [one.train.prompts[0].text[:10] for one in (today, began)] == [date.today().isoformat(), "2020-02-29"]
    saved.data = {}  # an earlier version's
    assert day_of(saved) == day_of(None) == date.today() != get_stated_day()


@pytest.mark.parametrize("templated", [False, True])
def test_answers_of_a_set_end_as_the_chat_template_ends_turns(templated: bool, models: Path) -> None:
    """Though nothing else goes through it; a base model's own end token is another."""
    save_model(models / "turns", len(tokenizer := chat_tokenizer()), tokenizer)
    sets = {"hard": {"files": [str(models / "text.jsonl")], "answer_key": "answer", "apply_chat_template": templated}}
    inputs = find_inputs(own(models, "turns", val_sets=sets, apply_chat_template=False), lambda line: None)
    assert EOS in inputs.model.eos_ids and (IM_END in inputs.model.eos_ids) == templated


def test_models_that_a_run_goes_on_with_are_known_by_their_weights(models: Path, tmp_path: Path) -> None:
    """Those that a group serves, wherever they are: of a teacher outside the cluster nothing is known."""
    files, rows = [str(models / "text.jsonl")], tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "teacher": "math"}\n')
    save_reward_model(tmp_path / "judge")
    paths = {name: str(save_model(tmp_path / name)) for name in ("one", "two")}
    paths["moved"] = str(shutil.copytree(paths["one"], tmp_path / "moved"))

    def fingerprints(student: str, tree: dict[str, Any]) -> dict[str, str]:
        data = {"train_files": files, "val_files": files}
        base = {"model": {"path": paths[student]}, "rollout": {"engine": "hf"}, "data": data}
        config = load({**base, **tree})
        own = find_inputs(config, lambda line: None).fingerprints(config)
        return {name: own[name] for name in own if name not in ("train", "val")}

    first = fingerprints("one", {"teacher": {"model": {"path": paths["two"]}}})
    assert first.keys() == {"model.path", "teacher.model.path"} and len(set(first.values())) == 2
    assert fingerprints("moved", {"teacher": {"model": {"path": paths["one"]}}}) == dict.fromkeys(
        first, first["model.path"]
    )
    dealt = {
        "teacher": {"models": {"math": paths["two"]}},
        "data": {"train_files": [str(rows)], "val_files": [str(rows)], "teacher_key": "teacher"},
    }
    assert fingerprints("one", dealt).keys() == {"model.path", "teacher.models.math"}
    outside = {"teacher": {"model": {"path": paths["two"]}, "server_ip": "127.0.0.1"}}
    assert fingerprints("one", outside).keys() == {"model.path"}
    rewarded = {
        "algorithm": {"name": "grpo", "kl": {"coef": 0.1}},
        "rollout": {"n": 2, "engine": "hf"},
        "reward": {"functions": ["reward_model"]},
        "reward_model": {"model": {"path": str(tmp_path / "judge")}},
    }
    scored = fingerprints("one", rewarded)
    assert scored.keys() == {"model.path", "reference.model.path", "reward_model.model.path"}
    assert scored["reference.model.path"] == scored["model.path"] != scored["reward_model.model.path"]


def test_an_engine_states_which_models_it_rates_with(models: Path, tmp_path: Path) -> None:
    save_reward_model(tmp_path / "classifier")
    paths = {"language": models / "base", "classifier": tmp_path / "classifier"}
    files = {"train_files": [str(models / "text.jsonl")], "val_files": [str(models / "text.jsonl")]}

    def check(engine: str, kind: str) -> None:
        rating = {"engine": engine, "model": {"path": str(paths[kind])}}
        config = load(
            {
                "model": {"path": str(models / "base")},
                "rollout": {"n": 2, "engine": "hf"},
                "data": files,
                "algorithm": {"name": "grpo"},
                "reward": {"functions": ["reward_model"]},
                "reward_model": rating,
            }
        )
        require_files(config)
        assert find_inputs(config, lambda line: None).scorers["reward_model"] == str(paths[kind])

    own = "tests.own.likelihood:Likelihood"
    check("classifier", "classifier")
    check(own, "language")
    for engine, kind in (("classifier", "language"), (own, "classifier")):
        with pytest.raises(ConfigError, match=rf"^reward_model\.model\.path={re.escape(str(paths[kind]))}: "):
            check(engine, kind)
    for path in paths.values():  # what an engine takes that states nothing
        assert InferenceEngine.check_model(str(path), "reward_model.model.path") == str(path)
    with pytest.raises(ConfigError, match=r"^x=.*config\.json"):
        InferenceEngine.check_model(str(tmp_path), "x")
    own = tmp_path / "own.py"
    own.write_text(
        "from tests.own.likelihood import Likelihood\n"
        "class Lax(Likelihood):\n  @classmethod\n  def check_model(cls, path, setting): return None\n"
    )
    with pytest.raises(ConfigError, match=r"^reward_model\.engine: Lax\.check_model.* None$"):
        check(f"{own}:Lax", "language")


def test_a_teacher_with_other_tokens_is_named_by_its_own_setting(models: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "other", tokenizer=word_tokenizer(words=("<unk>", "<eos>", "z")))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "teacher": "math"}\n')
    files = [str(tmp_path / "rows.jsonl")]
    tree = {
        "model": {"path": str(models / "base")},
        "teacher": {"models": {"math": str(tmp_path / "other")}},
        "rollout": {"engine": "hf"},
        "data": {"train_files": files, "val_files": files, "teacher_key": "teacher"},
    }
    with pytest.raises(ConfigError, match=r"teacher\.models\.math=.*/other"):
        find_inputs(load(tree), lambda line: None)


@pytest.mark.parametrize(("asks", "message"), [("a", None), ("a d", r"row 1 of data\.train_files .*'d' \(8\)")])
def test_a_tokenizer_may_have_more_tokens_than_a_model_has_rows_if_no_prompt_has_them(
    models: Path, tmp_path: Path, asks: str, message: str | None
) -> None:
    """As that of Gemma 3 has one for images, and its models for text have none."""
    save_model(tmp_path / "text", vocab_size=8)
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": asks, "answer": "b"}) + "\n")
    config = own(models, "base", train_files=[str(tmp_path / "data.jsonl")])
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path / "text")})})
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        assert find_inputs(config, lambda line: None).model.n_tokens == 8


def test_questions_of_sets_have_tokens_that_models_have_rows_for(models: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "text", vocab_size=8)
    (tmp_path / "set.jsonl").write_text(json.dumps({"prompt": "d", "answer": "b"}) + "\n")
    sets = {"hard": {"files": [str(tmp_path / "set.jsonl")], "answer_key": "answer"}}
    config = own(models, "base", val_sets=sets)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path / "text")})})
    with pytest.raises(ConfigError, match=r"row 1 of data\.val_sets\.hard\.files"):
        find_inputs(config, lambda line: None)


def test_what_a_teacher_has_no_row_for_is_not_sampled(models: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "teacher", vocab_size=7)
    teacher = {"model": {"path": str(tmp_path / "teacher")}, "engine": "torch"}
    config = own(models, "base")
    distilling = load({**config.model_dump(include={"model", "data"}, exclude_unset=True), "teacher": teacher,
                       "rollout": {"engine": "hf"}})  # fmt: skip
    inputs = find_inputs(distilling, lambda line: None)
    assert inputs.model.n_tokens == inputs.teacher_vocabulary == 7 < inputs.model.vocabulary


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_sequences_end_before_longrope_takes_other_frequencies(
    models: Path, engine: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines decide by the longest sequence that there could be, and the actor by those of one micro-batch."""
    save_model(tmp_path / "long")
    config = json.loads((tmp_path / "long" / "config.json").read_text())
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 256}
    config["rope_parameters"] = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    (tmp_path / "long" / "config.json").write_text(json.dumps(config))
    asked = own(models, "base")
    asked = asked.model_copy(update={"model": asked.model.model_copy(update={"path": str(tmp_path / "long")})})
    limits = {"max_response_length": 200, "engine": engine}
    for prompt, longest in ((50, 250), (55, 255), (56, 255), (500, 255)):
        caplog.clear()
        data = asked.data.model_copy(update={"max_prompt_length": prompt})
        rollout = asked.rollout.model_copy(update=limits)
        inputs = find_inputs(asked.model_copy(update={"data": data, "rollout": rollout}), lambda _: None)
        assert inputs.max_length == longest  # a scorer has room for one token more
        assert any("LongRoPE" in message and "255" in message for message in caplog.messages) == (prompt > 55)
