"""Which nodes are tried for a run's groups; the cluster is played."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from gkd.cluster.layout.nodes import Node, group_requests
from gkd.cluster.session.connect import Session
from gkd.cluster.workers import reserve
from gkd.config import load

POOLS = {name: {"n_gpus_per_node": 3, "nnodes": 1} for name in ("trainer", "rollout")}
ROLLOUT = {**POOLS["rollout"], "n": 2}
CONFIG = load({"algorithm": {"name": "grpo"}, **POOLS, "rollout": ROLLOUT, "cluster": {"reserve_timeout_s": 60}})


@pytest.mark.parametrize("bad", [("a",), ("b",), ("c",), ("a", "b"), ("a", "d"), ("b", "c")])
def test_nodes_that_do_not_have_what_they_seem_to_have_leave_their_place_to_others(
    bad: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where somebody has a half of two of a node's GPUs: Ray counts a whole one that is nowhere."""
    nodes = [Node(name, name, (0, 1, 2, 3), 32.0, 3, 32.0) for name in "abcd"]
    tried: list[set[str]] = []

    def attempt(session: Session, requests: Any, slots: Any, *_: Any) -> dict[str, Any]:
        tried.append({slot.node_id for slot in slots})
        if tried[-1] & set(bad):
            raise reserve._AttemptFailed("not granted")
        return {}

    monkeypatch.setattr(reserve, "read_nodes", lambda _: nodes)
    monkeypatch.setattr(reserve, "_attempt", attempt)
    monkeypatch.setattr("time.sleep", lambda _: None)
    random.seed(0)
    clock = itertools.count()
    monkeypatch.setattr("time.monotonic", lambda: next(clock) * 0.01)
    reserve.reserve(Session(), group_requests(CONFIG), CONFIG.cluster, nodes_come=False)
    assert not tried[-1] & set(bad) and len(tried[-1]) == 2
    assert len(tried) < 20
