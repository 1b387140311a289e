"""Whether every worker has the GPU it must have and shares it with nobody: pure functions over reports."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

from gkd.cluster.nearest import range_text
from gkd.cluster.report import Report


def faults(
    reports: Sequence[Report],
    ranges: Mapping[str, Sequence[Sequence[int]] | None],
    shared: Collection[frozenset[str]] = (),
) -> list[str]:
    """Everything wrong with an assignment, one line each; empty when it is right.

    ``ranges`` gives the exact indices each group asked for, one list for all of its nodes alike or one for each;
    ``shared`` the pairs of groups that may be on the same GPU.
    """
    return [*_collisions(reports, shared), *_wrong_devices(reports), *_broken_ranges(reports, ranges)]


def _collisions(reports: Sequence[Report], shared: Collection[frozenset[str]]) -> list[str]:
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


def _wrong_devices(reports: Sequence[Report]) -> list[str]:
    found: list[str] = []
    for report in reports:
        if report.cuda_visible_devices.split(",") != report.ray_gpu_ids:
            given = ",".join(report.ray_gpu_ids)
            found.append(f"{report} sees CUDA_VISIBLE_DEVICES={report.cuda_visible_devices} but Ray gave it {given}")
        elif report.device_count != 1 or len(report.gpu_uuids) != 1:
            found.append(
                f"{report} sees {report.device_count} GPUs instead of 1 "
                f"under CUDA_VISIBLE_DEVICES={report.cuda_visible_devices}"
            )
    return found


def _broken_ranges(reports: Sequence[Report], ranges: Mapping[str, Sequence[Sequence[int]] | None]) -> list[str]:
    found: list[str] = []
    for group, wanted in ranges.items():
        if wanted is None:
            continue
        got: dict[str, list[int]] = {}
        for report in sorted((r for r in reports if r.group == group), key=lambda r: r.rank):
            got.setdefault(report.node, []).extend(report.gpu_indices)
        left = [sorted(one) for one in wanted] if len(wanted) > 1 else [sorted(wanted[0])] * len(got)
        for node, indices in got.items():
            if indices in left:
                left.remove(indices)
            else:
                asked = " and ".join(range_text(sorted(one)) for one in wanted)
                found.append(f"{group} asked for GPUs {asked} but has {range_text(indices)} on {node}")
    return found
