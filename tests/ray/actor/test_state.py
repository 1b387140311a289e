"""Checkpoints of real ranks: read by any number of them, equal bit for bit, and exported as Hugging Face models."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gkd.actor.batches import AppliedUpdate
from gkd.actor.group import ActorGroup
from gkd.actor.optimizer import adamw
from gkd.actor.staging import Staging
from gkd.actor.state import part_of, write_part
from gkd.cli.export import main as export
from gkd.cluster.workers.group import PendingCall
from gkd.config import Config
from gkd.driver.checkpoints import checkpoint
from gkd.driver.checkpoints.checkpoint import RunState, SavedCheckpoint
from gkd.errors import RunFailed
from tests.actor import models
from tests.actor.test_lora import base
from tests.ray.actor.ranks import Ranks, call, config, put
from tests.ray.actor.test_lora import tokenizer


def save(ranks: Ranks, path: Path, settings: Config, student: Path) -> SavedCheckpoint:
    """A checkpoint of what the ranks hold."""
    (path / "actor").mkdir(parents=True)
    applied = ray.get([call(w, "state.stage") for w in ranks.workers], timeout=60)
    assert all(one == applied[0] for one in applied)
    written = ray.get([call(w, "state.write_staged", str(path / "actor")) for w in ranks.workers], timeout=60)
    files = {f"actor/{name}": checksum for name, checksum in written}
    tree = settings.model_dump(mode="json")
    saved = SavedCheckpoint(path, "end", RunState(applied[0].step), tree, str(student), "float32", {}, files)
    checkpoint.write(saved)
    return saved


def read(ranks: Ranks, saved: SavedCheckpoint) -> None:
    files = [str(file) for file in saved.rank_files]
    ray.get([call(w, "state.load", files, saved.state.step) for w in ranks.workers], timeout=60)


def everything(saved: SavedCheckpoint) -> dict[str, torch.Tensor]:
    """Weights and moments by name, whole: the rows of all ranks one after the other."""
    parts: dict[str, list[torch.Tensor]] = {}
    for file in saved.rank_files:
        for name, value in load_file(file).items():
            parts.setdefault(name, []).append(torch.from_numpy(value))
    return {name: rows[0] if rows[0].ndim == 0 else torch.cat(rows) for name, rows in parts.items()}


@pytest.fixture
def student(tmp_path: Path) -> Path:
    path = tmp_path / "student"
    base("qwen2 tied").save_pretrained(path)
    tokenizer(path)
    return path


@pytest.mark.parametrize("lora", [{}, {"r": 4, "dropout": 0.5}])
def test_a_checkpoint_goes_from_two_ranks_to_one_and_back_and_is_exported(
    lora: dict[str, float],
    processes: dict[int, Ranks],
    student: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings, run = config(lora=lora), tmp_path / "run"
    two, one = (processes[world].become(str(student), settings) for world in (2, 1))
    for step in (1, 2):
        two.run("update", put(models.scored(5, seed=step)), step, False)
        assert ray.get(call(two.workers[0], "state.stage"), timeout=60) is None  # in the middle of a step
        rows = two.run("update", put(models.scored(5, seed=step + 5)), step)
    (applied, *_) = ray.get([call(w, "state.read_applied") for w in two.workers], timeout=60)
    assert applied.step == 2
    assert applied.rows[1] == rows
    first = save(two, run / "checkpoints" / "step_2", settings, student)
    ray.get([call(w, "state.save", str(tmp_path / "model")) for w in two.workers], timeout=60)
    expected = two.run("update", put(models.scored(5, seed=3)), 3)

    read(one, first)
    (tmp_path / "by_one").mkdir()
    second = save(one, tmp_path / "by_one" / "step_2", settings, student)
    read(two.become(str(student), settings), second)
    third = save(two, tmp_path / "by_two" / "step_2", settings, student)
    contents = [everything(saved) for saved in (first, second, third)]
    assert {name.partition(".")[0] for name in contents[0]} == {"weight", "step", "exp_avg", "exp_avg_sq"}
    assert contents[0].keys() == contents[1].keys() == contents[2].keys()
    assert all(value.equal(contents[1][name]) and value.equal(contents[2][name]) for name, value in contents[0].items())
    assert two.run("update", put(models.scored(5, seed=3)), 3) == expected  # to the last bit

    assert export([str(run), "--step", "2", str(tmp_path / "out")]) == 0
    _the_same_model(tmp_path / "model", tmp_path / "out", adapter=bool(lora))
    assert export([str(run), str(tmp_path / "out")]) == 2
    assert "already holds" in capfd.readouterr().err
    assert export([str(run), "--step", "3", str(tmp_path / "other")]) == 2
    assert "--step 3: " in capfd.readouterr().err
    assert not (tmp_path / "other").exists()
    (run / "summary.json").write_text('{"steps": 3}')
    assert export([str(run), str(tmp_path / "newest")]) == 0
    (line,) = capfd.readouterr().out.splitlines()  # what is newer and needs no export is named
    assert line.startswith("step 2 ") and line.endswith(f" step 3, is in {run / 'model'}")


def _the_same_model(model: Path, out: Path, *, adapter: bool) -> None:
    files = {file.relative_to(model) for file in model.rglob("*") if file.is_file()}
    assert files == {file.relative_to(out) for file in out.rglob("*") if file.is_file()}
    assert (Path("adapter", "adapter_model.safetensors") in files) == adapter
    plain = model.parent / "plain"
    plain.touch()
    for file in [where / name for where in (model, out) for name in files]:
        assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode), file
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        one, other = (AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (model, out))
    assert one.equal(other)
    assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(model).get_vocab()
    assert json.loads((out / "generation_config.json").read_text()) == json.loads(
        (model / "generation_config.json").read_text()
    )


def test_what_is_no_checkpoint_of_this_model_runs_nothing_and_is_named(
    processes: dict[int, Ranks], student: Path, tmp_path: Path
) -> None:
    ranks = processes[1].become(str(student), config())
    ranks.run("update", put(models.scored(3)), 1)
    saved = save(ranks, tmp_path / "step_1", config(), student)
    before = ranks.weights()
    other = tmp_path / "other"
    base("llama").save_pretrained(other)
    with pytest.raises(ray.exceptions.RayTaskError, match=r"another model"):
        read(ranks.become(str(other), config()), saved)
    ranks.become(str(student), config())
    read(ranks, saved)
    assert all(value.equal(before[name]) for name, value in ranks.weights().items())
    traces = tmp_path / "ran"
    for content in (f"cos\nsystem\n(S'touch {traces}'\ntR.".encode(), b""):
        for file in [*saved.rank_files, saved.path / "state.json"]:
            file.write_bytes(content)
        with pytest.raises(ray.exceptions.RayTaskError, match=r"checkpoint .*\bread\b"):
            read(ranks, saved)
        with pytest.raises(checkpoint.DamagedCheckpoint, match=r"state\.json"):
            checkpoint.read(saved.path)
    assert not traces.exists()
    with pytest.raises(ray.exceptions.RayTaskError, match=r"\d+ rows .*\blm\."):
        halves = save(processes[2].become(str(student), config()), tmp_path / "step_0", config(), student)
        read(ranks, replace(halves, files={name: halves.files[name] for name in list(halves.files)[:1]}))


def test_a_copy_that_an_update_came_into_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer, staging = torch.optim.AdamW(model.named_parameters()), Staging(torch.device("cpu"))
    assert staging.copy(optimizer) is None  # no model is there yet
    staging.set(AppliedUpdate(3))
    assert staging.copy(optimizer) == AppliedUpdate(3)

    def part_while_training(*_: object) -> Any:
        staging.begin()
        staging.end(4, {"loss": 1.0}, final=True)
        return part_of(optimizer, torch.device("cpu"), None)

    monkeypatch.setattr("gkd.actor.staging.part_of", part_while_training)
    assert staging.copy(optimizer) is None
    monkeypatch.undo()
    assert staging.copy(optimizer) == AppliedUpdate(4, ({"loss": 1.0},))
    staging.write(optimizer, tmp_path / "one.safetensors")
    with pytest.raises(RunFailed, match="no copy"):
        staging.write(optimizer, tmp_path / "one.safetensors")


def test_weights_that_were_handed_on_change_no_more() -> None:
    """What comes out of a collective that was aborted may look like a gradient."""
    optimizer, staging = torch.optim.AdamW(torch.nn.Linear(3, 2).named_parameters()), Staging(torch.device("cpu"))
    staging.set(AppliedUpdate(3))
    staging.freeze()
    with pytest.raises(RunFailed, match="handed on"):
        staging.begin()
    assert staging.copy(optimizer) == AppliedUpdate(3)


def test_a_copy_is_written_in_the_middle_of_a_forward_pass(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer, kept = adamw(model, config().actor), {name: p.clone() for name, p in model.named_parameters()}
    part = part_of(optimizer, torch.device("cpu"), None)
    for name, value in kept.items():  # as FSDP does, which has whole parameters in the place of its shards
        setattr(model, name, torch.nn.Parameter(torch.zeros_like(value)))
    write_part(optimizer, part, tmp_path / "one.safetensors")
    written = load_file(tmp_path / "one.safetensors")
    assert {name: value.tolist() for name, value in written.items()} == {
        f"weight.{name}": value.tolist() for name, value in kept.items()
    }


def test_a_file_has_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    """As everything else of a run: safetensors would leave it to its owner alone."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.named_parameters())
    before = os.umask(0o027)
    try:
        write_part(optimizer, part_of(optimizer, torch.device("cpu"), None), tmp_path / "rank_00000.safetensors")
    finally:
        os.umask(before)
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {
        "rank_00000.safetensors": 0o640
    }


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.named_parameters())
    part = part_of(optimizer, torch.device("cpu"), None)
    missing = tmp_path / "missing" / "rank_00000.safetensors"
    with pytest.raises(RunFailed, match=rf": {missing}$"):
        write_part(optimizer, part, missing)


