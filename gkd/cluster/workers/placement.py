"""The one way to get workers: reserve, start, report, check. Used by a run and by launch/verify_gpus.py alike."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gkd import durable
from gkd.cluster.gpu import range_text
from gkd.cluster.layout.assignment import Report, describe_use, faults
from gkd.cluster.layout.fit import fits, gpus_text, has_counted_ranges, may_share, share_gpus
from gkd.cluster.layout.nodes import GroupRequest, Node, group_requests
from gkd.cluster.session.connect import Session
from gkd.cluster.workers.failure import NodeLost
from gkd.cluster.workers.group import Group
from gkd.cluster.workers.reserve import (
    Claim,
    InsufficientResources,
    NodeLostInReservation,
    read_nodes,
    reserve,
    start_workers,
)
from gkd.config import GROUP_OF, Cluster, Config, Engine
from gkd.errors import ConfigError, RunFailed

log = logging.getLogger("gkd")


@dataclass
class Placement:
    """The GPUs of every group: groups by name, in the order actor, rollout, teacher."""

    groups: dict[str, Group]
    claims: dict[str, list[Claim]] = field(default_factory=dict)
    node_names: dict[str, str] = field(default_factory=dict)
    session: Session = field(default_factory=Session)
    cluster: Cluster = field(default_factory=Cluster)
    exact: frozenset[str] = frozenset()
    """Groups for which the settings name GPUs by their indices."""
    file: Path | None = field(default=None, init=False)
    """The file it was written to, and is written to again when workers are replaced."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def restart(self, group: str) -> Group:
        """End the workers of a group, whatever they are doing, and start new ones on the same GPUs.

        Raises RunFailed when that is not possible.
        """
        return self._replace(group, range(len(self.claims[group])))

    def restart_worker(self, group: str, rank: int) -> Group:
        """Do what :meth:`restart` does for one worker, and return it alone. May be called on any thread.

        Raises NodeLost where its node has left the cluster.
        """
        return _detach_from_service(self._replace(group, [rank]).select([rank]))

    def move_workers(self, group: str, ranks: Sequence[int]) -> Group:
        """Start new workers in place of these of one node, which has left, on another node, and check their GPUs.

        Returns them. May be called on any thread. Raises NodeLost where no node gets room for them in time, or where
        another group shared their GPUs, RunFailed where one does not start or has a wrong GPU.
        """
        old = [self.claims[group][rank] for rank in ranks]
        gpus = {uuid for claim in old for uuid in claim.device.gpu_uuids}
        if any(gpus & set(report.gpu_uuids) for report in self.reports if report.group != group):
            raise NodeLost(f"the node left on which {group} shared GPUs with another group")
        started, names = start_elsewhere(self.session, group, old, self.cluster, group in self.exact)
        with self._lock:
            self.node_names |= names
            reports = [_report(group, rank, claim, names) for rank, claim in zip(ranks, started, strict=True)]
            # Of those on a node that left the GPUs may be here again: it came back under another name.
            others = [r for r in self.reports if r.node_id in names and (r.group != group or r.rank not in ranks)]
            its_own = {r.group for r in others}
            may_share = {
                frozenset((first, other)) for first in its_own for other in its_own if group not in (first, other)
            }
            if wrong := faults([*others, *reports], {}, may_share):
                reserved = [claim.bundle.placement_group for claim in started]
                self.session.release([claim.worker for claim in started], reserved)
                raise RunFailed(f"GPU assignment is wrong: {'; '.join(wrong)}")
        return _detach_from_service(self._take_in(group, ranks, started).select(ranks))

    def _replace(self, group: str, ranks: Sequence[int]) -> Group:
        started = start_again(self.session, [self.claims[group][rank] for rank in ranks], self.cluster)
        return self._take_in(group, ranks, started)

    def _take_in(self, group: str, ranks: Sequence[int], started: Sequence[Claim]) -> Group:
        """Return the group with new workers in place of those of ``ranks``; placement.json has them from now on."""
        with self._lock:
            for rank, claim in zip(ranks, started, strict=True):
                self.claims[group][rank] = claim
            self.groups[group] = _group(group, self.claims[group], self.node_names, self.session)
            if self.file is not None:
                self.write_json(self.file)
            return self.groups[group]

    @property
    def reports(self) -> list[Report]:
        """Every worker's report, in the order of groups and ranks."""
        return [report for group in self.groups.values() for report in group.reports]

    def write_json(self, path: Path) -> None:
        """Write one record a worker: the format of placement.json. It is written again when workers are."""
        self.file = path
        durable.replace(path, (json.dumps([report.to_json() for report in self.reports], indent=1) + "\n").encode())


def lay_out(config: Config) -> Config:
    """Return ``config`` as :func:`gkd.cluster.layout.fit.share_gpus` has it on the nodes of Ray; log it."""
    counted, nodes = has_counted_ranges(config), read_nodes()
    if not counted and (not may_share(config) or fits(config, nodes)):
        _note_idle_gpus(config, nodes)
        return config
    nodes = read_nodes({})  # with the indices of their GPUs, which a layout names
    changed = share_gpus(config, nodes)
    if changed is not config:
        if counted:
            on = ", ".join(f"{section} on {range_text(pool.gpus or ())}" for section, pool in changed.pools())
            log.info("placement=%s counts the GPUs that there are: %s", config.placement, on)
        else:
            on = ", ".join(f"{section} on {pool.n_gpus_per_node}" for section, pool in changed.pools())
            log.info("there are fewer GPUs than groups (%s), so groups share them: %s", gpus_text(nodes), on)
    return changed


