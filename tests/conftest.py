"""Fixtures that several rooms share: one private Ray, one vLLM engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported; see gkd.vllm_engine.environment


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Two processes take turns at six lanes, whose tests share a Ray, engines, or models made for them.

    The lanes are begun in the order of their tests: those of the cluster are among the first two, as they have the
    process' connection to Ray for themselves, and the small ones of the planning are what is left for the end.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = nodeid.partition("::")[0].rpartition("/")[0].removeprefix("tests/")
            return folder if folder in ("cluster", "e2e/on_a_cluster", "e2e", "launch", "planning") else "library"

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
