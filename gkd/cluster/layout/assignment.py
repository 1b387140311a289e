"""Which GPU each worker has: what workers report, whether it is right, and how it is shown.

The check is pure functions over reports: whether every worker has the GPU it must have and shares it with nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from gkd.cluster.gpu import are_simulated, range_text

if TYPE_CHECKING:
    from rich.table import Table

    from gkd.config.device import Device

USED = 0.1
"""Share of a GPU's memory that the driver and its contexts take at most."""
GIB = 1 << 30
RECORDED = ("group", "rank", "node", "pid", "cuda_visible_devices", "ray_gpu_ids", "gpu_uuids")
"""What placement.json has of a worker's report."""
UUID_SHOWN = 14
"""Characters of a UUID in a narrow table, which distinguish the GPUs of a machine."""


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """The devices that a worker process sees, reported before any model is loaded."""

    node_id: str
    """Ray's id of the node, hex."""
    ip: str
    pid: int
    cuda_visible_devices: str
    ray_gpu_ids: list[str]
    gpu_uuids: list[str]
    gpu_indices: list[int]
    """The numbers that ``gpus`` ranges call the devices by."""
    gpu_bytes: int | None = None
    """Memory of the smallest device; None where they are simulated."""
    gpu_used: int = 0
    """Bytes of it that are in use, by other programs: this one has loaded nothing."""


@dataclass(frozen=True, kw_only=True)
class Report(DeviceReport):
    """A worker's report together with its place."""

    group: str
    rank: int
    node: str
    """The node's name for people: its address, made unique where several Ray nodes share one."""

    @property
    def device(self) -> Device:
        """What the worker computes on: the CPU where its GPU is only one of Ray's numbers."""
        return "cpu" if are_simulated(self.gpu_uuids) else "cuda"

    def __str__(self) -> str:
        return f"{self.group} rank {self.rank} (pid {self.pid} on {self.node})"

    def to_json(self) -> dict[str, Any]:
        """Return the record of placement.json."""
        return {name: getattr(self, name) for name in RECORDED}


def faults(
    reports: Sequence[Report],
    ranges: Mapping[str, Sequence[Sequence[int]] | None],
    shared: Collection[frozenset[str]] = (),
) -> list[str]:
    """Return everything wrong with an assignment, one line each; empty when it is right.

    ``ranges`` gives the exact indices each group requested, one list for all of its nodes alike or one for each;
    ``shared`` the pairs of groups that may be on the same GPU.
    """
    return [*_find_collisions(reports, shared), *_find_wrong_devices(reports), *_find_broken_ranges(reports, ranges)]


def describe_use(reports: Sequence[Report]) -> list[str]:
    """Return one line for each GPU whose memory other programs use: a plan takes all of it to be the run's."""
    used = {uuid: r for r in reports for uuid in r.gpu_uuids if r.gpu_bytes and r.gpu_used > USED * r.gpu_bytes}
    return [
        f"GPU {uuid} of {r.node} ({r.group} rank {r.rank}): other programs use {r.gpu_used / GIB:.1f} of its "
        f"{(r.gpu_bytes or 0) / GIB:.1f} GiB (nvidia-smi names them), and the run may want all of it"
        for uuid, r in used.items()
    ]


def _find_collisions(reports: Sequence[Report], shared: Collection[frozenset[str]]) -> list[str]:
    holders: dict[str, list[Report]] = {}
    for report in reports:
        for uuid in dict.fromkeys(report.gpu_uuids):
            holders.setdefault(uuid, []).append(report)
    return [
        f"{one} and {other} share GPU {uuid}"
        for uuid, sharing in holders.items()
        for one, other in combinations(sharing, 2)
        if frozenset((one.group, other.group)) not in shared
    ]


def _find_wrong_devices(reports: Sequence[Report]) -> list[str]:
    faulty: list[str] = []
    for report in reports:
        if report.cuda_visible_devices.split(",") != report.ray_gpu_ids:
            ray_ids = ",".join(report.ray_gpu_ids)
            faulty.append(f"{report} sees CUDA_VISIBLE_DEVICES={report.cuda_visible_devices} but Ray gave it {ray_ids}")
        elif len(report.gpu_uuids) != 1:
            faulty.append(
                f"{report} sees {len(report.gpu_uuids)} GPUs instead of 1 "
                f"under CUDA_VISIBLE_DEVICES={report.cuda_visible_devices}"
            )
    return faulty


def _find_broken_ranges(reports: Sequence[Report], ranges: Mapping[str, Sequence[Sequence[int]] | None]) -> list[str]:
    faulty: list[str] = []
    for group, exact in ranges.items():
        if exact is None:
            continue
        got: dict[str, list[int]] = {}
        for report in sorted((r for r in reports if r.group == group), key=lambda r: r.rank):
            got.setdefault(report.node, []).extend(report.gpu_indices)
        left = [sorted(indices) for indices in exact] if len(exact) > 1 else [sorted(exact[0])] * len(got)
        for node, indices in got.items():
            if indices in left:
                left.remove(indices)
            else:
                expected = " and ".join(range_text(sorted(gpus)) for gpus in exact)
                faulty.append(f"{group} asked for GPUs {expected} but has {range_text(indices)} on {node}")
    return faulty


def placement_table(reports: Sequence[Report], narrow: bool = False) -> Table:
    """Return one row a worker, to be printed as wide as it is, so that it can be read and grepped in a log file too.

    ``narrow``: within 80 columns, without Ray's ids and with the beginnings of UUIDs; placement.json has them whole.
    """
    from rich.box import SIMPLE  # workers report, and print nothing
    from rich.table import Table

    table = Table(box=None if narrow else SIMPLE, pad_edge=False, padding=(0, 1, 0, 0) if narrow else (0, 1))
    for title in ("group", "rank", "node", "pid", "CUDA_VISIBLE_DEVICES", *([] if narrow else ["ray ids"]), "UUID"):
        table.add_column(title, no_wrap=True, overflow="ignore")
    for r in reports:
        ids = [] if narrow else [",".join(r.ray_gpu_ids)]
        uuids = ",".join(uuid[:UUID_SHOWN] if narrow else uuid for uuid in r.gpu_uuids)
        table.add_row(r.group, str(r.rank), r.node, str(r.pid), r.cuda_visible_devices, *ids, uuids)
    return table


def assignment_line(reports: Sequence[Report]) -> str:
    """Return ``GPU Assignments: ['0', '1', ...]`` in the order of the reports."""
    return f"GPU Assignments: {[gpu for report in reports for gpu in report.ray_gpu_ids]}"
