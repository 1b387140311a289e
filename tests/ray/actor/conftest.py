"""Processes that all tests of the folder train in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ray.actor.ranks import Ranks


@pytest.fixture(scope="package")
def processes(local_ray: None) -> Iterator[dict[int, Ranks]]:
    """One rank by itself and two together, by their number."""
    by_world = {world: Ranks(world) for world in (1, 2)}
    yield by_world
    for ranks in by_world.values():
        ranks.end()
