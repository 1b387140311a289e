"""Sweeps: which runs there are, what is refused before the first, and what is shown of those that were done."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gkd.cli import sweep
from gkd.cli.compare import main as main_compare
from gkd.cli.sweep import SweptRun, expand, show
from gkd.cli.train import configure, main
from gkd.cluster.session.shutdown import ENDING, exit_on_signals
from gkd.config import Config, load
from gkd.driver.validation.final_scores import SetScores, write_scores
from gkd.durable import is_held
from gkd.errors import SignalExit
from gkd.observability.metrics import wilson_interval
from tests.observability.runs import make_run

OWN = ["+recipe=grpo", "model.path=/nowhere", "data.val_files=[a.jsonl]", "reward.functions=[length]"]
RATER = "reward_model.model.path=/nowhere"


def test_a_run_for_each_combination(tmp_path: Path) -> None:
    runs = list(expand(["+recipe=grpo,gspo", "actor.lr=1e-5,1e-4", "data.train_files=['a,b']", "rollout.n=4"]))
    assert [run.name for run in runs] == [
        f"recipe={recipe},actor.lr={lr}" for recipe in ("grpo", "gspo") for lr in ("1e-05", "0.0001")
    ]
    assert runs[3].overrides == ("+recipe=gspo", "actor.lr=0.0001", "data.train_files=['a,b']", "rollout.n=4")
    file = tmp_path / "actor.lr=1,trainer.seed=0" / "config.yaml"
    file.parent.mkdir()
    file.write_text("recipe: grpo\n")
    assert [run.overrides for run in expand([str(file), "actor.lr=1,2"])] == [
        (str(file), f"actor.lr={lr}") for lr in (1, 2)
    ]
    (one, other) = expand(["model.path='/m/a b','/m/c'"])
    assert one == SweptRun("model.path=__m_a_b_", ("model.path='/m/a b'",)) and other.name == "model.path=__m_c_"


def test_all_runs_have_the_file_as_it_was_when_the_first_began(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: grpo\nactor: {lr: 1e-5}\n")
    directory = tmp_path / "sweep"
    directory.mkdir()
    for given in (file, directory / sweep.SETTINGS):  # as where an interrupted one is given its own
        runs = sweep.keep_file(list(expand([str(given), "trainer.seed=0,1"])), directory)
        file.write_text("recipe: grpo\nactor: {lr: 0.5}\n")
        assert [run.name for run in runs] == ["trainer.seed=0", "trainer.seed=1"]
        assert [configure(run.overrides).actor.lr for run in runs] == [1e-5, 1e-5]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+recipe=grpo"], "several values"),
        (["+recipe=grpo", "actor.lr=1e-5,fast"], "actor.lr"),
        (["+recipe=grpo", "actor.lr=1e-5,1e-4", "trainer.total_step=1"], "trainer.total_steps"),
        (["+recipe=grpo", "trainer.seed=range(0,2000)"], "2,000 runs"),
        (["actor.lr=1,2", "a b=[1"], "a b"),
        (["+recipe=grpo", "trainer.seed=0,0,1"], "trainer.seed=0"),
        (["+recipe=grpo", "data.prompt_key=a/b,a_b"], "data.prompt_key=a_b"),
        (["+recipe=grpo", "data.prompt_key=glob(*)"], "data.prompt_key=glob(*)"),
        (["+recipe=grpo", "actor.lr=interval(1e-5,1e-4)"], "actor.lr=interval(1e-5,1e-4)"),
        (["+recipe=grpo", "trainer.seed=range(0,2),range(5,7)"], "trainer.seed=range(0,2),range(5,7): "),
        (["+recipe=grpo", "trainer.seed=0,1", "trainer.output_dir=."], "(metrics.jsonl)"),
        (["+recipe=grpo", "trainer.seed=0,1", "trainer.output_dir=a.jsonl/x"], "trainer.output_dir=/"),
        ([*OWN, "data.train_files=[nowhere.jsonl],[a.jsonl]"], "nowhere.jsonl"),
        ([*OWN, "data.train_files=[a.jsonl]", "model.path=.,/nowhere"], "model.path"),
        (["+recipe=grpo", "reward.functions=[accuracy],[reward_model]", RATER], "reward_model.model.path"),
        (["+recipe=grpo", "data.val_sets.x.files=[a.jsonl],[gone.jsonl]"], "gone.jsonl"),
    ],
)
def test_a_sweep_of_which_one_run_cannot_begin_is_refused(
    overrides: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("gkd.cluster.session.shutdown.exit_on_signals", lambda: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "trainer.seed=0").mkdir()
    (tmp_path / "trainer.seed=0" / "metrics.jsonl").touch()
    assert main([*overrides[:1], "-m", *overrides[1:]]) == 2  # and no process was started, which would fail here
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(("codes", "code"), [([0, 0], 0), ([1, 0], 1), ([1, 2], 2), ([0, 143], 1)])
def test_the_worst_of_the_runs_says_how_a_sweep_ended(
    codes: list[int], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(codes)

    def run(run: SweptRun, config: Config, directory: Path, descriptor: int) -> int:
        assert is_held(directory)  # by which it is seen that more runs may come
        return next(left)

    monkeypatch.setattr(sweep, "_run", run)
    monkeypatch.setattr(sweep, "show", lambda *arguments: None)
    assert sweep.sweep(["+recipe=grpo", "actor.lr=0.1,0.2", f"trainer.output_dir={tmp_path}"], configure) == code


def test_an_interrupted_sweep_goes_on_with_the_runs_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str], **_: object) -> None:
            commands.append(command)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        def wait(self) -> int:
            return 1

    monkeypatch.setattr(subprocess, "Popen", Process)
    make_run(tmp_path / "actor.lr=0.1")
    resumed = ["+recipe=grpo", "actor.lr=0.1,0.2", f"trainer.output_dir={tmp_path}", "trainer.resume=true"]
    assert sweep.sweep(resumed, configure) == 1
    ends = [command[-3:] for command in commands]
    group = f"trainer.run_group='{tmp_path.name}'"
    assert ends == [
        [f"trainer.output_dir='{tmp_path}/actor.lr=0.1'", "trainer.resume=auto", group],
        [f"trainer.output_dir='{tmp_path}/actor.lr=0.2'", "trainer.resume=auto", group],
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_while_a_run_is_started_ends_it_and_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Python forks itself for that, and discards what a handler raises meanwhile."""
    done: list[str] = []

    class Process:
        def __init__(self, *_: object, **__: object) -> None:
            with contextlib.suppress(SystemExit):
                signal.raise_signal(number)

        def wait(self) -> int:
            done.append("wait")
            return 0

        def terminate(self) -> None:
            done.append("terminate")

    monkeypatch.setattr(subprocess, "Popen", Process)
    before = {each: signal.getsignal(each) for each in ENDING}
    exit_on_signals()
    try:
        with pytest.raises(SignalExit) as end:
            sweep._run(SweptRun("a", ()), load({}), tmp_path, 0)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert end.value.exit_code == 128 + number and done == ["terminate", "wait"]


