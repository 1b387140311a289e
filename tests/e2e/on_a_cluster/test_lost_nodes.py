"""Nodes that leave a cluster under a run: what was on them goes on elsewhere, and every sample is trained once."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Run
from tests.e2e.on_a_cluster.conftest import ClusterHere, marked
from tests.error_text import contains_in_order
from tests.ray.cluster.conftest import eventually

BATCH, N = 8, 4
ACTOR = ("actor", 0)


@pytest.fixture
def join(cluster: ClusterHere) -> Iterator[Callable[[int], ClusterHere]]:
    """A call that adds a node of so many GPUs; those that are still there afterwards leave."""
    nodes: list[ClusterHere] = []

    def add(n_gpus: int) -> ClusterHere:
        directory = cluster.directory / f"node{len(nodes)}"
        directory.mkdir()
        node = dataclasses.replace(cluster, directory=directory, home=cluster.directory)
        command = ["./launch/ray_cluster.sh", "worker", "--address", cluster.address, "--simulate-gpus", str(n_gpus)]
        joined = node.run(*command)
        assert joined.returncode == 0, joined.stderr
        nodes.append(node)
        return node

    yield add
    for node in nodes:
        node.node("stop")
        assert not marked(node.directory)


def _kill(node: ClusterHere) -> None:
    """End all of a node's processes at once, as when its machine is gone."""
    for pid in marked(node.directory):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _placed(run: Run) -> dict[tuple[str, int], dict[str, Any]]:
    run.workers()
    return {(row["group"], row["rank"]): row for row in json.loads((run.output / "placement.json").read_text())}


def _restarts(run: Run) -> list[str]:
    events = [json.loads(line) for line in (run.output / "events.jsonl").read_text().splitlines()]
    return [row["text"] for row in events if row["kind"] == "restart"]


def test_an_engine_and_then_the_actor_lose_their_nodes(
    cluster: ClusterHere, join: Callable[[int], ClusterHere], start: Any
) -> None:
    """An engine is started on the node that has room; without the actor's the run begins again from its checkpoint.

    Which node has which group is said by indices of GPUs that the others have not.
    """
    small, large = join(5), join(6)
    size = (f"trainer.batch_size={BATCH}", f"rollout.n={N}", f"trainer.n_logged_samples={BATCH * N}")
    pools = ("trainer.gpus=5", "rollout.gpus=4", "rollout.nnodes=2", "rollout.engine=hf")
    saves = ("trainer.save_every=20", "trainer.val_every=100000", "data.val_limit=16")
    run: Run = start("trainer.total_steps=100000", "schedule.max_staleness=1", *size, *pools, *saves)
    run.wait_for_step(2)
    before = _placed(run)
    near, far = (("rollout", rank) for rank in range(2))
    if before[near]["node"] != before[ACTOR]["node"]:
        near, far = far, near
    assert before[near]["node"] == before[ACTOR]["node"] != before[far]["node"]
    stopped = small.node("stop")
    assert stopped.returncode == 0, stopped.stderr
    join(5)
    assert eventually(lambda: _restarts(run), 100), run.text()
    moved = _placed(run)
    assert moved[far]["node"] not in {row["node"] for row in before.values()}
    assert all(moved[who] == before[who] for who in before if who != far)
    (returned,) = _restarts(run)
    assert contains_in_order(returned, moved[far]["gpu_uuids"][0], before[far]["node"])
    run.wait_for_step(run.metrics()[-1]["step"] + 4)
    _kill(large)
    last = run.metrics()[-1]["step"]
    join(6)
    run.wait_for_step(last + 4)
    again = _placed(run)
    assert again[ACTOR]["node"] not in {row["node"] for row in (*before.values(), *moved.values())}
    assert _restarts(run) == [returned, "1 of trainer.restarts=3"]
    run.process.send_signal(signal.SIGTERM)
    assert run.end(100) == 143, run.text()
    steps = [row["step"] for row in run.metrics()]
    assert steps == list(range(len(steps)))
    rows = [json.loads(line) for line in (run.output / "samples.jsonl").read_text().splitlines()]
    trained = Counter((row["step"], row["prompt_id"], row["index"]) for row in rows)
    assert sum(trained.values()) == len(trained)
    # The row of the step that it was stopped in is written when it goes on.
    n_trained = Counter(step for step, _, _ in trained)
    assert n_trained == dict.fromkeys(range(1, len(n_trained) + 1), BATCH * N)
    assert len(n_trained) - steps[-1] in (0, 1)
