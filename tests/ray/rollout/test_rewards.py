"""What a rollout worker's rewards leave behind when Ray ends the worker, and with it its processes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray

from gkd.config import Reward
from gkd.inference.vllm_environment import find_session_directory
from gkd.rewards.completion import Completion
from gkd.rewards.pool import RewardPool


class Rates:
    """Rewards as a rollout worker has them."""

    def __init__(self) -> None:
        self.pool = RewardPool(Reward(functions=["format"], workers=1), find_session_directory())

    def rate(self) -> str:
        """Rate something, and return the directory of the process."""
        self.pool.submit(Completion("", "text", None, 1, 1, False))["format"].result(60)
        return self.pool._processes[0]._directory


def test_temporary_files_are_in_rays_session(local_ray: None) -> None:
    kind: Any = ray.remote(num_cpus=0)(Rates)
    rates = kind.remote()
    directory = Path(ray.get(rates.rate.remote(), timeout=120))
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    assert directory.parent == session and session != Path(tempfile.gettempdir())
    ray.kill(rates)