def _note_idle_gpus(config: Config, nodes: Sequence[Node]) -> None:
    """Log how many GPUs of a machine alone ``placement=auto`` leaves to nobody: it takes one for each group."""
    n_free = sum(node.free_gpus for node in nodes)
    n_used = sum(request.total for request in group_requests(config))
    if config.placement == "auto" and len(nodes) == 1 and n_used < n_free:
        log.info(
            "%s of %s free GPUs are not used: placement=auto takes one a group where n_gpus_per_node is not set "
            "(gkd plan --best %s names the fastest split)", n_free - n_used, n_free, n_free,
        )  # fmt: skip


def place(
    config: Config, session: Session, nodes_come: bool = False, show: Callable[[Placement, bool], None] | None = None
) -> Placement:
    """Reserve every pool, start its workers, and check that each has the right GPU, before any model loads.

    ``show`` is given what the workers have, and whether that is right, before the check fails. Raises ConfigError for a
    layout that fits nowhere, unless further ``nodes_come``, in place of one that left; RunFailed when it does not get
    free in time, a worker does not start, or the check fails.
    """
    claims, names = reserve(session, group_requests(config), config.cluster, nodes_come)
    groups = {group: _group(group, claims[group], names, session) for group in config.groups()}
    ranges = {group: pool.ranges() for group, pool in config.groups().items()}
    exact = frozenset(group for group, indices in ranges.items() if indices is not None)
    placement = Placement(groups, claims, names, session, config.cluster, exact)
    wrong = faults(placement.reports, ranges, config.may_share())
    for line in [] if wrong else describe_use(placement.reports):
        log.warning(line)
    if show is not None:
        show(placement, not wrong)
    if wrong:
        raise RunFailed(f"GPU assignment is wrong: {'; '.join(wrong)}")
    _require_whole_gpus(config, placement.reports)
    return placement


def _require_whole_gpus(config: Config, reports: Sequence[Report]) -> None:
    """Raise ConfigError for an engine, or an actor of several ranks, that would span slices of GPUs (MIG).

    CUDA shows a process one of them, and NCCL joins none (https://github.com/NVIDIA/nccl/issues/1716).
    """
    remedies = {
        GROUP_OF[section]: f"an engine spans no slices: {section}.tensor_parallel_size=1"
        for section, pool in config.pools()
        if isinstance(pool, Engine) and pool.tensor_parallel_size > 1
    }
    if config.trainer.n_workers > 1:
        remedies["actor"] = "NCCL joins no slices: an actor of one rank (trainer.n_gpus_per_node=1)"
    for report in reports:
        if report.group in remedies and any(uuid.startswith("MIG-") for uuid in report.gpu_uuids):
            raise ConfigError(
                f"{report} is on a slice of a GPU (MIG), and {remedies[report.group]} or whole GPUs would do"
            )


def _group(name: str, claims: list[Claim], names: dict[str, str], session: Session) -> Group:
    reports = [_report(name, rank, claim, names) for rank, claim in enumerate(claims)]
    return Group(name, tuple(claim.worker for claim in claims), tuple(reports), session.control)


def _detach_from_service(group: Group) -> Group:
    """Return the group for waits beside the run: these must not take the one notice of the control service's loss."""
    return replace(group, service=None)


def _report(group: str, rank: int, claim: Claim, names: dict[str, str]) -> Report:
    return Report(**vars(claim.device), group=group, rank=rank, node=names[claim.device.node_id])


def start_again(session: Session, claims: Sequence[Claim], cluster: Cluster) -> list[Claim]:
    """Start new workers in place of those of ``claims``, which are ended whatever they are doing, on the same GPUs.

    Raises RunFailed when one does not start or sees another GPU, NodeLost when its node has left; then none of them is
    left.
    """
    session.release([claim.worker for claim in claims if claim.worker in session.workers], [])
    try:
        started = start_workers(session, [(claim.bundle, claim.resources) for claim in claims], cluster)
    except NodeLostInReservation as error:
        raise NodeLost(f"workers could not be started again: {error}") from None
    for old, new in zip(claims, started, strict=True):
        if new.device.gpu_uuids != old.device.gpu_uuids:
            session.release([claim.worker for claim in started], [])
            found_gpus, expected = (", ".join(claim.device.gpu_uuids) for claim in (new, old))
            raise RunFailed(f"a worker started again (pid {new.device.pid}) has GPU {found_gpus} instead of {expected}")
    return started


def start_elsewhere(
    session: Session, group: str, claims: Sequence[Claim], cluster: Cluster, exact: bool
) -> tuple[list[Claim], dict[str, str]]:
    """Start new workers in place of those of ``claims``, whose node has left, on as many GPUs of one other node.

    ``exact``: on those with the same indices. Waits ``cluster.reserve_timeout_s`` for a node that has them free;
    returns the claims, and names of nodes by id. Raises NodeLost where none has, RunFailed when one does not start.
    """
    indices = tuple(index for claim in claims for index in claim.device.gpu_indices)
    request = GroupRequest(group, len(claims), 1, indices if exact else None)
    try:
        started, names = reserve(session, [request], cluster, nodes_come=True)
    except InsufficientResources as error:
        raise NodeLost(f"its node left, and no other has room for it: {error}") from None
    return started[group], names
