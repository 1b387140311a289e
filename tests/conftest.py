"""Fixtures that several rooms share: one private Ray, one vLLM engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported; see gkd.inference


# Lanes of tests that share a Ray, engines, or models made for them, in the order in which they begin: those of the
# cluster have their process' connection to Ray for themselves, and small ones are left for the end.
LIBRARY = "library"
LANES = ("cluster", LIBRARY, "e2e/on_a_cluster", "e2e", "launch", "planning")


def lane(nodeid: str) -> str:
    folder = nodeid.partition("::")[0].rpartition("/")[0].removeprefix("tests/")
    return folder if folder in LANES else LIBRARY


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LANES.index(lane(item.nodeid)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Two processes take turns at the lanes."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return lane(nodeid)

    config.option.loadscopereorder = False
    return Lanes(config, log)


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray of this test run's own with eight simulated GPUs."""
    import ray

    ray.init(
        address="local", num_cpus=8, num_gpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    yield
    ray.shutdown()