def test_all_runs_are_in_one_table_and_one_report(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", 5)
    (tmp_path / "b" / "summary.json").unlink()
    file = io.StringIO()
    show({tmp_path / "a": 0, tmp_path / "b": 1}, Console(file=file, width=200))
    head, one, other = (line.split() for line in file.getvalue().splitlines()[1:4])
    assert head == ["run", "val/accuracy", "seconds"]
    low, high = wilson_interval(0.45, 100)
    assert one == ["a", "0.4500", f"({low:.3f}", "to", f"{high:.3f})", "75"]
    assert other == ["b", "failed,", "exit", "code", "1"]
    data = (tmp_path / "report.html").read_text().partition('id="data">')[2].partition("</script>")[0]
    assert [run["name"] for run in json.loads(data)["runs"]] == ["a", "b"]


def test_no_figure_is_cut_on_a_narrow_terminal(tmp_path: Path) -> None:
    names = [
        "actor.lr=1e-5,algorithm.loss.name=jsd,trainer.seed=3",
        "actor.lr=1e-5,algorithm.loss.name=jsd,trainer.seed=4",
    ]
    for name in names:
        make_run(tmp_path / name)
    file = io.StringIO()
    show({tmp_path / name: 0 for name in names}, Console(file=file, width=60))
    rows = [line.split() for line in file.getvalue().splitlines()[1:4]]
    assert rows[0] == ["run", "val/accuracy", "seconds"]
    assert [row[:2] for row in rows[1:]] == [[name, "0.4500"] for name in names]


def test_runs_are_compared_with_the_first_question_by_question(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As gkd compare does it, where questions are the same; other runs say why not."""
    names = ("lr=1", "lr=2", "lr=3")
    for name, right in zip(names, (20, 40, 20), strict=True):
        make_run(tmp_path / name)
        scores = {f"q{i}": {"accuracy": float(i < right)} for i in range(40)}
        write_scores([SetScores("val", 1, scores)], tmp_path / name)

    def shown(failed: int = 0) -> str:
        file = io.StringIO()
        codes = dict(zip((tmp_path / name for name in names), (0, failed, 0), strict=True))
        show(codes, Console(file=file, width=200))
        return file.getvalue()

    text = shown()
    assert re.search(r"val +lr=2 +1.000 +\+0.500 \(\+0.343 to \+0.657\) +< 0.0001 +< 0.0001", text)
    assert re.search(r"^val: lr=2 .*\baccuracy\b.* lr=1 \(p < 0\.0001, 40 ", text, re.MULTILINE)
    assert re.search(r"^val: lr=3 and lr=1 .* 40 ", text, re.MULTILINE)
    assert "val: lr=3" in shown(failed=1) and "val: lr=2" not in shown(failed=1)
    write_scores([SetScores("val", 1, {f"other{i}": {"accuracy": 1.0} for i in range(40)})], tmp_path / "lr=2")
    assert re.search(r": lr=1 and lr=2 .*\b0 .* val .*\baccuracy\b", shown())
    assert main_compare([str(tmp_path / name) for name in names[::2]]) == 0
    capfd.readouterr()
    write_scores([SetScores("val", 1, {f"q{i}": {"accuracy": 1.0} for i in range(40)})], tmp_path / "lr=2")
    assert main_compare([str(tmp_path)]) == 0  # the sweep's directory
    assert re.search(r"val: lr=2 .*higher .*lr=1", capfd.readouterr().out)
    make_run(tmp_path / "unmeasured")
    assert main_compare([str(tmp_path / "lr=1"), str(tmp_path / "unmeasured")]) == 2
    assert "unmeasured is" in capfd.readouterr().err
