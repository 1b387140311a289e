"""New workers in place of those that died: on their GPUs, or, where their node has left, on those of another one."""

from __future__ import annotations

from collections.abc import Sequence

from gkd.cluster.failure import NodeLeft
from gkd.cluster.layout import GroupRequest
from gkd.cluster.reserve import Claim, NodeGone, NoRoom, reserve, start_workers
from gkd.cluster.session import Session
from gkd.config import Cluster
from gkd.errors import RunFailed


def start_again(session: Session, claims: Sequence[Claim], cluster: Cluster) -> list[Claim]:
    """Start new workers in place of those of ``claims``, which are ended whatever they are doing, on the same GPUs.

    Raises RunFailed when one does not start or sees another GPU, NodeLeft when its node has left; then none of them is
    left.
    """
    session.release([claim.worker for claim in claims if claim.worker in session.workers], [])
    try:
        started = start_workers(session, [(claim.bundle, claim.resources) for claim in claims], cluster)
    except NodeGone as error:
        raise NodeLeft(f"workers could not be started again: {error}") from None
    for old, new in zip(claims, started, strict=True):
        if new.device.gpu_uuids != old.device.gpu_uuids:
            session.release([claim.worker for claim in started], [])
            seen, expected = (", ".join(claim.device.gpu_uuids) for claim in (new, old))
            raise RunFailed(f"a worker started again (pid {new.device.pid}) has GPU {seen} instead of {expected}")
    return started


def start_elsewhere(
    session: Session, group: str, claims: Sequence[Claim], cluster: Cluster, exact: bool
) -> tuple[list[Claim], dict[str, str]]:
    """Start new workers in place of those of ``claims``, whose node has left, on as many GPUs of one other node.

    ``exact``: on those with the same indices. Waits ``cluster.reserve_timeout_s`` for a node that has them free;
    returns the claims, and names of nodes by id. Raises NodeLeft where none has, RunFailed when one does not start.
    """
    indices = tuple(index for claim in claims for index in claim.device.gpu_indices)
    request = GroupRequest(group, group, len(claims), 1, indices if exact else None)
    try:
        started, names = reserve(session, [request], cluster, nodes_come=True)
    except NoRoom as error:
        raise NodeLeft(f"its node left, and no other has room for it: {error}") from None
    return started[group], names
