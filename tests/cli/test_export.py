"""Checkpoints as models in directories that are there, and a checkpoint that is not."""

from __future__ import annotations

import importlib
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gkd.actor.loading import load
from gkd.actor.optimizer import adamw
from gkd.actor.state import part_of, write_part
from gkd.cli.export import UNFINISHED, main
from gkd.config import Actor, Lora
from gkd.config import load as load_config
from gkd.data.model_info import fingerprint_weights
from gkd.driver.checkpoints.checkpoint import RunState, SavedCheckpoint, read, read_intact, remove, write
from gkd.driver.checkpoints.run_models import models_of_run
from gkd.errors import ConfigError, RunFailed
from gkd.evaluation.reloading import WeightsDeleted
from tests.data.models import save_model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return save_run(tmp_path)


def save_run(tmp_path: Path, lora: Lora | None = None) -> Path:
    """Save a run with a checkpoint of a tiny model, as one rank leaves it."""
    model = save_model(tmp_path / "student")
    student = load(str(model), lora=lora, dtype=torch.float32)
    optimizer = adamw(student, Actor(lr=1e-3))
    path = tmp_path / "run" / "checkpoints" / "step_2"
    (path / "actor").mkdir(parents=True)
    name = "actor/rank_00000.safetensors"
    files = {name: write_part(optimizer, part_of(optimizer, torch.device("cpu"), None), path / name)}
    config = load_config({"actor": {"lora": lora or Lora()}}).model_dump(mode="json")
    write(SavedCheckpoint(path, "step", RunState(step=2), config, str(model), "float32", {}, files))
    return tmp_path / "run"


def test_a_directory_that_is_there_is_filled_and_not_replaced(run: Path, tmp_path: Path) -> None:
    """A volume's mount point can be neither renamed nor removed, and what is beside it is another disk's."""
    out = tmp_path / "volume" / "out"
    (out / "lost+found").mkdir(parents=True)
    (out / UNFINISHED / "model").mkdir(parents=True)  # of an export that was killed
    (out / UNFINISHED / "model" / "model-00001-of-00002.safetensors").write_bytes(b"half of it")
    before = out.stat().st_ino
    assert main([str(run), str(out)]) == 0
    assert out.stat().st_ino == before
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "lost+found"} <= names
    assert not names & {UNFINISHED, "model-00001-of-00002.safetensors"}
    there, own = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tmp_path / "student", out))
    assert all(torch.equal(own[name], value) for name, value in there.items())


