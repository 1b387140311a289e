"""What vLLM's Ray executor needs of a reservation: room for its process on the GPU of the worker that leads it."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gkd.errors import RunFailed
from gkd.inference.vllm_environment import find_bundle, share_gpu_of_worker
from tests.ray.cluster.conftest import configuration


def test_a_worker_outside_of_a_reservation_is_refused() -> None:
    with pytest.raises(RunFailed, match="no reserved GPU"):
        find_bundle([("GPU", 1.0), ("CPU", 1.0), ("GPU_group_ab12", 1.0)])
    assert find_bundle([("GPU_group_ab12", 0.5), ("GPU_group_3_ab12", 0.5)]) == (3, 0.5)


class Process:
    """In place of vLLM's process."""

    def gpus(self) -> list[str]:
        return [str(gpu) for gpu in ray.get_gpu_ids()]


def start(worker: Any) -> tuple[list[str], dict[str, str]]:
    """In a worker: do with the variables what vLLM's executor does."""
    variables = share_gpu_of_worker()
    group = ray.util.get_current_placement_group()
    place = PlacementGroupSchedulingStrategy(group, int(variables["VLLM_RAY_BUNDLE_INDICES"]))
    share = float(variables["VLLM_RAY_PER_WORKER_GPUS"])
    process = ray.remote(Process).options(num_cpus=0, num_gpus=share, scheduling_strategy=place).remote()
    worker.kept = process
    return ray.get(process.gpus.remote(), timeout=60), variables


@pytest.mark.parametrize("colocated", [False, True])
def test_the_process_is_on_the_gpu_of_its_worker(placed: Any, colocated: bool) -> None:
    scorer = {"n_gpus_per_node": 2, "colocate_with": "rollout"} if colocated else {"n_gpus_per_node": 1}
    config = configuration(1, 2, scorer)
    weights = config.weights.model_copy(update={"transfer": "sharded_rdt"})
    placement = placed(config.model_copy(update={"weights": weights}))
    group = placement.groups["rollout"]
    started = ray.get([worker.__ray_call__.remote(start) for worker in group.workers], timeout=120)
    for report, (gpus, variables) in zip(group.reports, started, strict=True):
        assert gpus == report.ray_gpu_ids
        assert float(variables["VLLM_RAY_PER_WORKER_GPUS"]) == pytest.approx(1 / (2 + colocated), abs=1e-3)
