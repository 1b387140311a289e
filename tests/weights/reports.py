"""Reports of workers that are not there."""

from __future__ import annotations

from gkd.cluster.layout.assignment import Report


def report(group: str, rank: int, uuid: str, node: str = "10.0.0.1") -> Report:
    """A worker on one GPU."""
    return Report(
        group=group,
        rank=rank,
        node=node,
        node_id="ab" * 28,
        ip=node,
        pid=100 + rank,
        cuda_visible_devices="0",
        ray_gpu_ids=["0"],
        gpu_uuids=[uuid],
        gpu_indices=[0],
    )


def reports(group: str, *uuids: str) -> list[Report]:
    """Workers in rank order, one a GPU."""
    return [report(group, rank, uuid) for rank, uuid in enumerate(uuids)]
