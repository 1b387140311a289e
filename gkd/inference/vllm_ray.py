"""Engines whose process is an actor of Ray's, which vLLM starts, on the GPU of the worker that leads it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gkd.errors import RunFailed

_OF_BUNDLE = re.compile(r"GPU_group_(\d+)_[0-9a-f]+")


def share_gpu_of_worker() -> dict[str, str]:
    """Return the variables by which vLLM's process takes as much of this worker's GPU as Ray has left of it."""
    from ray._private.worker import global_worker  # the public ways leave out which bundle it is

    held = {name: sum(amount for _, amount in its) for name, its in global_worker.core_worker.resource_ids().items()}
    bundle, share = find_bundle(held.items())
    return {
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1",
        "VLLM_RAY_BUNDLE_INDICES": str(bundle),
        "VLLM_RAY_PER_WORKER_GPUS": f"{share:g}",
    }


def find_bundle(resources: Iterable[tuple[str, float]]) -> tuple[int, float]:
    """Return the index of the bundle that a worker's GPU is in, and the share of the GPU that the worker has.

    ``resources`` are Ray's own names and amounts. Raises RunFailed for a worker outside of a reservation.
    """
    for name, amount in resources:
        if found := _OF_BUNDLE.fullmatch(name):
            return int(found[1]), amount
    raise RunFailed("weights.transfer=sharded_rdt: this worker has no reserved GPU that vLLM's process could share")
