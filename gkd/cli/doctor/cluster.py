"""Every node of a cluster: the same clock, the same packages, the GPUs that Ray counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gkd.cli.doctor import node as node_module
from gkd.cli.doctor.finding import Finding, confirm, fail, warn
from gkd.errors import one_line

ASK_TIMEOUT_S = 120.0  # a node's first task starts a process there
MAX_CLOCK_S = 1.0
CLOCK_ROUNDS = 3

QUICKSTART = "run ./launch/quickstart.sh from the same checkout on each and start its node again"


@dataclass(frozen=True)
class NodeFacts:
    """Facts about a node.

    ``uuids`` are those of its GPUs, ``usable`` the devices, slices among them, that CUDA_VISIBLE_DEVICES lets Ray have.
    ``gloo_address`` is what torch's gloo would give others, empty where a variable names the interface; ``clock_s`` is
    how far its clock is ahead of this machine's, within ``within_s``; ``gpu_error`` the driver's error for a lost GPU.
    """

    name: str
    ray_gpus: int
    versions: dict[str, str]
    uuids: list[str]
    usable: list[str]
    simulated: bool
    gloo_address: str
    clock_s: float
    within_s: float
    gpu_error: str = ""


def check_cluster() -> Iterator[Finding]:
    """Check the cluster this process is connected to."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    for module in (node_module, *node_module.SENT):
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        facts: list[NodeFacts] = []
        # All at once: each starts a process, and a cluster may have many nodes.
        collected = [_on(node, node_module.collect_facts).remote(node_module.PACKAGES) for node in nodes]
        for node, ref in zip(nodes, collected, strict=True):
            name = f"{node['NodeManagerAddress']}/{node['NodeID'][:8]}"
            try:
                facts.append(_read_facts(node, name, ref))
            except (ray.exceptions.RayError, TimeoutError) as error:
                yield fail(
                    "node", f"{name} does not answer: {one_line(error)}", "start it again with ./launch/ray_cluster.sh"
                )
    finally:
        for module in (node_module, *node_module.SENT):
            ray.cloudpickle.unregister_pickle_by_value(module)
    yield from compare(facts)


def compare(nodes: list[NodeFacts]) -> Iterator[Finding]:
    """Yield what the nodes' facts mean together."""
    yield confirm("nodes", f"{len(nodes)} answer: {', '.join(node.name for node in nodes)}")
    yield from _addresses(nodes)
    yield from _clocks(nodes)
    yield from _versions(nodes)
    for node in nodes:
        yield _gpus(node)


def _on(node: dict[str, Any], function: Callable[..., Any]) -> Any:
    """Return a function as one that runs on a node."""
    on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=on_node)


def _read_facts(node: dict[str, Any], name: str, collected: Any) -> NodeFacts:
    facts, clock = ray.get(collected, timeout=ASK_TIMEOUT_S), _on(node, node_module.clock)
    rounds = []
    for _ in range(CLOCK_ROUNDS):
        before = time.time()
        there_s = ray.get(clock.remote(), timeout=ASK_TIMEOUT_S)
        after = time.time()
        rounds.append((after - before, there_s - (before + after) / 2))
    took, ahead = min(rounds)
    return NodeFacts(name, int(node["Resources"].get("GPU", 0)), **facts, clock_s=ahead, within_s=took / 2)


def _addresses(nodes: list[NodeFacts]) -> Iterator[Finding]:
    if len({node.name.partition("/")[0] for node in nodes}) < 2:  # all on one machine
        return
    alone = [node for node in nodes if node.gloo_address.startswith(("127.", "::1", "unknown"))]
    for node in alone:
        yield warn(
            "address",
            f"{node.name} takes its own name to be {node.gloo_address}, where other machines do not reach it",
            "correct /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface between them before its node starts",
        )
    if not alone:
        yield confirm("address", f"{len(nodes)} nodes have an address that others can reach")


def _clocks(nodes: list[NodeFacts]) -> Iterator[Finding]:
    wrong = [node for node in nodes if abs(node.clock_s) - node.within_s > MAX_CLOCK_S]
    for node in wrong:
        yield warn("clock", f"{node.name} is {node.clock_s:+.1f} s from this machine", "let NTP or chrony set it")
    if not wrong:
        yield confirm("clock", f"the same on {len(nodes)} nodes within {MAX_CLOCK_S:g} s")


def _versions(nodes: list[NodeFacts]) -> Iterator[Finding]:
    names = list(dict.fromkeys(name for node in nodes for name in node.versions))
    different = False
    for name in names:
        nodes_by_version: dict[str, list[str]] = {}
        for node in nodes:
            if name in node.versions:
                nodes_by_version.setdefault(node.versions[name], []).append(node.name)
        if len(nodes_by_version) > 1:
            different = True
            versions = "; ".join(f"{version} on {', '.join(on)}" for version, on in nodes_by_version.items())
            if name == "driver":
                yield warn("driver", versions, "install the same on every machine")
            elif name == "gkd":
                yield warn("gkd", versions, "the same checkout on each, or gkd submit, which brings its own")
            else:
                yield fail("packages", f"{name}: {versions}", QUICKSTART)
    if not different:
        yield confirm("packages", f"{len(names)} the same on {len(nodes)} nodes")


def _gpus(node: NodeFacts) -> Finding:
    if node.gpu_error:
        return fail("gpus", f"{node.name}: {node.gpu_error}", "reset that GPU, or the machine: no run starts there")
    n_real, n_ray = len(node.usable), node.ray_gpus
    if node.simulated:
        if node.uuids:
            mismatch = f"{node.name} simulates {n_ray} GPUs and has {len(node.uuids)}"
            return warn("gpus", mismatch, "start it without --simulate-gpus")
        return confirm("gpus", f"{node.name} simulates {n_ray}: workers on them compute on the CPU")
    if n_ray > n_real:
        return fail(
            "gpus",
            f"{node.name}: Ray hands out {n_ray} GPUs and may use {n_real}",
            "start the node again, with --simulate-gpus N if they are not there on purpose",
        )
    if n_ray < n_real:
        return warn(
            "gpus",
            f"{node.name}: Ray hands out {n_ray} of the {n_real} GPUs that it may use",
            "start the node without --num-gpus, unless that is meant",
        )
    of = "" if n_real == len(node.uuids) else f", of {len(node.uuids)} GPUs there, by CUDA_VISIBLE_DEVICES"
    return confirm("gpus", f"{node.name}: {n_ray} by Ray and by NVML{of}")