def test_an_export_that_is_ended_while_its_files_are_moved_is_no_model(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads models looks for config.json, which comes last."""
    moved = Path.replace

    def fail_at_config(path: Path, target: Path) -> Path:
        if target == tmp_path / "out" / "config.json":
            assert {"model.safetensors", "tokenizer.json"} <= {file.name for file in target.parent.iterdir()}
            raise KeyboardInterrupt
        return moved(path, target)

    monkeypatch.setattr(Path, "replace", fail_at_config)
    assert main([str(run), str(tmp_path / "out")]) == 130
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("at", ["read_intact", "export"])
@pytest.mark.parametrize("step", [None, 2])
def test_a_checkpoint_that_its_run_deletes_meanwhile_is_followed_by_the_next(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    step: int | None, at: str,
) -> None:  # fmt: skip
    """One that is named is said not to be there."""
    module = "checkpoint" if at == "read_intact" else "run_models"
    own = getattr(importlib.import_module(f"gkd.driver.checkpoints.{module}"), at)
    newest = run / "checkpoints" / "step_2"

    def go_on_first(*arguments: Any) -> Any:
        if newest.exists():
            later = newest.with_name("step_3")
            shutil.copytree(newest / "actor", later / "actor")
            write(replace(read(newest), path=later, state=RunState(step=3)))
            remove(newest)
        return own(*arguments)

    monkeypatch.setattr(f"gkd.driver.checkpoints.{module}.{at}", go_on_first)
    code = main([str(run), str(tmp_path / "out"), *([] if step is None else ["--step", str(step)])])
    (line,) = "".join(capsys.readouterr()).splitlines()
    assert code == (0 if step is None else 2)
    assert re.search(r"\bstep 3\b" if step is None else r"--step 2: .*complete checkpoint.* 3$", line)
    assert (tmp_path / "out" / "config.json").exists() == (step is None)


def test_a_run_that_left_no_checkpoint_has_its_student_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished run has none unless ``trainer.save_every`` was set, and what is asked for is there already."""
    arguments = [str(tmp_path / "run"), str(tmp_path / "out")]
    assert main(arguments) == 2
    (unfinished,) = capsys.readouterr().err.splitlines()
    (tmp_path / "run" / "model").mkdir(parents=True)
    assert main(arguments) == 2
    (finished,) = capsys.readouterr().err.splitlines()
    assert [str(tmp_path / "run" / "model") in line for line in (unfinished, finished)] == [False, True]


def test_an_evaluation_of_a_run_has_its_checkpoints_and_its_student_of_a_later_step(run: Path, tmp_path: Path) -> None:
    save_model(run / "model")
    names = []
    for steps in (3, 2):
        (run / "summary.json").write_text(f'{{"steps": {steps}}}')
        models = models_of_run(run, load_config({}))
        names.append([further.name for further in models.further])
        assert models.base == str(tmp_path / "student")
    assert names == [["step_2", "step_3"], ["step_2"]]


@pytest.mark.parametrize("at", ["listing", "reading"])
def test_a_checkpoint_that_its_run_deletes_meanwhile_is_not_called_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at: str
) -> None:
    path = run / "checkpoints" / "step_2"
    later = shutil.copytree(path, path.with_name("step_3"))
    write(replace(read(path), path=later, state=RunState(step=3)))

    def read_late(own: Path) -> Any:
        remove(path)
        return read_intact(own)

    if at == "listing":
        monkeypatch.setattr("gkd.driver.checkpoints.checkpoint.read_intact", read_late)
    further = {own.name: own for own in models_of_run(run, load_config({})).further}
    assert list(further) == (["step_3"] if at == "listing" else ["step_2", "step_3"])
    remove(path)
    assert next(further["step_3"].read())
    if at == "reading":
        with pytest.raises(WeightsDeleted, match=r"/step_2 "):
            next(further["step_2"].read())
        (later / "actor" / "rank_00000.safetensors").unlink()  # of one that is there this is damage
        with pytest.raises(RunFailed, match=r"checkpoint .*\bread\b"):
            next(further["step_3"].read())
    assert not caplog.records


@pytest.mark.parametrize("lora", [Lora(), Lora(r=2)], ids=["whole", "adapter"])
@pytest.mark.parametrize("states", [True, False])
def test_an_adapter_is_not_laid_over_other_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lora: Lora, states: bool
) -> None:
    """Checkpoints of earlier versions do not state what they were trained from."""
    run, model = save_run(tmp_path, lora), tmp_path / "student"
    path = run / "checkpoints" / "step_2"
    write(replace(read(path), data={"model.path": fingerprint_weights(str(model))} if states else {}))
    assert main([str(run), str(tmp_path / "same")]) == 0
    assert len(models_of_run(run, load_config({})).further) == 1
    save_model(model)
    capsys.readouterr()
    refused = states and lora.r is not None
    assert main([str(run), str(tmp_path / "other")]) == (2 if refused else 0)
    assert (tmp_path / "other" / "config.json").exists() != refused
    if refused:
        (line,) = capsys.readouterr().err.splitlines()
        assert "model.path" in line and str(path) in line
    with pytest.raises(ConfigError, match=r"model\.path.*/step_2\b") if states else nullcontext():  # its step 0 is not
        models_of_run(run, load_config({}))


def test_a_later_student_is_named_where_no_step_was_asked_for(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "summary.json").write_text('{"steps": 3}')
    for name, arguments, named in (("newest", [], True), ("own", ["--step", "2"], False)):
        assert main([str(run), str(tmp_path / name), *arguments]) == 0
        line = capsys.readouterr().out
        assert line.startswith("step 2 of ") and (str(run / "model") in line) == named
