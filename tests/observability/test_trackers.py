"""What trackers are told, read back from what they wrote."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboardX.proto import event_pb2

from gkd.config import Config, load
from gkd.config.groups import TRACKERS
from gkd.errors import ConfigError
from gkd.observability import tracking
from gkd.observability.trackers.mlflow import MLflow
from gkd.observability.trackers.wandb import WandB
from gkd.observability.tracking import MetricsLog, Trackers, require_trackers
from tests.error_text import contains_in_order

ROWS = [{"step": 0, "epoch": 0.0, "val/accuracy": 0.25}, {"step": 1, "epoch": 0.5, "actor/loss": 1.5}]
SAMPLES = [
    {"step": 1, "prompt": "2 | 3\n=", "response": "5", "rewards": {"accuracy": 1.0}, "tokens": {"text": ["5"]}},
    {"step": 1, "prompt": "1 + 1", "response": "x", "rewards": {"accuracy": "late", "format": 0.5}},
]


def config(*names: str) -> Config:
    return load({"trainer": {"trackers": list(names), "wandb": {"project": "tests"}}})


def write(config: Config, output: Path, rows: list[dict[str, float]], first: int = 0) -> None:
    with Trackers(config, output, first, not first) as trackers, MetricsLog(output / "metrics.jsonl", trackers) as log:
        for row in rows:
            log.write(row)
            if row["step"]:
                trackers.log_samples(int(row["step"]), SAMPLES)


def events(directory: Path) -> Iterator[event_pb2.Event]:
    """Of all event files: each event after its length (8 bytes) and a checksum (4), before another (4)."""
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def scalars(directory: Path) -> list[tuple[int, str, float]]:
    values = [(e.step, v) for e in events(directory) for v in e.summary.value]
    return [(step, v.tag, v.simple_value) for step, v in values if v.WhichOneof("value") == "simple_value"]


def texts(directory: Path) -> list[tuple[int, str]]:
    values = [(e.step, v) for e in events(directory) for v in e.summary.value]
    return [(step, v.tensor.string_val[0].decode()) for step, v in values if v.WhichOneof("value") == "tensor"]


def test_tensorboard_has_every_metric_of_every_step(tmp_path: Path) -> None:
    write(config("tensorboard"), tmp_path, ROWS)
    expected = [(row["step"], name, value) for row in ROWS for name, value in row.items() if name != "step"]
    assert scalars(tmp_path / "tensorboard") == expected
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == ROWS


@pytest.mark.parametrize(
    ("output", "names", "place"),
    [
        ("run", {"run_name": "warm/up"}, "run/tensorboard/warm_up"),
        ("run", {"run_name": "..", "run_group": "lr"}, "run/tensorboard/lr/_"),
        (
            "lr/run",
            {"run_group": "lr", "run_name": "run"},
            "lr/run/tensorboard",
        ),  # which says it already, as of a sweep
    ],
)
def test_tensorboard_has_a_runs_group_and_name(output: str, names: dict[str, str], place: str, tmp_path: Path) -> None:
    (tmp_path / output).mkdir(parents=True)
    write(load({"trainer": {"trackers": ["tensorboard"], **names}}), tmp_path / output, ROWS)
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    assert file.parent == tmp_path / place


def test_tensorboard_has_samples_as_a_table(tmp_path: Path) -> None:
    write(config("tensorboard"), tmp_path, [*ROWS, {"step": 2}])
    ((step, text),) = texts(tmp_path / "tensorboard")  # of the first step, and of none without a validation
    head, _, first, second = text.splitlines()
    assert (step, head) == (1, "| step | prompt | response | reward/accuracy | reward/format |")
    assert (first, second) == ("| 1 | 2 \\| 3<br>= | 5 | 1 | None |", "| 1 | 1 + 1 | x | late | 0.5 |")


def test_samples_go_to_trackers_with_every_validation(tmp_path: Path) -> None:
    trainer = {"trackers": ["tensorboard"], "val_every": 3, "total_steps": 8}
    with Trackers(load({"trainer": trainer}), tmp_path, 0) as trackers:
        for number in range(1, 9):
            trackers.log_samples(number, SAMPLES)
    assert [step for step, _ in texts(tmp_path / "tensorboard")] == [1, 3, 6, 8]  # the last one is validated, too


def test_steps_that_a_resumed_run_does_again_replace_the_first_ones(tmp_path: Path) -> None:
    write(config("tensorboard"), tmp_path, ROWS)
    write(config("tensorboard"), tmp_path, ROWS[1:], first=1)
    restarts = [e.step for e in events(tmp_path / "tensorboard") if e.session_log.status == event_pb2.SessionLog.START]
    assert 1 in restarts  # from where on TensorBoard forgets what came before


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gkd.observability.trackers.wandb.WandB.package", "no_such_package")
    with pytest.raises(ConfigError, match=r"pip install 'gkd\[wandb\]'"):
        require_trackers(config("wandb"))


OWN = """
from pydantic import BaseModel
class Lines:
    class Config(BaseModel):
        name: str = "lines.txt"
    def __init__(self, config, run):
        self.file = (run.output_dir / config.name).open("w")
    def log(self, step, metrics):
        print(step, sorted(metrics), file=self.file)
    def close(self, failed):
        print("failed" if failed else "done", file=self.file)
        self.file.close()
