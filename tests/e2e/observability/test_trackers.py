"""A tracker with a process of its own."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from gkd.config import load
from gkd.errors import ConfigError
from tests.e2e.conftest import ROOT, environment
from tests.error_text import contains_in_order
from tests.observability.test_trackers import ROWS, config, write


def test_wandb_keeps_the_run_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    named = load({"trainer": {"trackers": ["wandb"], "run_name": "a name", "run_group": "a group"}})
    write(named, tmp_path, ROWS)
    (run,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    data = run.read_bytes()
    assert b"val/accuracy" in data
    assert b"actor/loss" in data
    assert all(text in data for text in (b"a name", b"a group", b"trainer/step"))
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    columns, rows = (json.loads(table.read_text())[name] for name in ("columns", "data"))
    assert columns == ["step", "prompt", "response", "reward/accuracy", "reward/format"]
    assert rows == [[1, "2 | 3\n=", "5", 1.0, "None"], [1, "1 + 1", "x", "late", 0.5]]
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=60)
    assert [child.cmdline() for child in alive] == []


def test_a_tracker_that_cannot_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 3)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"^trainer\.trackers: wandb .*WANDB_MODE=offline"):
        write(config("wandb"), tmp_path, ROWS)


def test_without_a_key_a_run_ends_before_it_takes_gpus(tmp_path: Path) -> None:
    names = {name: value for name, value in environment().items() if not name.startswith("WANDB_")}
    command = [sys.executable, "-m", "gkd.main", "+recipe=grpo", "trainer.trackers=wandb"]
    done = subprocess.run(
        [*command, f"trainer.output_dir={tmp_path}/run"], cwd=ROOT, env={**names, "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: trainer.trackers: wandb ") and done.stderr.count("\n") == 1
    assert list(tmp_path.glob("run*")) == []


def test_mlflow_keeps_a_run_that_goes_on_and_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed (pip install 'gkd[mlflow]')")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    mlflow = {"experiment": "tests"}
    trainer = {"trackers": ["mlflow"], "run_name": "a name", "run_group": "a group", "mlflow": mlflow}
    write(load({"trainer": trainer}), tmp_path, ROWS)
    renamed = load({"trainer": trainer | {"run_name": "another", "run_group": "other runs"}})
    write(renamed, tmp_path, [{"step": 2, "actor/loss": 1.25}], first=2)
    assert "INFO" not in capfd.readouterr().err  # between the lines of the run, or in the live one
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["group"]) == ("another", "FINISHED", "other runs")
    assert run.data.params["trainer.run_name"] == "a name"  # MLflow changes none
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "actor/loss")] == [
        (1, 1.5),
        (2, 1.25),
    ]
    assert [file.path for file in client.list_artifacts(run.info.run_id, "samples")] == ["samples/step_1.json"]


def test_settings_that_leave_the_machine_have_no_secrets_of_urls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("mlflow", "wandb"):
        pytest.importorskip(package, reason="the trackers are not installed (pip install 'gkd[mlflow,wandb]')")
    from mlflow.tracking import MlflowClient

    sent: dict[str, Any] = {}

    def init(**given: Any) -> None:
        sent.update(given["config"])
        raise RuntimeError

    monkeypatch.setattr("wandb.init", init)
    monkeypatch.chdir(tmp_path)  # where a store of one's own has its artifacts
    uri = f"sqlite:///{tmp_path / 'own.db'}"
    judge = {"url": "https://bob:hunter2@h.example/v1?api-key=KEY123", "model": "m"}
    for tracker in ("mlflow", "wandb"):
        trainer = {"trackers": [tracker], "mlflow": {"tracking_uri": f"{uri}?timeout=12345"}}
        reward = {"functions": ["judge"], "judge": judge}
        judged = load({"trainer": trainer, "reward": reward, "algorithm": {"name": "grpo"}, "rollout": {"n": 2}})
        with contextlib.suppress(ConfigError):
            write(judged, tmp_path, ROWS)
    logged = MlflowClient(tracking_uri=uri).get_run((tmp_path / "mlflow_id").read_text().split()[0]).data.params
    assert logged["reward.judge.url"] == sent["reward"]["judge"]["url"] == "https://h.example/v1"
    assert logged["trainer.mlflow.tracking_uri"] == sent["trainer"]["mlflow"]["tracking_uri"] == uri


@pytest.mark.parametrize("name", ["is?it", "a%20b", "a b#c&d=é"])
def test_mlflow_keeps_a_run_where_it_is_whatever_its_directory_is_called(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed (pip install 'gkd[mlflow]')")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / name).mkdir()
    write(load({"trainer": {"trackers": ["mlflow"]}}), tmp_path / name, ROWS)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert {"mlflow", "mlflow.db", "mlflow_id"} < {path.name for path in (tmp_path / name).iterdir()}


@pytest.mark.parametrize("way", [shutil.move, shutil.copytree])
def test_mlflow_goes_on_where_the_run_s_directory_is_by_now(
    way: Callable[[Path, Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was moved as the same run, one that was copied as another, whose id is its own."""
    pytest.importorskip("mlflow", reason="MLflow is not installed (pip install 'gkd[mlflow]')")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    write(config("mlflow"), first, ROWS)
    (table,) = first.rglob("step_1.json")
    way(first, second)
    later = (
        "import sys; from pathlib import Path; from tests.observability.test_trackers import config, write\n"
        "write(config('mlflow'), Path(sys.argv[1]), [{'step': 1, 'val/loss': 1.0}], first=1)"
    )  # in a process of its own, as MLflow remembers where a run's artifacts are
    subprocess.run(
        [sys.executable, "-c", later, second], check=True, cwd=ROOT, env=environment() | {"PYTHONPATH": str(ROOT)}
    )
    ids = [(place / "mlflow_id").read_text().split()[0] for place in (first, second) if place.exists()]
    assert len(set(ids)) == len(ids)
    is_copied = way is shutil.copytree
    assert list(first.rglob("step_1.json")) == [table] * is_copied
    assert len({*second.rglob("step_1.json")}) == 1 + is_copied


