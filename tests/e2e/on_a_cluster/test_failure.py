"""What ends a run ends it with a code and a line; what need not end it does not; nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import date
from typing import Any

import psutil
import pytest

from gkd.driver.checkpoints.checkpoint import complete
from tests.e2e.conftest import Run, alive, run_here
from tests.ray.cluster.conftest import eventually

LONG = "trainer.total_steps=100000"


def _the_monitor_shows(run: Run, workers: dict[str, int], total: int) -> None:
    command = [sys.executable, "-m", "gkd.monitor", str(run.output)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    for group, n in workers.items():
        (row,) = (line.split() for line in shown.splitlines() if line.startswith(f"{group} "))
        assert row[1:4] == [str(n), "of", str(n)]
        assert float(row[4]) > 0.1  # GB
        assert abs(float(row[4]) / n - float(row[6])) < 1
    (last,) = (line for line in shown.splitlines() if line.startswith(str(run.output)))
    assert f"/{total}" in last
    assert "distill/loss" in last
    assert "val/accuracy" in last


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    """Let a process stand still inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_workers_that_are_killed_come_back_and_every_sample_is_trained_once(start: Any) -> None:
    """Both engines, and a replica of the teacher, at once; one engine of two; then the actor, for which the run begins
    again from its last checkpoint by itself. It ends as if nothing was.
    """
    pools = ("rollout.n_gpus_per_node=2", "rollout.engine=hf", "teacher.n_gpus_per_node=2", "teacher.heartbeat_s=1")
    size = ("trainer.batch_size=8", "rollout.n=4", "trainer.n_logged_samples=32", "data.val_limit=16")
    again = ("trainer.restarts=1", "trainer.save_every=3", "trainer.save_minutes=null")
    run = start("trainer.total_steps=40", "schedule.max_staleness=1", *again, *size, *pools)
    run.wait_for_step(2, timeout_s=300)
    before = run.workers()
    with _stopped(before["actor", 0]):  # so that on no machine, however busy, the run ends before the loss
        _the_monitor_shows(run, {"actor": 1, "rollout": 2, "teacher": 2}, 40)
        for lost in (("teacher", 1), ("rollout", 0), ("rollout", 1)):
            os.kill(before[lost], signal.SIGKILL)
        at = run.metrics()[-1]["step"]
    run.wait_for_step(at + 4)  # which takes engines that have come back
    os.kill(next(pid for who, pid in run.workers().items() if who[0] == "rollout" and alive(pid)), signal.SIGKILL)
    run.wait_for_step(at + 8)
    after = run.workers()
    os.kill(after["actor", 0], signal.SIGKILL)
    assert run.end(300) == 0, run.text()
    assert run.errors() == []
    steps = [row["step"] for row in run.metrics()]
    assert steps == list(range(41))
    assert max(row["staleness/max"] for row in run.metrics()[1:]) <= 1
    rows = [json.loads(line) for line in (run.output / "samples.jsonl").read_text().splitlines()]
    trained = Counter((row["step"], row["prompt_id"], row["index"]) for row in rows)
    assert sum(trained.values()) == len(trained) == 40 * 8 * 4
    assert Counter(step for step, _, _ in trained) == dict.fromkeys(range(1, 41), 32)
    events = [json.loads(line) for line in (run.output / "events.jsonl").read_text().splitlines()]
    (begins,) = (i for i, row in enumerate(events) if row["text"] == "1 of trainer.restarts=1")
    deaths, back = ([row for row in events[:begins] if row["kind"] == kind] for kind in ("death", "restart"))
    assert len(deaths) >= 4
    assert all(row["settings"] == ["cluster.worker_restarts"] and row["step"] >= at - 1 for row in deaths)
    # One that is killed before it has loaded is named as what it stands for.
    texts = [re.sub(r"^a new worker in place of (\w+) (\d+)", r"\1 rank \2", row["text"]) for row in deaths]
    named = {" ".join(text.split()[:3]) for text in texts}
    assert named == {"teacher rank 1", "rollout rank 0", "rollout rank 1"}
    assert {" ".join(row["text"].split()[:3]) for row in back} <= named and back
    assert after["actor", 0] == before["actor", 0] != run.workers()["actor", 0]
    assert after["teacher", 0] == before["teacher", 0]
    for row in back:
        (group, _, rank), pid = row["text"].split()[:3], re.search(r"pid (\d+)", row["text"])
        assert pid is not None and int(pid[1]) != before[group, int(rank)]


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
    last = before[-1]["step"] // 3 * 3  # at its end a run validates by itself, before the next step was being sampled
    oldest, *others = complete(run.output / "checkpoints")
    assert f"{(others or [oldest])[-1]} (" in run.text()
    for path in others:
        os.truncate(path / "actor" / "rank_00000.safetensors", 1000)
    goes_on = (f"trainer.output_dir={run.output}", "trainer.resume=true")
    again = start(*settings, f"trainer.total_steps={last}", *goes_on, recipe="grpo")
    assert again.end(300) == 0, again.text()
    after = run.metrics()
    assert [row["step"] for row in after] == list(range(last + 1))
    assert [row["step"] for row in after if "val/accuracy" in row] == list(range(0, last + 1, 3))
    for one, other in zip(before, after, strict=False):
        measured = ("timing_s/", "perf/", "memory/")
        same = [key for key in one if not key.startswith(measured) and not key.endswith("/seconds")]
        assert {key: one[key] for key in same} == {key: other[key] for key in same}
    assert f"step {oldest.name.removeprefix('step_')} from {oldest}" in again.text()
    assert all(f"{path} is damaged" in again.text() for path in others)
    changed = f"trainer.total_steps 100000 -> {last}"
    assert changed in again.text()
    events = [json.loads(line) for line in (run.output / "events.jsonl").read_text().splitlines()]
    assert [changed in row["text"] for row in events if row["kind"] == "resume"] == [True]
    samples = [json.loads(line)["step"] for line in (run.output / "samples.jsonl").read_text().splitlines()]
    assert samples == sorted(samples)
    assert {samples.count(step) for step in range(1, last + 1)} == {4}
    command = again.process.args[3:]
    assert run_here([*command, LONG, "trainer.seed=5"]) == 2
    assert "trainer.seed=0, this is 5" in capfd.readouterr().err
    assert run_here(command) == 0
    done = " ".join(capfd.readouterr().out.split())
    assert re.search(rf"\b{last} steps\b.* {re.escape(str(run.output / 'model'))}", done)


