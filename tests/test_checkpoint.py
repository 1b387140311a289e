"""Finding checkpoints: only whole ones, only of the same run. Whole runs that go on are in tests/e2e."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gkd.checkpoint import Checkpoints, State, cut, find
from gkd.config import Config, load
from gkd.errors import ConfigError, RunFailed

SAME = {"trainer": {"total_steps": 10}}


class Actor:
    """Writes a file where the real one writes its state, or fails."""

    def __init__(self, settled: bool = True, broken: bool = False) -> None:
        self.settled, self.broken = settled, broken

    def save_state(self, directory: str) -> None:
        if self.broken:
            raise RunFailed("the actor is gone")
        Path(directory).mkdir(parents=True)


def write(config: Config, output: Path, *steps: int) -> None:
    for step in steps:
        Checkpoints(config, output, 0.0).write(Actor(), State(step, {"drawn": 8 * step}))


def test_the_newest_whole_one_is_found_and_old_ones_are_forgotten(tmp_path: Path) -> None:
    config = load({"trainer": {"total_steps": 200, "keep_checkpoints": 2}})
    write(config, tmp_path, 8, 9, 100)
    (tmp_path / "checkpoints" / "step_101").mkdir()  # the run was ended while it wrote this one
    path, state = find(config, tmp_path)
    assert (path.name, state.step, state.prompts) == ("step_100", 100, {"drawn": 800})
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_100"
    assert {p.name for p in (tmp_path / "checkpoints").glob("step_*")} == {"step_9", "step_100", "step_101"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"trainer": {"total_steps": 10, "seed": 1}}, r"was made with trainer.seed=0, this is 1"),
        ({**SAME, "rollout": {"n": 2}}, r"rollout.n=1, this is 2"),
        ({**SAME, "algorithm": {"loss": {"name": "jsd"}}}, r"algorithm.loss.name=reverse_kl, this is jsd"),
        ({"trainer": {"total_steps": 5}}, r"all of trainer.total_steps=5 are done"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(changed: dict[str, object], message: str, tmp_path: Path) -> None:
    write(load(SAME), tmp_path, 5)
    with pytest.raises(ConfigError, match=message):
        find(load(changed), tmp_path)
    assert find(load({**SAME, "actor": {"lr": 1e-3}}), tmp_path)[1].step == 5  # what may change


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"state": {"steps": 1}, "settings": {}}'])
def test_what_cannot_be_read_is_named(content: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no complete checkpoint"):
        find(load(SAME), tmp_path)
    write(load(SAME), tmp_path, 5)
    (tmp_path / "checkpoints" / "step_5" / "state.json").write_text(content)
    with pytest.raises(ConfigError, match=r"state.json cannot be read"):
        find(load(SAME), tmp_path)


def test_a_run_that_ends_early_saves_what_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpoints(load(SAME), tmp_path, 0.0)
    checkpoints.rescue(Actor())  # no step is done: nothing to save
    assert not (tmp_path / "checkpoints").exists()
    checkpoints.after(Actor(), State(3))
    for actor in (Actor(settled=False), Actor(broken=True)):
        checkpoints.rescue(actor)
        with pytest.raises(ConfigError):
            find(load(SAME), tmp_path)
    checkpoints.rescue(Actor())
    assert find(load(SAME), tmp_path)[1].step == 3


def test_lines_of_steps_that_are_done_again_are_cut(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(6)) + '{"step": 6, "lo')
    cut(file, 3)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [0, 1, 2, 3]
    cut(tmp_path / "missing.jsonl", 3)
