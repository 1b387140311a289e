"""What vLLM needs of the process and the device that it runs on."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

from gkd.config.device import Device
from gkd.errors import RunFailed

MOST_SOCKET_PATH = 107 - 37  # of a directory in which sockets are named by a UUID; Linux takes no longer names
_OF_BUNDLE = re.compile(r"GPU_group_(\d+)_[0-9a-f]+")


def compile_apart(device: Device) -> None:
    """Have vLLM keep what it compiles for GPUs in a directory by the node and the GPUs that this process sees.

    Engines of one model that start at the same time on different GPUs would write the same files, on several nodes too
    where these share a home. Before the process' engine starts.
    """
    if device == "cuda":
        from vllm import envs

        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "all").replace(",", "-")
        # Not from vLLM alone: in a process that has had an engine it is what the variable was then.
        root, name = Path(os.environ.get("VLLM_CACHE_ROOT", envs.VLLM_CACHE_ROOT)), f"{platform.node()}-gpu-{gpus}"
        os.environ["VLLM_CACHE_ROOT"] = str(root if root.name == name else root / name)


def find_session_directory() -> str | None:
    """Return the directory of Ray's session on this node, which ends with it; None in a process without Ray."""
    from ray._private import worker

    return None if worker._global_node is None else str(worker._global_node.get_session_dir_path())


def meet_in_session() -> None:
    """Have the file and the sockets by which the processes of a worker's engine meet lie in Ray's session, and so end
    with it.

    vLLM has no setting for the file, makes one in the directory for temporary files and never removes it. Before the
    process' engine starts; elsewhere than in a worker of Ray's all is as it was.
    """
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    if (directory := find_session_directory()) is not None:
        for place in (directory, str(Path(directory).parent)):  # of Ray's own files, which a cluster's node removes
            if len(place) < MOST_SOCKET_PATH:
                os.environ["VLLM_RPC_BASE_PATH"] = place
                break
        for executor in (multiproc_executor, uniproc_executor):
            executor.get_file_store_init_method = lambda: f"file://{directory}/vllm_dist_{uuid4().hex}"


def share_gpu_of_worker() -> dict[str, str]:
    """Return the variables by which vLLM's process takes as much of this worker's GPU as Ray has left of it."""
    from ray._private.worker import global_worker  # the public ways leave out which bundle it is

    held = {
        name: sum(amount for _, amount in shares) for name, shares in global_worker.core_worker.resource_ids().items()
    }
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
        if match := _OF_BUNDLE.fullmatch(name):
            return int(match[1]), amount
    raise RunFailed("weights.transfer=sharded_rdt: this worker has no reserved GPU that vLLM's process could share")
