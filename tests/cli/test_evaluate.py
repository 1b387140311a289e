"""gkd evaluate: what it refuses before anything starts, in one line."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gkd.cli.evaluate import _compose_for_run, configure, main
from gkd.driver.checkpoints.run_models import RunModels
from gkd.errors import ConfigError
from gkd.evaluation.reloading import FurtherWeights
from tests.data.models import save_model


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_engine_over_several_gpus_needs_no_other_setting(tmp_path: Path) -> None:
    """Wherever its width is set: evaluate.mode decides how many engines there are."""
    file = tmp_path / "own.yaml"
    file.write_text("rollout: {tensor_parallel_size: 2, gpus: null}\n")
    named = tmp_path / "named.yaml"
    named.write_text("rollout: {tensor_parallel_size: 2, gpus: 0-3}\n")
    wide = "rollout.tensor_parallel_size"
    for own, size in (([str(file)], 2), ([f"{wide}=2"], 2), ([str(file), f"{wide}=4"], 4), ([str(named)], 4)):
        config, _ = configure(["models.base=none", SET, *own])
        assert config.rollout.n_gpus_per_node == size, own


SET = "evaluate.sets.sums={files:[none.jsonl],answer_key:answer}"


@pytest.mark.parametrize(
    ("idle", "needed"),
    [
        ("evaluate.fixed_k.k=2", "evaluate.strategies=[fixed_k]"),
        ("reward.length.target_length=3", "evaluate.sets.sums.rewards=[length]"),
    ],
)
def test_settings_of_a_strategy_or_a_reward_that_is_not_named_are_warned_of(
    idle: str, needed: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["models.base=/none", SET, "rollout.engine=hf", idle])
    line = " ".join(capsys.readouterr().out.split())
    assert f"{idle.rpartition('.')[0]}.* change nothing: " in line
    assert needed.partition("=")[0].replace("sums", "NAME") in line
    main(["models.base=/none", SET, "rollout.engine=hf", idle, needed])
    assert "nothing" not in capsys.readouterr().out


def test_a_runs_own_settings_of_rewards_are_not_warned_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "m")
    (tmp_path / "config.yaml").write_text(
        f"recipe: grpo\nmodel.path: {tmp_path}/m\n"
        "data: {train_files: [a.jsonl], val_files: [none.jsonl], answer_key: c}\n"
        "reward: {functions: [accuracy], length: {target_length: 3}}\n"
    )
    trained = FurtherWeights("step_1", "f", lambda: iter(()))
    monkeypatch.setattr(
        "gkd.driver.checkpoints.run_models.models_of_run", lambda *_: RunModels(str(tmp_path / "m"), (trained,))
    )
    monkeypatch.chdir(tmp_path)
    assert main([str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert "none.jsonl" in printed.err and "nothing" not in printed.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a model: gkd evaluate models.NAME=DIR +sets=NAME"),
        (
            ["models.base=none"],
            "there is nothing to measure: name a set of questions (+sets=NAME or evaluate.sets.NAME.",
        ),
        (["models.base=none", SET, "actor.lr=1"], "actor.lr has no effect on an evaluation, which takes models, "),
        (
            ["models.base=none", SET, "rollout.nnodes=2"],
            "rollout.nnodes: evaluate.mode sets how many GPUs an evaluation",
        ),
        (["models.base=none", SET, "rollout.n=2"], "rollout.n is of training; a set of questions has its own: "),
        (
            ["models.base=none", SET, "rollout.top_k=2"],
            "rollout.top_k is of training; a set of questions has its own: ",
        ),
        (["nowhere"], "nowhere: no run is there (its config.yaml); models.NAME=DIR measures a model by itself"),
        (["one", "two"], "one and two: one run at a time; of several name the models: models.NAME=RUN/model"),
        (["+recipe=grpo", SET], "recipe is for training; an evaluation takes +sets=NAME and placement=NAME"),
        (["models.base=none", "+sets=gsm9k"], "sets=gsm9k: no such choice (did you mean gsm8k?)"),
        (["models.base=none", SET, "evaluate.sets.sums.sampels=2"], "unknown setting evaluate.sets.sums.sampels (did "),
        (["models.base=none", SET, "evaluate.strategies=[]"], "evaluate.strategies names none, or one twice"),
        (
            ["models.base=none", SET, "reward.functions=[format]"],
            "reward.functions is of training; a set of questions has its own: evaluate.sets.NAME.rewards",
        ),
        (
            ["models.base=/none", SET, "rollout.engine=hf"],
            "models.base=/none: no such directory, and no model of that ",
        ),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(str(tmp_path))
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}"), error
    assert error.count("\n") == 1


def test_a_run_of_a_sweep_is_named_though_its_directory_looks_like_a_setting(tmp_path: Path) -> None:
    run = tmp_path / "actor.lr=1e-05"
    run.mkdir()
    (run / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"1e-05"):
        configure([str(run), "another"])
    with pytest.raises(ConfigError, match="a model"):
        configure([])


@pytest.mark.parametrize(
    ("overrides", "sets"),
    [
        ("evaluate.sets.val.limit=4", {"val": (4, 1)}),
        ("++evaluate.sets.val.samples=3 evaluate.sets.val.temperature=1", {"val": (9, 3)}),
        ("++evaluate.sets.own.files=[b.jsonl]", {"own": (None, 1)}),
        ("evaluate.sets.v1.0.files=[b.jsonl]", {"v1.0": (None, 1)}),
        ("evaluate.sets.v1.0={files:[b.jsonl],limit:2}", {"v1.0": (2, 1)}),
        ("+sets=gsm8k", {"gsm8k": (None, 1)}),
    ],
)
def test_a_runs_own_questions_are_asked_unless_others_are_named(
    overrides: str, sets: dict[str, tuple[int | None, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another limit of them, or more samples, names none."""
    save_model(tmp_path / "m")
    (tmp_path / "config.yaml").write_text(
        f"recipe: grpo\nmodel.path: {tmp_path}/m\n"
        "data: {train_files: [a.jsonl], val_files: [a.jsonl], answer_key: c}\n"
        "data.val_limit: 9\nreward.functions: [accuracy]\n"
    )
    monkeypatch.setattr(
        "gkd.driver.checkpoints.run_models.models_of_run", lambda *_: RunModels(str(tmp_path / "m"), ())
    )
    config, _ = _compose_for_run(str(tmp_path), overrides.split())
    assert {name: (its.limit, its.samples) for name, its in config.evaluate.sets.items()} == sets
    # As false excludes a system prompt, which may be laid over a set.
    assert all(its.apply_chat_template is None for its in config.evaluate.sets.values())


def test_a_run_is_measured_where_its_teacher_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another machine than that of a large teacher: nothing of it is measured."""
    save_model(tmp_path / "m")
    (tmp_path / "config.yaml").write_text(
        f"recipe: on_policy_distill\nmodel.path: {tmp_path}/m\nteacher.model.path: {tmp_path}/gone\n"
        "data: {train_files: [a.jsonl], val_files: [b.jsonl]}\n"
    )
    monkeypatch.setattr(
        "gkd.driver.checkpoints.run_models.models_of_run", lambda *_: RunModels(str(tmp_path / "m"), ())
    )
    config, _ = _compose_for_run(str(tmp_path), [])
    assert [its.files for its in config.evaluate.sets.values()] == [["b.jsonl"]]
