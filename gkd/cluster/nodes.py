"""The nodes of a Ray cluster as the layout sees them: which GPUs each has, and what is free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # Ray has no public way to ask this
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gkd.cluster import gpu
from gkd.cluster.failure import explain
from gkd.cluster.layout import Node


def read_nodes(indices: dict[str, list[int]] | None = None) -> list[Node]:
    """Nodes of the cluster with GPUs, the head first; one that leaves meanwhile is left out.

    ``indices`` holds the GPU indices of the nodes by id; those of nodes that are not in it are asked for and put
    there, since they never change. Without it, nobody is asked and a node's GPUs count from 0.
    """
    alive = _alive()
    if indices is not None:
        indices.update(_ask_indices([node["NodeID"] for node in alive if node["NodeID"] not in indices]))
        alive = [node for node in alive if node["NodeID"] in indices]
    alive.sort(key=lambda n: ("node:__internal_head__" not in n["Resources"], n["NodeManagerAddress"], n["NodeID"]))
    free = available_resources_per_node()
    addresses = [node["NodeManagerAddress"] for node in alive]
    nodes = []
    for node in alive:
        node_id, address, resources = node["NodeID"], node["NodeManagerAddress"], node["Resources"]
        n_gpus = int(resources["GPU"])
        available = free.get(node_id, {})
        nodes.append(
            Node(
                id=node_id,
                name=address if addresses.count(address) == 1 else f"{address}/{node_id[:8]}",
                gpus=tuple(range(n_gpus) if indices is None else indices[node_id]),
                cpus=resources.get("CPU", 0.0),
                free_gpus=int(available.get("GPU", 0.0)),
                free_cpus=available.get("CPU", 0.0),
            )
        )
    return nodes


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= 1]


def free_text(nodes: Sequence[Node]) -> str:
    """``3 of 8 GPUs and 5 of 8 CPUs on 1 node``: what nobody holds now."""

    def total(numbers: Sequence[float]) -> str:
        return f"{sum(numbers):g}"

    gpus = f"{total([n.free_gpus for n in nodes])} of {total([len(n.gpus) for n in nodes])} GPUs"
    cpus = f"{total([n.free_cpus for n in nodes])} of {total([n.cpus for n in nodes])} CPUs"
    return f"{gpus} and {cpus} on {len(nodes)} node{'s' * (len(nodes) != 1)}"


def _ask_indices(node_ids: Sequence[str]) -> dict[str, list[int]]:
    """Indices of the GPUs of every node that is still there. Raises RunFailed when one does not say within 60 s."""
    ask = ray.remote(num_cpus=0)(_indices_here)
    refs = {
        node_id: ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(node_id)
        for node_id in node_ids
    }
    found: dict[str, list[int]] = {}
    for node_id, ref in refs.items():
        try:
            found[node_id] = ray.get(ref, timeout=60)
        except Exception as error:
            if any(node["NodeID"] == node_id for node in _alive()):
                raise explain(error, f"asking node {node_id[:8]} for its GPUs") from error
    return found


def _indices_here(node_id: str) -> list[int]:
    """Indices of this node's GPUs, out of the environment of its raylet, which is this process' parent."""
    environ = Path(f"/proc/{os.getppid()}/environ").read_bytes().decode(errors="replace")
    variables = dict(entry.partition("=")[::2] for entry in environ.split("\0"))
    n_gpus = next(int(node["Resources"]["GPU"]) for node in ray.nodes() if node["NodeID"] == node_id)
    uuids = [] if variables.get(gpu.SIMULATED) == "1" else gpu.nvml_uuids()
    return gpu.node_indices(variables.get(gpu.VISIBLE), n_gpus, uuids)