def test_a_run_goes_on_by_itself_whatever_it_loses(start: Any) -> None:
    """Its actor before there is a checkpoint, its only engine, and its actor twice while it begins again."""
    small = ("trainer.batch_size=4", "rollout.n=4", "data.val_limit=16", "rollout.engine=hf", "trainer.restarts=3",
             "cluster.worker_restarts=0")  # fmt: skip
    run = start(LONG, *small, "trainer.save_every=3", "trainer.save_minutes=null", recipe="grpo")
    last, killed = 0, [-1]
    for number, lost in enumerate(("actor", "rollout", "actor", "actor")):
        assert not number or eventually(lambda n=number: f"(restart {n} of" in run.text(), 300), run.text()
        if number < 2:
            run.wait_for_step(last + 4 if number else 1)  # which nobody but the workers begun again can reach
            last = run.metrics()[-1]["step"]
        # Also before it has loaded; but not that of before, which may live on for a moment.
        assert eventually(lambda: alive(actor := run.workers()["actor", 0]) and actor not in killed, 300), run.text()
        killed.append(run.workers()["actor", 0])
        os.kill(run.workers()[lost, 0], signal.SIGKILL)
    assert run.end() == 1
    (line,) = (line for line in run.errors() if line)
    assert line.startswith("failed: actor rank 0 ")
    assert "no step was trained since the first failure: rollout rank 0 " in line
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


def _is_control_service(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # gone meanwhile
        return process.name() == "gcs_server"
    return False


def test_without_rays_control_service_a_run_saves_what_it_has_and_begins_again_or_says_why_it_ends(start: Any) -> None:
    """In a Ray of its own, as the others need theirs."""
    small = ("trainer.batch_size=4", "rollout.n=4", "data.val_limit=16", "trainer.restarts=1", "trainer.val_every=1")
    run = start(LONG, "cluster.address=local", "rollout.engine=hf", *small, recipe="grpo")
    for again in (False, True):
        if again:
            assert eventually(lambda: "going on" in run.text(), 300), run.text()
        run.wait_for_step(run.metrics()[-1]["step"] + 2 if again else 2)
        (service,) = filter(_is_control_service, psutil.Process(run.process.pid).children(recursive=True))
        service.kill()
    assert run.end() == 1
    (line,) = (line for line in run.errors() if line)
    assert line.startswith("failed: Ray's control service (GCS) at ")
    steps = [row["step"] for row in run.metrics()]
    assert steps == list(range(len(steps)))
    newest = max((run.output / "checkpoints").glob("step_*"), key=lambda path: int(path.name.partition("_")[2]))
    saved = json.loads((newest / "state.json").read_text())
    state = saved["state"]
    assert date.fromisoformat(saved["data"]["day"]) <= date.today()  # which prompts state when it goes on
    # A step whose validation was under way is saved with its row, which is logged when the run goes on.
    assert state["step"] == steps[-1] + (state["row"] is not None)
    assert f"step {state['step']}: {newest}" in run.text()
    kept = re.findall(r"^logs of the workers: (.*)/session_latest/logs$", run.text(), re.M)
    assert len(kept) == 2
    for logs in kept:
        shutil.rmtree(logs)