class Bare:
    def log(self, step, metrics): ...
"""


def test_a_users_tracker_takes_metrics_and_settings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    name = f"{tmp_path}/mine.py:Lines"
    write(load({"trainer": {"trackers": [name], "Lines": {"name": "own.txt"}}}), tmp_path, ROWS)
    expected = "0 ['epoch', 'val/accuracy']\n1 ['actor/loss', 'epoch']\ndone\n"
    assert (tmp_path / "own.txt").read_text() == expected
    missing = load({"trainer": {"trackers": [name], "Lines": {"name": "no/such/folder"}}})
    with pytest.raises(ConfigError, match=r"trainer\.trackers: .*mine\.py:Lines .*FileNotFoundError.*mine\.py, line"):
        write(missing, tmp_path, ROWS)
    write(missing, tmp_path, ROWS[1:], first=1)  # of a run that goes on
    assert "FileNotFoundError" in caplog.text


FAILING = """
class Failing:
    def __init__(self, run): ...
    def log(self, step, metrics):
        raise OSError(f"no route\\nto http://bob:hunter2@h:9/x?key=K1 step {step}")
    def close(self, failed):
        raise RuntimeError(f"not closed, failed={failed}")
"""


def test_what_a_users_tracker_raises_is_a_line_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.py").write_text(OWN + FAILING)
    failing, other = f"{tmp_path}/mine.py:Failing", f"{tmp_path}/mine.py:Lines"
    with caplog.at_level("WARNING", logger="gkd"):
        write(config(failing, other), tmp_path, ROWS)
    assert (tmp_path / "lines.txt").read_text().splitlines()[1:] == ["1 ['actor/loss', 'epoch']", "done"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(ROWS)
    step, close = [record.getMessage() for record in caplog.records if record.name == "gkd"]  # each once
    assert contains_in_order(step, f"trainer.trackers: {failing} ", "step 0", "OSError: no route", "mine.py, line")
    assert "http://h:9/x step" in step  # without what may be secret
    assert contains_in_order(close, f"trainer.trackers: {failing} ", "RuntimeError: not closed", "failed=False", "line")


SLOW = """
class Slow:
    def __init__(self, run):
        if run.first_step == 9:
            raise TimeoutError("no answer")
    def log(self, step, metrics):
        if step == 0:
            raise TimeoutError("5 s")
        print(step, file=open(__file__ + ".txt", "a"))
    def close(self, failed): ...
