"""What is said of GPUs before any is reserved; the nodes are played."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from gkd.cluster.layout.nodes import Node
from gkd.cluster.workers import placement
from gkd.config import load
from tests.error_text import contains_in_order


@pytest.mark.parametrize(
    ("settings", "free", "unused"),
    [
        ({}, [8], 5),  # actor, rollout, teacher
        ({}, [2, 8], 0),  # of a cluster, which has others
        ({}, [3], 0),
        ({"rollout": {"n_gpus_per_node": 6}}, [8], 0),
        ({"rollout": {"n_gpus_per_node": 4}}, [8], 2),
        ({"placement": "8gpu"}, [16], 0),  # which says how many it takes
    ],
)
def test_gpus_that_auto_leaves_idle_are_counted(
    settings: Mapping[str, Any], free: list[int], unused: int, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    nodes = [Node(str(n), str(n), tuple(range(16)), 64.0, n, 64.0) for n in free]  # others hold the rest
    monkeypatch.setattr(placement, "read_nodes", lambda: nodes)
    caplog.set_level(logging.INFO, "gkd")
    config = load({"placement": "auto", **settings})
    assert placement.lay_out(config) is config
    assert len(caplog.messages) == bool(unused)
    if unused:
        assert contains_in_order(caplog.messages[0], unused, sum(free), "placement=auto", sum(free))
