"""What ends a run ends it with a code and a line; what need not end it does not; nothing is left behind."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

pytestmark = pytest.mark.e2e
LONG = "trainer.total_steps=100000"


def test_a_lost_replica_loses_nothing_and_the_last_one_ends_the_run(start: Any) -> None:
    run = start(LONG, "rollout.n_gpus_per_node=2", "teacher.n_gpus_per_node=2", "teacher.heartbeat_s=1")
    run.wait_for_step(2, timeout_s=300)
    workers = run.workers()
    for lost in (("teacher", 1), ("rollout", 1)):
        os.kill(workers[lost], signal.SIGKILL)
        run.wait_for_step(run.metrics()[-1]["step"] + 4)
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


def test_a_dead_actor_ends_the_run(start: Any) -> None:
    run = start(LONG, "rollout.engine=hf")
    run.wait_for_step(2)
    os.kill(run.workers()["actor", 0], signal.SIGKILL)
    assert run.end() == 1
    assert any("actor rank 0" in line and "died" in line for line in run.errors())


def test_sigterm_ends_everything(start: Any) -> None:
    run = start(LONG, "rollout.engine=hf")
    run.wait_for_step(2)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 143, run.text()
    assert not any("Traceback" in line for line in run.errors())