@pytest.mark.parametrize("in_time", [True, False])
def test_ranks_are_ended_when_they_have_written_their_checkpoint(
    in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And have handed on what they have; where that is late, what they wait in is aborted for it."""
    done: list[str] = []

    def restart() -> Any:
        done.append("restart")
        return ranks

    def wait(call: PendingCall, timeout_s: float) -> None:
        done.append(call.activity)

    ranks: Any = SimpleNamespace(
        submit_control=lambda method, *_, activity: done.append(method) or PendingCall(activity, (), ()),
        submit_each=lambda *_, **__: None,
    )
    actor = ActorGroup(ranks, config(), "", restart)
    monkeypatch.setattr("gkd.actor.ranks.wait", wait)
    monkeypatch.setattr("gkd.actor.ranks.is_done", lambda *_: in_time)
    for gather in ("gather", "gather_partners"):
        monkeypatch.setattr(f"gkd.actor.ranks.{gather}", lambda *_: None)
    monkeypatch.setattr(actor, "submit_build", lambda: None)
    monkeypatch.setattr(actor, "load", lambda: None)
    actor.write_staged("/there")
    actor._start_again()
    aborted = [] if in_time else ["state.abort_collectives"]
    waits = ["writing /there", "state.keep", *aborted, "handing on what the ranks have", "restart"]
    assert done == ["state.write_staged", *waits]


def test_ranks_that_are_at_different_steps_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [[AppliedUpdate(1), AppliedUpdate(2)], [None, AppliedUpdate(2)], [AppliedUpdate(2), AppliedUpdate(2)]]
    ranks: Any = SimpleNamespace(control=lambda *_, **__: answers.pop(0))
    assert ActorGroup(ranks, config(), "", lambda: ranks).read_applied() == AppliedUpdate(2)
    monkeypatch.setattr("gkd.actor.ranks.WHOLE_S", 0.1)
    stuck: Any = SimpleNamespace(control=lambda *_, **__: [AppliedUpdate(2), None])
    with pytest.raises(RunFailed, match="an update"):
        ActorGroup(stuck, config(), "", lambda: stuck).read_applied()
