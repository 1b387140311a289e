"""What ends a run ends it with a code and a line; what need not end it does not; nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from gkd.driver.checkpoint import complete
from tests.e2e.conftest import Run, run_here
from tests.ray.cluster.conftest import eventually

LONG = "trainer.total_steps=100000"


def _the_monitor_shows(run: Run, workers: dict[str, int]) -> None:
    command = [sys.executable, "-m", "gkd.monitor", str(run.output)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    for group, n in workers.items():
        (row,) = (line.split() for line in shown.splitlines() if line.startswith(f"{group} "))
        assert row[1:4] == [str(n), "of", str(n)]
        assert float(row[4]) > 0.1  # GB
        assert abs(float(row[4]) / n - float(row[6])) < 1
    (last,) = (line for line in shown.splitlines() if line.startswith(str(run.output)))
    assert "/100000" in last
    assert "distill/loss" in last
    assert "val/accuracy" in last


def test_a_lost_replica_loses_nothing_and_the_last_one_ends_the_run(start: Any) -> None:
    pools = ("rollout.n_gpus_per_node=2", "rollout.engine=hf", "teacher.n_gpus_per_node=2", "teacher.heartbeat_s=1",
             "trainer.restarts=0")  # fmt: skip
    run = start(LONG, *pools)
    run.wait_for_step(2, timeout_s=300)
    workers = run.workers()
    _the_monitor_shows(run, {"actor": 1, "rollout": 2, "teacher": 2})
    for lost in (("teacher", 1), ("rollout", 1)):
        os.kill(workers[lost], signal.SIGKILL)
        run.wait_for_step(run.metrics()[-1]["step"] + 3)
    steps = [row["step"] for row in run.metrics()]
    assert steps == list(range(len(steps)))
    assert "rollout rank 1" in run.text()
    os.kill(workers["teacher", 0], signal.SIGKILL)
    assert run.end() == 1
    failed = [line for line in run.errors() if line.startswith("failed:")]
    assert len(failed) == 1
    assert "teacher" in failed[0]
    assert not any("Traceback" in line for line in run.errors())
    assert not (run.output / "summary.json").exists()


def test_a_dead_actor_ends_the_run_which_goes_on_exactly_where_it_was(
    start: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = (
        "trainer.restarts=0",
        "trainer.save_minutes=0.001",
        "trainer.keep_checkpoints=100",
        "actor.lr_decay=constant",
        "trainer.val_every=3",
        "trainer.batch_size=8",
        "rollout.n=4",
    )
    run = start(LONG, *settings, recipe="grpo")
    run.wait_for_step(5)
    deadline = time.monotonic() + 60
    while len(complete(run.output / "checkpoints")) < 2:
        assert time.monotonic() < deadline, run.text()
        time.sleep(0.1)
    os.kill(run.workers()["actor", 0], signal.SIGKILL)
    assert run.end() == 1
    assert any("actor rank 0" in line and "died" in line for line in run.errors())
    assert not any("Traceback" in line for line in run.errors())
    before = run.metrics()
    last = before[-1]["step"]
    oldest, *others = complete(run.output / "checkpoints")
    assert f"{(others or [oldest])[-1]} (go on with trainer.resume=true)" in run.text()
    for path in others:
        os.truncate(path / "actor" / "rank_00000.safetensors", 1000)
    goes_on = (f"trainer.output_dir={run.output}", "trainer.resume=true")
    again = start(*settings, f"trainer.total_steps={last}", *goes_on, recipe="grpo")
    assert again.end(300) == 0, again.text()
    after = run.metrics()
    assert [row["step"] for row in after] == list(range(last + 1))
    for one, other in zip(before, after, strict=True):
        # The last step of a run is validated as well.
        measured = ("timing_s/", "perf/", "memory/")
        same = [key for key in one if not key.startswith(measured) and not key.endswith("/seconds")]
        assert {key: one[key] for key in same} == {key: other[key] for key in same}
    assert f"going on after step {oldest.name.removeprefix('step_')} from {oldest}" in again.text()
    assert all(f"{path} is damaged and left out: actor/rank_00000" in again.text() for path in others)
    assert f"goes on with other settings: trainer.total_steps 100000 -> {last}" in again.text()
    samples = [json.loads(line)["step"] for line in (run.output / "samples.jsonl").read_text().splitlines()]
    assert samples == sorted(samples)
    assert {samples.count(step) for step in range(1, last + 1)} == {4}
    command = again.process.args[3:]
    assert run_here([*command, LONG, "trainer.seed=5"]) == 2
    assert "was made with trainer.seed=0, this is 5" in capfd.readouterr().err
    assert run_here(command) == 0
    done = " ".join(capfd.readouterr().out.split())
    assert f"is finished: all {last} steps are done and the trained student is in {run.output / 'model'}" in done


def test_a_run_goes_on_by_itself_whatever_it_loses(start: Any) -> None:
    """Its actor, before there is a checkpoint and after, its only engine, and then more than it may."""
    small = ("trainer.batch_size=4", "rollout.n=4", "data.val_limit=16", "rollout.engine=hf", "trainer.restarts=3",
             "cluster.worker_restarts=0")  # fmt: skip
    run = start(LONG, *small, "trainer.save_every=3", "trainer.save_minutes=null", recipe="grpo")
    last = 0
    for number, lost in enumerate(("actor", "rollout", "actor", "rollout")):
        assert not number or eventually(lambda n=number: f"(restart {n} of" in run.text(), 90), run.text()
        run.wait_for_step(last + 1 if not number else last + 4)  # which nobody but the workers begun again can reach
        os.kill(run.workers()[lost, 0], signal.SIGKILL)
        last = run.metrics()[-1]["step"]
    assert run.end() == 1
    (line,) = (line for line in run.errors() if line)
    assert line.startswith("failed: rollout rank 0 ")
    assert [f"restart {number} of trainer.restarts=3" in run.text() for number in (1, 2, 3, 4)] == [True] * 3 + [False]
    steps = [row["step"] for row in run.metrics()]
    assert steps == list(range(len(steps)))
    samples = [json.loads(line)["step"] for line in (run.output / "samples.jsonl").read_text().splitlines()]
    assert samples == sorted(samples)
    assert {samples.count(step) for step in steps[1:]} == {4}
    events = [json.loads(line) for line in (run.output / "events.jsonl").read_text().splitlines()]
    assert [row["text"] for row in events if row["kind"] == "restart"] == [
        f"{i} of trainer.restarts=3" for i in (1, 2, 3)
    ]


def test_without_rays_control_service_a_run_saves_what_it_has_and_begins_again_or_says_why_it_ends(start: Any) -> None:
    """In a Ray of its own, as the others need theirs."""
    small = ("trainer.batch_size=4", "rollout.n=4", "data.val_limit=16", "trainer.restarts=1")
    run = start(LONG, "cluster.address=local", "rollout.engine=hf", *small, recipe="grpo")
    for again in (False, True):
        if again:
            assert eventually(lambda: "going on after step " in run.text(), 90), run.text()
        run.wait_for_step(run.metrics()[-1]["step"] + 2 if again else 2)
        (service,) = (
            process.pid
            for process in psutil.Process(run.process.pid).children(recursive=True)
            if process.name() == "gcs_server"
        )
        os.kill(service, signal.SIGKILL)
    assert run.end() == 1
    (line,) = (line for line in run.errors() if line)
    assert line.startswith("failed: Ray's control service (GCS) at ")
    steps = [row["step"] for row in run.metrics()]
    assert steps == list(range(len(steps)))
    saved = run.output / "checkpoints" / f"step_{steps[-1]}"
    assert (saved / "state.json").exists()
    assert f"checkpoint of step {steps[-1]}: {saved}" in run.text()
    kept = re.findall(r"^logs of the workers: (.*)/session_latest/logs$", run.text(), re.M)
    assert len(kept) == 2
    for logs in kept:
        shutil.rmtree(logs)
