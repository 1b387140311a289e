"""How Ray is started and joined."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray._private import ray_constants

from gkd.cluster.session.shutdown import UV, init_ray


@pytest.mark.parametrize("requested", [False, True])
def test_workers_are_started_by_this_python_also_where_uv_run_started_it(
    requested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default Ray starts them by ``uv run`` then, and sends them the current directory."""
    monkeypatch.setattr(ray_constants, UV, True)
    monkeypatch.delenv(UV, raising=False)
    if requested:
        monkeypatch.setenv(UV, "1")
    seen: list[tuple[bool, dict[str, Any]]] = []
    monkeypatch.setattr(ray, "init", lambda **given: seen.append((getattr(ray_constants, UV), given)))
    init_ray(address="127.0.0.1:6379")
    ((by_uv, arguments),) = seen
    assert by_uv == requested and arguments["address"] == "127.0.0.1:6379"
    assert getattr(ray_constants, UV) is True