def test_mlflow_takes_rewards_of_one_last_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed (pip install 'gkd[mlflow]')")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "own.py").write_text("def score(completion): return 1.0\n")
    functions = [f"{tmp_path}/{place}/own.py:score" for place in ("one", "two")]
    settings = {"algorithm": {"name": "grpo"}, "rollout": {"n": 2}, "reward": {"functions": functions}}
    scored = load({**settings, "trainer": {"trackers": ["mlflow"]}})
    values = {f"reward/{label}/mean": float(i) for i, label in enumerate(scored.reward.labels().values())}
    write(scored, tmp_path, [{"step": 0, **values}])
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert client.get_run((tmp_path / "mlflow_id").read_text().split()[0]).data.metrics == values
    assert [record for record in caplog.records if record.name == "gkd"] == []


def test_mlflow_takes_figures_of_several_samples_and_all_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed (pip install 'gkd[mlflow]')")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    odd = {"val/s/difficulty//accuracy": 0.5, "val/s/difficulty/<5/accuracy": 0.25, "val/s/difficulty/>5/accuracy": 1.0}
    row = {"step": 0, "val/hard/pass@4": 0.5, "val/hard/maj@4": 0.25, "val/loss": 2.0, **odd}
    write(config("mlflow"), tmp_path, [row])
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    expected = {"val/hard/pass_4": 0.5, "val/hard/maj_4": 0.25, "val/loss": 2.0, "val/s/difficulty/_/accuracy": 0.5}
    expected |= {"val/s/difficulty/_5/accuracy": 0.25, "val/s/difficulty/_5/accuracy_2": 1.0}
    assert client.get_run((tmp_path / "mlflow_id").read_text().split()[0]).data.metrics == expected
    assert [record for record in caplog.records if record.name == "gkd"] == []


SLOW = """
import time
class Slow:
    def __init__(self, run):
        self.output = run.output_dir
    def log(self, step, metrics):
        pass
    def close(self, failed):
        (self.output / "closing").write_text(str(failed))
        time.sleep(600)
"""


def test_a_run_that_is_stopped_while_a_tracker_closes_is_finished(start: Any, tmp_path: Path) -> None:
    """As while one uploads what it has."""
    (tmp_path / "slow.py").write_text(SLOW)
    small = ("rollout.engine=hf", "rollout.n=2", "trainer.batch_size=2", "trainer.total_steps=2", "data.val_limit=8")
    run = start(*small, f"trainer.trackers=[{tmp_path}/slow.py:Slow]", recipe="grpo")
    deadline = time.monotonic() + 240
    while not (run.output / "closing").exists():
        assert run.process.poll() is None and time.monotonic() < deadline, run.text()
        time.sleep(0.2)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 143
    assert (run.output / "closing").read_text() == "False"
    assert contains_in_order(run.errors()[-1], "SIGTERM", "is finished", f"{run.output}/model")
    assert json.loads((run.output / "summary.json").read_text())["steps"] == 2
    assert (run.output / "report.html").exists() and list((run.output / "results").iterdir())