"""


def test_a_time_out_of_a_trackers_own_is_an_error_like_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As urllib and sockets raise it: one step is lost, and not the tracker."""
    (tmp_path / "mine.py").write_text(SLOW)
    slow = config(f"{tmp_path}/mine.py:Slow")
    with caplog.at_level("WARNING", logger="gkd"):
        write(slow, tmp_path, ROWS)
    (text,) = [record.getMessage() for record in caplog.records if record.name == "gkd"]
    assert contains_in_order(text, "step 0", "TimeoutError: 5 s", "mine.py, line")
    assert (tmp_path / "mine.py.txt").read_text() == "1\n"
    with caplog.at_level("WARNING", logger="gkd"):
        write(slow, tmp_path, ROWS[1:], first=9)
    assert "TimeoutError: no answer" in caplog.text


ENDING = """
class Ending:
    def __init__(self, run): ...
    def log(self, step, metrics):
        raise SystemExit(0)
    def close(self, failed):
        raise SystemExit(0)
class Late:
    def log(self, step, metrics): ...
    async def close(self, failed): ...
"""


def test_a_tracker_that_would_end_the_program_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine.py").write_text(ENDING)
    ending = f"{tmp_path}/mine.py:Ending"
    with caplog.at_level("WARNING", logger="gkd"):
        write(config(ending), tmp_path, ROWS)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(ROWS)
    texts = [record.getMessage() for record in caplog.records if record.name == "gkd"]
    assert len(texts) == 2
    assert all(contains_in_order(text, f"trainer.trackers: {ending} ", "SystemExit", "mine.py, line") for text in texts)


def test_a_tracker_with_an_async_method_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ENDING)
    with pytest.raises(ConfigError, match=r"trackers: .*mine\.py:Late: .*close.* async"):
        config(f"{tmp_path}/mine.py:Late")


HANGING = """
import threading
class Hanging:
    going_on = threading.Event()
    def __init__(self, run):
        self.thread = threading.current_thread()
    def log(self, step, metrics):
        assert threading.current_thread() is self.thread
        Hanging.going_on.wait(60)
    def close(self, failed): ...
"""


def test_a_tracker_that_does_not_return_is_left_out_and_holds_nothing_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(OWN + HANGING)
    hanging, other = f"{tmp_path}/mine.py:Hanging", f"{tmp_path}/mine.py:Lines"
    monkeypatch.setattr(tracking, "CALL_S", 2.0)  # which the other one has too, on a busy machine
    left: list[str] = []
    monkeypatch.setattr(tracking, "abandon", left.append)
    with caplog.at_level("WARNING", logger="gkd"):
        write(config(hanging, other), tmp_path, ROWS)
    TRACKERS.load(hanging).going_on.set()
    assert (tmp_path / "lines.txt").read_text().splitlines()[1:] == ["1 ['actor/loss', 'epoch']", "done"]
    assert left == [hanging]  # the program ends without it
    late, left_out = (record.getMessage() for record in caplog.records if record.name == "gkd")
    assert contains_in_order(late, f"trainer.trackers: {hanging} ", "step 0", "2 s")
    assert contains_in_order(left_out, f"trainer.trackers: {hanging} ", "step 0")


def test_a_run_that_begins_again_before_its_first_step_does_without_a_tracker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "away.py").write_text(
        "class Away:\n    def __init__(self, run):\n        raise ConnectionError('away')\n"
        "    def log(self, step, metrics): ...\n    def close(self, failed): ...\n"
    )
    away = config(f"{tmp_path}/away.py:Away")
    with pytest.raises(ConfigError, match="ConnectionError: away"), Trackers(away, tmp_path, 0):
        pass
    with Trackers(away, tmp_path, 0, required=False) as trackers:
        trackers.log(0, {})
    assert "ConnectionError: away" in caplog.text


def test_names_that_a_tracker_takes_for_one_stay_two(tmp_path: Path) -> None:
    write(config("tensorboard"), tmp_path, [{"step": 0, "val/<5/accuracy": 0.5, "val/>5/accuracy": 0.25}])
    assert scalars(tmp_path / "tensorboard") == [(0, "val/_5/accuracy", 0.5), (0, "val/_5/accuracy_2", 0.25)]


