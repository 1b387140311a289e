"""Checkpoints: which are written and kept, what they are called, which is gone on from. An actor of files, in Ray.

Real ranks are in tests/ray/actor/test_state.py, whole runs that go on in tests/e2e.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from gkd.actor.batches import AppliedUpdate
from gkd.cluster.workers.group import PendingCall
from gkd.config import Config, load
from gkd.driver.checkpoints.checkpoint import RunState, complete, read
from gkd.driver.checkpoints.resume import differences, find
from gkd.driver.checkpoints.saving import Checkpoints
from gkd.durable import DirectoryIdentity, compute_checksum
from gkd.errors import ConfigError, RunFailed
from gkd.version import __version__
from tests.error_text import contains_in_order

SAME = {"trainer": {"total_steps": 10}}
DATA = {"train": "1", "val": "2"}


@ray.remote(num_cpus=0)
def later(value: object, file: str) -> object:
    """``value``, once ``file`` is there."""
    while not Path(file).exists():
        time.sleep(0.01)
    return value


class Actor:
    """Has the weights of ``step`` (None: of none), and a file in place of its state, which is perhaps written later."""

    model_path, dtype = "/model", "float32"

    def __init__(self, step: int | None, *, broken: bool = False, until: Path | None = None) -> None:
        self.step, self.broken, self.until = step, broken, until
        self.copies = 0

    def read_applied(self) -> AppliedUpdate:
        if self.step is None:
            raise RunFailed("the actor is in the middle of an update")
        return AppliedUpdate(self.step, ({"actor/loss": 1.0}, {"actor/loss": 2.0}))

    def is_responding(self) -> bool:
        return self.step is not None

    def stage(self) -> AppliedUpdate:
        self.copies += 1
        return self.read_applied()

    def write_staged(self, directory: str) -> PendingCall:
        @ray.remote(num_cpus=0)
        def fail() -> None:
            raise RunFailed("no space left on device: /there")

        file = Path(directory, "rank_00000.safetensors")
        file.write_bytes(b"weights of %d" % (self.step or 0))
        entry = (file.name, compute_checksum(file))
        ref = fail.remote() if self.broken else later.remote(entry, str(self.until)) if self.until else ray.put(entry)
        return PendingCall("writing", ("actor rank 0",), (ref,))


def checkpoints(config: Config, output: Path, first: int = 0) -> Checkpoints:
    output.mkdir(exist_ok=True)
    return Checkpoints(config, DirectoryIdentity.of(output), time.monotonic(), DATA, first)


def test_rows_are_on_the_disk_before_the_checkpoint_that_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    (tmp_path / "metrics.jsonl").write_text('{"step": 5}\n')
    monkeypatch.setattr("gkd.driver.checkpoints.saving.flush", lambda path: done.append(path.name))
    monkeypatch.setattr("gkd.driver.checkpoints.checkpoint.write", lambda saved: done.append("checkpoint"))
    write(load({"trainer": {"total_steps": 10}}), tmp_path, 5)
    assert done == ["metrics.jsonl", "checkpoint"]


def write(config: Config, output: Path, *steps: int) -> None:
    """Checkpoints of these steps, by number of steps."""
    every = config.model_copy(update={"trainer": config.trainer.model_copy(update={"save_every": 1})})
    writer = checkpoints(every, output)
    for step in steps:
        writer.save_if_due(Actor(step), RunState(step, {"drawn": 8 * step}))
        writer.wait()
    writer.finish()


def names(output: Path) -> set[str]:
    return {path.name for path in (output / "checkpoints").glob("step_*")}


@pytest.fixture(autouse=True)
def _ray(local_ray: None) -> None:
    pass


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    caplog.set_level(logging.INFO, "gkd")
    yield caplog


def test_the_newest_whole_one_is_found_and_old_ones_are_forgotten(tmp_path: Path) -> None:
    config = load({"trainer": {"total_steps": 200, "keep_checkpoints": 2}})
    write(config, tmp_path, 8, 9)
    (tmp_path / "checkpoints" / "step_50").mkdir()  # a run was ended while it wrote this one
    write(config, tmp_path, 100)
    newest = find(config, tmp_path)
    assert (newest.path.name, newest.state.step, newest.state.prompts) == ("step_100", 100, {"drawn": 800})
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_100"
    assert names(tmp_path) == {"step_9", "step_100"}


def test_those_by_time_take_no_place_of_those_by_step(tmp_path: Path) -> None:
    config = load({"trainer": {"total_steps": 200, "keep_checkpoints": 2, "save_every": 10, "save_minutes": 1e-9}})
    writer = checkpoints(config, tmp_path)
    for step in range(1, 24):
        writer.save_if_due(Actor(step), RunState(step))
        writer.wait()
    assert names(tmp_path) == {"step_10", "step_20", "step_22", "step_23"}
    assert [read(path).cause for path in complete(tmp_path / "checkpoints")] == ["step", "step", "time", "time"]


def test_by_time_training_goes_on_while_it_is_written(tmp_path: Path) -> None:
    config = load({"trainer": {"total_steps": 200, "save_minutes": 1e-9}})
    writer, actor = checkpoints(config, tmp_path), Actor(1, until=tmp_path / "written")
    for actor.step in (1, 2, 3):
        writer.train(RunState(actor.step, row={}))
        writer.save_if_due(actor, RunState(actor.step))
    assert actor.copies == 1  # the first is under way still
    assert not complete(tmp_path / "checkpoints")
    (tmp_path / "written").touch()
    deadline = time.monotonic() + 30
    while not complete(tmp_path / "checkpoints"):
        assert time.monotonic() < deadline
        writer.train(RunState(4, row={}))
    assert names(tmp_path) == {"step_1"}
    none = checkpoints(load({"trainer": {"save_minutes": None}}), tmp_path / "none")
    none.save_if_due(Actor(1), RunState(1))
    assert not (tmp_path / "none" / "checkpoints").exists()


def test_engines_are_attended_to_while_the_next_one_waits_for_the_one_before(tmp_path: Path) -> None:
    """And what ends the run there is no failure of the checkpoint, which is completed when the run is rescued."""
    writer = checkpoints(load({"trainer": {"total_steps": 200, "save_every": 1}}), tmp_path)
    written, waited_for = tmp_path / "written", list[int]()

    def attend(refs: Sequence[Any]) -> None:
        waited_for.append(len(refs))
        if len(waited_for) == 3:
            raise RunFailed("no engine is left")
        if len(waited_for) == 5:
            written.touch()
        ray.wait(list(refs), timeout=0.1)

    writer.save_if_due(Actor(1, until=written), RunState(1), attend=attend)
    assert not waited_for
    with pytest.raises(RunFailed, match=r"^no engine\b"):
        writer.save_if_due(Actor(2, until=written), RunState(2), attend=attend)
    assert not complete(tmp_path / "checkpoints")
    writer.save_if_due(Actor(2, until=written), RunState(2), attend=attend)
    assert len(waited_for) >= 5 and set(waited_for) == {1}
    assert names(tmp_path) >= {"step_1"}
    writer.rescue(Actor(2))
    assert names(tmp_path) == {"step_1", "step_2"}


def test_one_that_fails_is_a_warning_and_the_last_that_was_asked_for_ends_the_run(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    writer = checkpoints(load({"trainer": {"total_steps": 3, "save_every": 1}}), tmp_path)
    writer.save_if_due(Actor(1), RunState(1))
    writer.save_if_due(Actor(2, broken=True), RunState(2))
    writer.wait()
    (text,) = (record.getMessage() for record in log.records)
    assert contains_in_order(text, "checkpoint", "step 2", "no space", "/there")
    assert names(tmp_path) == {"step_1"}
    writer.finish()
    writer.save_if_due(Actor(3, broken=True), RunState(3))
    writer.wait()
    with pytest.raises(RunFailed, match=r"\bstep 3\b.*: no space"):
        writer.finish()
    stopped_early = checkpoints(load({"trainer": {"total_steps": 300, "save_every": 100}}), tmp_path)
    stopped_early.save_if_due(Actor(4, broken=True), RunState(4), last=True)
    stopped_early.wait()
    with pytest.raises(RunFailed, match=r"\bstep 4\b.*: no space"):
        stopped_early.finish()


def test_a_checkpoint_is_called_what_the_actor_has(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """Whatever the run knew when it ended: between update and row the checkpoint has what is left to do."""

    def ended(actor: Actor, output: Path) -> RunState | None:
        writer = checkpoints(load(SAME), output)
        writer.train(RunState(5, {"drawn": 5}, row={"length": 1.0}))
        writer.save_if_due(Actor(5), RunState(5, {"drawn": 5}))
        writer.train(RunState(6, {"drawn": 6}, row={"length": 2.0}))
        writer.rescue(actor)
        return find(load(SAME), output).state if (output / "checkpoints").exists() else None

    before, within, after = (ended(Actor(step), tmp_path / str(step)) for step in (5, None, 6))
    assert before is not None
    assert (before.step, before.prompts, before.row, before.last_logged_step) == (5, {"drawn": 5}, None, 5)
    assert within is None
    assert after is not None
    assert (after.step, after.prompts, after.last_logged_step) == (6, {"drawn": 6}, 5)
    assert after.row == {"length": 2.0, "actor/loss": 1.5}
    text = log.text
    assert contains_in_order(text, "no checkpoint", "actor", "no checkpoint", "step 6")
    assert contains_in_order(text, f"step 6: {tmp_path / '6' / 'checkpoints' / 'step_6'} ", "trainer.resume=true")


def test_one_that_takes_too_long_is_given_up_and_said(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """As on a disk that does not answer: training goes on, and without a word nobody would know what is missing."""
    writer = checkpoints(load({"trainer": {"save_minutes": 1e-9, "save_timeout_s": 0.1}}), tmp_path)
    writer.save_if_due(Actor(1, until=tmp_path / "written"), RunState(1))
    time.sleep(0.2)
    writer.train(RunState(2, row={}))
    (tmp_path / "written").touch()
    (text,) = log.messages
    assert contains_in_order(text, "step 1 ", "0.1 s (trainer.save_timeout_s)")
    assert not names(tmp_path)


def test_no_error_while_a_run_is_saved_hides_what_ended_it(
    tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> AppliedUpdate:
        raise ValueError("Ray is\nnot there")

    writer, actor = checkpoints(load(SAME), tmp_path), Actor(1)
    monkeypatch.setattr(actor, "read_applied", gone)
    writer.train(RunState(1, row={}))
    writer.rescue(actor)
    first, second = log.messages
    assert contains_in_order(first, "no checkpoint", "ValueError: Ray is") and contains_in_order(
        second, "no checkpoint"
    )


def test_a_dead_actor_leaves_the_one_by_time_and_the_run_names_it(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    writer = checkpoints(load({"trainer": {"save_minutes": 1e-9}}), tmp_path)
    nothing = checkpoints(load(SAME), tmp_path / "nothing")
    nothing.train(RunState(1, row={}))
    nothing.rescue(Actor(0))  # no step is done
    assert not log.records
    writer.save_if_due(Actor(1), RunState(1))
    writer.train(RunState(2, row={}))
    writer.rescue(Actor(None))
    assert f"step 1: {tmp_path / 'checkpoints' / 'step_1'} (" in log.records[-1].getMessage()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"trainer": {"total_steps": 10, "seed": 1}}, r"trainer\.seed=0, this is 1"),
        ({**SAME, "rollout": {"n": 2}}, r"rollout.n=1, this is 2"),
        ({**SAME, "algorithm": {"loss": {"name": "jsd"}}}, r"algorithm\.loss\.name=reverse_kl, .*jsd"),
        ({**SAME, "actor": {"lora": {"r": 4}}}, r"actor.lora.r=null, this is 4"),
        ({"trainer": {"total_steps": 4}}, r"step_5 is beyond trainer.total_steps=4"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(changed: dict[str, object], message: str, tmp_path: Path) -> None:
    write(load(SAME), tmp_path, 5)
    with pytest.raises(ConfigError, match=message):
        find(load(changed), tmp_path)


def test_a_path_may_be_named_from_here_or_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "student").mkdir()
    files = {"data": {"train_files": ["x"], "val_files": ["x"]}, "teacher": {"model": {"path": "/teacher"}}}
    named = [load({**SAME, **files, "model": {"path": path}}) for path in ("student", f"{tmp_path}/student")]
    for first, again in (named, named[::-1]):
        write(first, tmp_path, 5)
        assert "model" not in differences(find(again, tmp_path), again)


def test_what_may_change_is_said(tmp_path: Path) -> None:
    write(load({**SAME, "actor": {"lr": 1e-5}}), tmp_path, 5)
    resumed = {"trainer": {"total_steps": 10, "save_every": 1, "resume": True, "output_dir": str(tmp_path)}}
    changed = load({**resumed, "actor": {"lr": 1e-6}, "rollout": {"temperature": 0.5}})
    saved = find(changed, tmp_path)
    assert differences(saved, changed).endswith(": actor.lr 1e-05 -> 1e-06, rollout.temperature 1 -> 0.5")
    same = load({**resumed, "actor": {"lr": 1e-5}})
    assert differences(saved, same) == ""
    assert saved.version == __version__
    assert differences(dataclasses.replace(saved, version="0.0.1"), same).endswith(f": gkd 0.0.1 -> {__version__}")


def test_data_that_was_moved_and_rewards_that_need_longer_are_no_other_run(tmp_path: Path) -> None:
    def run(directory: str, **reward: object) -> Config:
        models = {"model": {"path": "/student"}, "teacher": {"model": {"path": "/teacher"}}}
        data = {
            "train_files": [f"{directory}/train.jsonl"],
            "val_files": [f"{directory}/val.jsonl"],
            "val_sets": {"hard.v1": {"files": [f"{directory}/hard.jsonl"]}},
            "cache_dir": f"{directory}/cache",
        }
        trainer = {"total_steps": 10, "save_every": 1}
        return load({"trainer": trainer, **models, "data": data, "reward": reward})

    write(run("/here"), tmp_path, 5)
    changed = run("/there", timeout_s=60.0, workers=4, concurrency=8, max_failed_share=0.5)
    assert differences(find(changed, tmp_path), changed).partition(": ")[2] == (
        "data.cache_dir /here/cache -> /there/cache, "
        "data.train_files ['/here/train.jsonl'] -> ['/there/train.jsonl'], "
        "data.val_files ['/here/val.jsonl'] -> ['/there/val.jsonl'], "
        "data.val_sets.hard.v1.files ['/here/hard.jsonl'] -> ['/there/hard.jsonl'], reward.concurrency 32 -> 8, "
        "reward.max_failed_share 0.2 -> 0.5, reward.timeout_s 10 -> 60, reward.workers 2 -> 4"
    )
    with pytest.raises(ConfigError, match=r"reward\.length\.target_length=null, this is 3"):
        find(run("/here", length={"target_length": 3}), tmp_path)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGE = {
    "a flipped bit": (lambda path: _flip(path / "actor" / "rank_00000.safetensors"), "rank_00000.safetensors is not"),
    "a file cut": (lambda path: os.truncate(path / "actor" / "rank_00000.safetensors", 3), "rank_00000.safetensors is"),
    "a file gone": (lambda path: (path / "actor" / "rank_00000.safetensors").unlink(), "no such file or directory"),
    "no JSON": (lambda path: (path / "state.json").write_text("{"), "state.json cannot be read"),
    "a list": (lambda path: (path / "state.json").write_text("[]"), "state.json cannot be read"),
    "empty": (lambda path: (path / "state.json").write_text(""), "state.json cannot be read"),
    "of an earlier version": (
        lambda path: (path / "state.json").write_text('{"state": {"step": 1}, "settings": {}}'),
        "state.json cannot be read: it has no checksum",
    ),
    "a number changed": (
        lambda path: (path / "state.json").write_text((path / "state.json").read_text().replace("48", "40")),
        "state.json is not what was written",
    ),
    "a pickle": (
        lambda path: (path / "state.json").write_bytes(b"cos\nsystem\n(S'false'\ntR."),
        "state.json cannot be",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_newest_intact_one_is_taken_and_damaged_ones_are_named(
    damage: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="complete checkpoint"):
        find(load(SAME), tmp_path)
    write(load(SAME), tmp_path, 5, 6)
    change, message = DAMAGE[damage]
    change(tmp_path / "checkpoints" / "step_6")
    assert find(load(SAME), tmp_path).state.step == 5
    (text,) = (record.getMessage() for record in log.records)
    assert text.startswith(f"{tmp_path / 'checkpoints' / 'step_6'} is damaged")
    assert message in text
    _flip(tmp_path / "checkpoints" / "step_5" / "actor" / "rank_00000.safetensors")
    with pytest.raises(ConfigError, match=r"damaged: step_6: .*; step_5: actor/rank_00000") as e:
        find(load(SAME), tmp_path)
    assert "\n" not in str(e.value)


def test_the_intact_one_stays_until_the_damaged_one_is_written_again(tmp_path: Path) -> None:
    config = load({"trainer": {"total_steps": 100, "keep_checkpoints": 1}})
    write(config, tmp_path, 20)
    _flip(tmp_path / "checkpoints" / "step_20" / "state.json")
    write(config, tmp_path, 5)
    assert find(config, tmp_path).state.step == 5
    write(config, tmp_path, 20)
    assert find(config, tmp_path).state.step == 20
    assert names(tmp_path) == {"step_20"}


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system with hardly any room."""
    path = tmp_path / "full"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", path]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root can make a small file system")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_full_disk_is_named_and_what_was_begun_is_deleted(full: Path, log: pytest.LogCaptureFixture) -> None:
    writer = checkpoints(load({"trainer": {"total_steps": 3, "save_every": 1}}), full)
    (full / "filling").write_bytes(b"x" * (40 << 10))
    writer.save_if_due(Actor(1), RunState(1, {"x" * 50_000: 1}))
    writer.wait()
    (text,) = (record.getMessage() for record in log.records)
    path = full / "checkpoints" / "step_1" / "state.json"
    assert contains_in_order(text, "checkpoint", "step 1 ", "no space", path)
    assert not names(full)
