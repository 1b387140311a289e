"""Reserving GPUs and CPUs for all groups at once, and starting one :class:`Worker` on each.

Ray chooses which device a bundle gets, and only the process that runs in it sees it. So the workers start first and
report their device; then each is given its group and rank. Where exact GPUs are requested, the free GPUs of those
nodes are taken, requested ones are kept and the rest is given back. When a requested one is missing, all is given back,
so that two runs waiting for each other cannot lock up, and it is tried again after a random pause.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node, state  # Ray has no public way to read this
from ray.util import placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from gkd.cluster import gpu
from gkd.cluster.layout.assignment import DeviceReport
from gkd.cluster.layout.fit import request_text, require_fit
from gkd.cluster.layout.nodes import GroupRequest, Node, Slot, choose_devices, solve
from gkd.cluster.session.connect import Session
from gkd.cluster.workers.failure import explain, log_unawaited_errors
from gkd.cluster.workers.worker import CONCURRENCY_GROUPS, Worker
from gkd.config import Cluster
from gkd.errors import RunFailed

log = logging.getLogger("gkd")
LOG_EVERY_S, LOG_SELDOM_S = 5.0, 60.0  # at first, and in the end: some wait beside a run, or for other runs
READY_S = 5.0  # a reservation that fits is granted in milliseconds; longer means that someone else was faster
LONGEST_PAUSE_S = 8.0
POLL_EVERY_S = 2.0  # whether the nodes on which workers are starting are there: Ray would wait for them to come back

RemoteWorker = ray.remote(max_restarts=0, concurrency_groups=CONCURRENCY_GROUPS)(Worker)


@dataclass(frozen=True)
class _Bundle:
    """One GPU of a placement group, on a known node."""

    node_id: str
    placement_group: Any
    index: int


@dataclass(frozen=True)
class Claim:
    """A reserved GPU and a worker on it."""

    worker: Any
    bundle: _Bundle
    device: DeviceReport
    resources: dict[str, float]
    """Amounts that Ray counts for the worker: ``num_gpus`` and ``num_cpus``."""


class _AttemptFailed(Exception):
    """This attempt did not get what it needs; names what was missing."""


class InsufficientResources(RunFailed):
    """The resources that were requested were not free in time."""


class NodeLostInReservation(_AttemptFailed):
    """A node left on which workers were starting."""


def reserve(
    session: Session, requests: Sequence[GroupRequest], cluster: Cluster, nodes_come: bool
) -> tuple[dict[str, list[Claim]], dict[str, str]]:
    """Return claims by group, in rank order, and names of nodes by id. Colocated groups are on the GPUs of their hosts.

    Raises ConfigError when the groups do not fit even on the idle cluster, unless further ``nodes_come``; RunFailed
    when ``cluster.reserve_timeout_s`` pass before everything is free or when a worker does not start.
    """
    deadline = time.monotonic() + cluster.reserve_timeout_s
    indices: dict[str, list[int]] | None = {} if any(request.ranges for request in requests) else None
    nodes = read_nodes(indices)
    if not nodes_come:
        require_fit(requests, nodes, cluster.cpus_per_worker)
    # Of a GPU, as Ray counts it; the groups themselves share its memory.
    share = 1 / max(request.workers_per_gpu for request in requests)
    pause, every, logged, unlucky = 0.5, LOG_EVERY_S, time.monotonic() - LOG_EVERY_S + 1.0, frozenset[str]()
    failures = Counter[str]()
    while not session.ended:
        # Nodes that did not have what they seemed to have come later, and by chance, so that all are tried together.
        nodes.sort(key=lambda node: (failures[node.id], random.random() if failures else 0.0))
        slots = solve(requests, nodes, cluster.cpus_per_worker)
        missing, wait = "", 0.5
        if slots is not None:
            try:
                gpus_to_take = _count_gpus_to_take(slots, nodes, unlucky)
                claims = _attempt(session, requests, slots, gpus_to_take, cluster, share)
                return claims, {node.id: node.name for node in nodes}
            except _AttemptFailed as error:
                missing = f"; {error}"
                unlucky = frozenset(slot.node_id for slot in slots if slot.gpus is not None)
                failures.update({slot.node_id for slot in slots})
                wait, pause = pause * random.uniform(0.5, 1.5), min(2 * pause, LONGEST_PAUSE_S)
        state = (
            f"asked for {request_text(requests, cluster.cpus_per_worker)}; free now: {describe_free(nodes)}{missing}"
        )
        if time.monotonic() + wait > deadline:
            raise InsufficientResources(
                f"no room after {cluster.reserve_timeout_s:g} s (cluster.reserve_timeout_s): {state}"
            )
        if time.monotonic() - logged >= every:
            logged, every = time.monotonic(), min(2 * every, LOG_SELDOM_S)
            log.info("waiting for GPUs: %s; giving up in %.0f s", state, deadline - logged)
        time.sleep(wait)
        nodes = read_nodes(indices)  # nodes come and go
    raise RunFailed("the run has ended")


def _count_gpus_to_take(slots: list[Slot], nodes: Sequence[Node], unlucky: frozenset[str]) -> dict[str, int]:
    """Return GPUs to take on each node with exact slots: all that are free, so that requested ones are among them.

    Ray hands out the lowest first. On an idle node, unless that failed before, the first ones up to the last requested
    one will do, with as many others as slots without a range have there: the processes that would only look at the rest
    need not start.
    """
    counts: dict[str, int] = {}
    for node in nodes:
        node_slots = [slot for slot in slots if slot.node_id == node.id]
        indices = {index for slot in node_slots for index in slot.gpus or ()}
        if not indices:
            continue
        counts[node.id] = node.free_gpus
        if node.free_gpus == len(node.gpus) and node.id not in unlucky:
            n_others = sum(slot.n_gpus for slot in node_slots if slot.gpus is None)
            others = [index for index in node.gpus if index not in indices][:n_others]
            counts[node.id] = 1 + max(map(node.gpus.index, [*indices, *others]))
    return counts


def _attempt(
    session: Session,
    requests: Sequence[GroupRequest],
    slots: list[Slot],
    gpus_to_take: dict[str, int],
    cluster: Cluster,
    share: float,
) -> dict[str, list[Claim]]:
    """Reserve GPUs and start workers; return claims by group, in the order of devices.

    Raises _AttemptFailed, with everything given back, when someone was faster. Other threads may start workers.
    """
    reserved: list[Any] = []
    claims: list[Claim] = []
    try:
        bundles = _take(session, reserved, slots, gpus_to_take, cluster.cpus_per_worker)
        specs = [bundle.placement_group.bundle_specs[bundle.index] for bundle in bundles]
        resources = [{"num_gpus": share, "num_cpus": spec.get("CPU", 0.0)} for spec in specs]
        claims = start_workers(session, list(zip(bundles, resources, strict=True)), cluster)
        available: dict[str, list[int]] = {}
        holders: dict[tuple[str, int], list[Claim]] = {}
        for claim in claims:
            # A worker that sees no device, or another's, still counts, so that the check can name it.
            place = claim.device.node_id, (claim.device.gpu_indices or [-1])[0]
            available.setdefault(place[0], []).append(place[1])
            holders.setdefault(place, []).append(claim)
        devices = choose_devices(slots, available)
        if isinstance(devices, str):
            raise _AttemptFailed(f"{devices} is held by someone else")
        hosts: dict[str, list[Claim]] = {}
        for slot, indices in zip(slots, devices, strict=True):
            hosts.setdefault(slot.group, []).extend(holders[slot.node_id, index].pop() for index in indices)
        needed = {id(claim) for group_claims in hosts.values() for claim in group_claims}
        surplus = [claim for claim in claims if id(claim) not in needed]
        session.release([claim.worker for claim in surplus], [claim.bundle.placement_group for claim in surplus])
        return _start_colocated(session, requests, hosts, cluster, share)
    except BaseException:
        session.release([claim.worker for claim in claims], reserved)
        raise


def _take(
    session: Session, reserved: list[Any], slots: list[Slot], gpus_to_take: dict[str, int], cpus: float
) -> list[_Bundle]:
    """Reserve the GPUs: as many as needed in one atomic group; those to look at one by one. Adds them to ``reserved``.

    Raises _AttemptFailed when someone was faster.
    """
    plain = [slot.node_id for slot in slots if slot.node_id not in gpus_to_take for _ in range(slot.n_gpus)]
    cpu_only = [(slot.node_id, cpus * slot.n_gpus) for slot in slots if slot.node_id in gpus_to_take]
    cpu_only += [(slot.node_id, cpus * slot.n_colocated) for slot in slots if slot.n_colocated]
    together = [(node_id, {"GPU": 1.0, "CPU": cpus}) for node_id in plain]
    # GPUs taken to look at carry no CPUs, of which there need not be enough for all of them.
    together += [(node_id, {"CPU": amount}) for node_id, amount in cpu_only]
    main = _placement_group(session, reserved, together)
    singles = [
        (node_id, _placement_group(session, reserved, [(node_id, {"GPU": 1.0})]))
        for node_id, count in gpus_to_take.items()
        for _ in range(count)
    ]
    refs = {group.ready(): group for group in (main, *(group for _, group in singles))}
    ready = [refs[ref] for ref in ray.wait(list(refs), num_returns=len(refs), timeout=READY_S)[0]]
    if main not in ready:
        raise _AttemptFailed("Ray did not grant it: someone was faster, or has a part of a GPU there")
    late = [group for _, group in singles if group not in ready]
    session.release([], late)
    bundles = [_Bundle(node_id, main, i) for i, node_id in enumerate(plain)]
    return bundles + [_Bundle(node_id, group, 0) for node_id, group in singles if group in ready]


def _placement_group(session: Session, reserved: list[Any], bundles: list[tuple[str, dict[str, float]]]) -> Any:
    group = placement_group(
        [resources for _, resources in bundles],
        strategy="PACK",
        bundle_label_selector=[{"ray.io/node-id": node_id} for node_id, _ in bundles],
    )
    reserved.append(group)
    session.placement_groups.append(group)
    return group


def start_workers(
    session: Session, placements: Sequence[tuple[_Bundle, dict[str, float]]], cluster: Cluster
) -> list[Claim]:
    """Start workers with these resources out of these bundles, all starting at the same time, and what each sees.

    Where that fails none of them is left. Raises NodeLostInReservation when a node leaves, RunFailed when one does not
    start.
    """
    log_unawaited_errors()
    workers: list[Any] = []
    try:
        for bundle, resources in placements:
            strategy = PlacementGroupSchedulingStrategy(bundle.placement_group, bundle.index)
            worker = RemoteWorker.options(**resources, scheduling_strategy=strategy).remote()
            workers.append(worker)
            session.add(worker)
        return _collect_claims(workers, placements, cluster)
    except BaseException:
        session.release([worker for worker in workers if worker in session.workers], [])
        raise


def _collect_claims(
    workers: Sequence[Any], placements: Sequence[tuple[_Bundle, dict[str, float]]], cluster: Cluster
) -> list[Claim]:
    """Wait until all workers have reported what they see."""
    refs = [worker.report.remote() for worker in workers]
    node_ids = {bundle.node_id for bundle, _ in placements}
    _wait_started(refs, node_ids, cluster.start_timeout_s)
    reports = []
    for ref in refs:
        try:
            reports.append(ray.get(ref, timeout=60))
        except Exception as error:
            _require_alive(node_ids)
            raise explain(error, "a worker that was just starting") from error
    return [
        Claim(worker, bundle, report, resources)
        for worker, (bundle, resources), report in zip(workers, placements, reports, strict=True)
    ]


def _wait_started(refs: Sequence[Any], node_ids: set[str], timeout_s: float) -> None:
    """Wait until every worker has reported or failed. Raises NodeLostInReservation or, at the limit, RunFailed."""
    deadline = time.monotonic() + timeout_s
    late = list(refs)
    while late:
        _require_alive(node_ids)
        if time.monotonic() > deadline:
            raise RunFailed(f"{len(late)} of {len(refs)} workers did not start within {timeout_s:g} s")
        _, late = ray.wait(late, num_returns=len(late), timeout=POLL_EVERY_S)


def _require_alive(node_ids: set[str]) -> None:
    if not node_ids <= {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
        raise NodeLostInReservation("a node left")


def _start_colocated(
    session: Session, requests: Sequence[GroupRequest], hosts: dict[str, list[Claim]], cluster: Cluster, share: float
) -> dict[str, list[Claim]]:
    """Start colocated groups, now that it is known which GPU each host has; return ``hosts`` and their claims."""
    bundles_by_group: dict[str, list[_Bundle]] = {}
    for request in requests:
        for other in request.colocated:
            ranks = [node * request.n_gpus + position for node in range(other.nnodes) for position in other.positions]
            bundles_by_group[other.group] = [hosts[request.group][rank].bundle for rank in ranks]
    if not bundles_by_group:
        return hosts
    # They come into bundles that have a worker; their CPUs are reserved elsewhere.
    resources = {"num_gpus": share, "num_cpus": 0.0}
    bundles = [(bundle, resources) for group in bundles_by_group.values() for bundle in group]
    claims = iter(start_workers(session, bundles, cluster))
    return hosts | {group: [next(claims) for _ in group_bundles] for group, group_bundles in bundles_by_group.items()}


def read_nodes(indices: dict[str, list[int]] | None = None) -> list[Node]:
    """Return nodes of the cluster with GPUs, the head first; one that leaves meanwhile, or is to leave, is left out.

    ``indices`` holds the GPU indices of the nodes by id; those of nodes that are not in it are read and put
    there, since they never change. Without it, nothing is read and a node's GPUs count from 0.
    """
    leaving = state.get_draining_nodes()
    alive = [node for node in _list_living_nodes() if node["NodeID"] not in leaving]
    if indices is not None:
        indices.update(_read_indices([node["NodeID"] for node in alive if node["NodeID"] not in indices]))
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


def _list_living_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= 1]


def describe_free(nodes: Sequence[Node]) -> str:
    """Return ``3 of 8 GPUs and 5 of 8 CPUs on 1 node``: what nobody holds now."""

    def total(numbers: Sequence[float]) -> str:
        return f"{sum(numbers):g}"

    gpus = f"{total([n.free_gpus for n in nodes])} of {total([len(n.gpus) for n in nodes])} GPUs"
    cpus = f"{total([n.free_cpus for n in nodes])} of {total([n.cpus for n in nodes])} CPUs"
    return f"{gpus} and {cpus} on {len(nodes)} node{'s' * (len(nodes) != 1)}"


def _read_indices(node_ids: Sequence[str]) -> dict[str, list[int]]:
    """Return indices of the GPUs of every node that is still there. Raises RunFailed when one is silent for 60 s."""
    read = ray.remote(num_cpus=0)(gpu.indices_of_raylet)
    refs = {
        node["NodeID"]: read.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(int(node["Resources"]["GPU"]))
        for node in _list_living_nodes()
        if node["NodeID"] in node_ids
    }
    indices: dict[str, list[int]] = {}
    for node_id, ref in refs.items():
        try:
            indices[node_id] = ray.get(ref, timeout=60)
        except Exception as error:
            if any(node["NodeID"] == node_id for node in _list_living_nodes()):
                raise explain(error, f"asking node {node_id[:8]} for its GPUs") from error
    return indices