def test_a_tracker_that_is_late_takes_what_it_missed_and_is_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server that was away for minutes; of very many steps the last are left out."""
    text = HANGING.replace("        Hanging.going_on.wait(60)\n", "        Hanging.going_on.wait(60)\n        TAKE\n")
    notes = f"open('{tmp_path}/notes', 'a').write("
    text = text.replace("TAKE", f"{notes}f'{{step}} ')").replace("failed): ...", f"failed): {notes}'closed')")
    (tmp_path / "late.py").write_text(text)
    late = f"{tmp_path}/late.py:Hanging"
    monkeypatch.setattr(tracking, "CALL_S", 0.5)
    monkeypatch.setattr(tracking, "MOST_LATE", 4)
    with caplog.at_level("INFO", logger="gkd"), Trackers(config(late), tmp_path, 0) as trackers:
        for step in range(7):
            trackers.log(step, {})
        monkeypatch.setattr(tracking, "CALL_S", 60.0)
        TRACKERS.load(late).going_on.set()
        trackers._started[late].late[-1][1].result(30)
        trackers.log(7, {})
    assert (tmp_path / "notes").read_text() == "0 1 2 3 7 closed"
    was_late, taken = (record.getMessage() for record in caplog.records if record.name == "gkd")
    assert contains_in_order(was_late, late, "step 0") and contains_in_order(taken, late, "; 3 ")


def test_a_disk_that_is_full_for_a_while_costs_tensorboard_the_steps_of_that_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = False

    class Disk(io.FileIO):
        def write(self, data: Any) -> int:
            if full:
                raise OSError(28, "No space left on device")
            return super().write(data)

    monkeypatch.setattr("tensorboardX.record_writer.open_file", lambda path: io.BufferedWriter(Disk(path, "wb")))
    with caplog.at_level("WARNING", logger="gkd"), Trackers(config("tensorboard"), tmp_path, 0) as trackers:
        for step in range(8):
            full = 2 <= step <= 5
            trackers.log(step, {f"metric/{i}": float(step) for i in range(100)})
    assert [step for step, name, _ in scalars(tmp_path / "tensorboard") if name == "metric/99"] == [0, 1, 6, 7]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"trackers": ["FILE:Bare"]}, r"Bare .*\blog .*\bclose\b"),
        ({"trackers": ["FILE:Lines"], "Lines": {"nmae": "x"}}, r"setting trainer\.Lines\.nmae"),
        ({"trackers": ["wandb", "wandb"]}, "wandb .*once"),
        ({"trackers": ["tensorbord"]}, r"trainer\.trackers=tensorbord: .*mean tensorboard\?"),
        ({"project": "x"}, r"setting trainer\.project \(here: trainer\.wandb\.project\)"),
    ],
)
def test_what_is_no_tracker_is_refused(trainer: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    names = [name.replace("FILE", f"{tmp_path}/mine.py") for name in trainer.get("trackers", [])]
    with pytest.raises(ConfigError, match=message):
        load({"trainer": {**trainer, "trackers": names}})


@pytest.mark.parametrize("failed", [False, True])
def test_trackers_of_a_server_are_given_how_a_run_ended(failed: bool) -> None:
    mlflow: Any = object.__new__(MLflow)
    wandb: Any = object.__new__(WandB)
    ends = list[Any]()
    mlflow._id, mlflow._client = "1", SimpleNamespace(set_terminated=lambda *its: ends.append(its))
    wandb._run = SimpleNamespace(finish=lambda exit_code: ends.append(("exit", exit_code)))
    wandb._end = lambda: ends.append("no process is left")
    for tracker in (mlflow, wandb):
        tracker.close(failed)
    assert ends == [("1", "FAILED" if failed else "FINISHED"), ("exit", int(failed)), "no process is left"]
