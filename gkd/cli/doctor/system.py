"""Ports, disks, shared memory and limits of this machine."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from gkd.cli.doctor.finding import GIB, Finding, confirm, fail, warn
from gkd.cluster import host
from gkd.cluster.session.port import is_free

PORTS = {6379: "Ray's head", 8265: "Ray's dashboard", 15555: "a teacher outside the cluster"}
LITTLE_DISK, TOO_LITTLE_DISK = 20 * GIB, 1 * GIB
RAY_FULL = 0.95  # Ray stops writing to a disk that is fuller
NCCL_SHM = 1 * GIB
FEW_FILES, TOO_FEW_FILES, FEW_PROCESSES = 8192, 1024, 4096


def check_ports(has_cluster: bool) -> Iterator[Finding]:
    """Check the ports that programs of this project listen on by default.

    ``has_cluster``: a cluster was started here.
    """
    busy_ports = [port for port in PORTS if not has_cluster and not is_free(port)]
    for port in busy_ports:
        yield warn("ports", f"{port} ({PORTS[port]}) is taken by another program", "choose another where you start it")
    if not busy_ports:
        yield confirm(
            "ports", "in use by the cluster started here" if has_cluster else f"{', '.join(map(str, PORTS))} are free"
        )


def check_disks(places: dict[str, Path]) -> Iterator[Finding]:
    """Check room and permission to write in each place, by what it is for."""
    for purpose, place in places.items():
        directory = find_existing(place)
        if not os.access(directory, os.W_OK):
            yield fail(
                "disk", f"{directory} ({purpose}) is not writable", "choose another directory or change its permissions"
            )
            continue
        usage = shutil.disk_usage(directory)
        state = f"{usage.free / GIB:.0f} GiB free in {directory} ({purpose})"
        if usage.free < TOO_LITTLE_DISK:
            yield fail("disk", state, "make room, or choose a directory on another disk")
        elif usage.free < LITTLE_DISK:
            yield warn("disk", state, "models of some billion parameters need more")
        elif purpose == "Ray" and usage.used > RAY_FULL * usage.total:
            yield warn(
                "disk", f"{state}, but more than {RAY_FULL:.0%} full, where Ray stops", "make room, or set RAY_TMPDIR"
            )
        else:
            yield confirm("disk", state)


def find_existing(place: Path) -> Path:
    """Return the nearest directory of a path, itself included, that is there for this user to see."""
    return next(path for path in (place, *place.parents) if os.access(path, os.F_OK))


def check_shared_memory(n_gpus: int) -> Iterator[Finding]:
    """Compare /dev/shm, which may not be there, with what Ray's object store and NCCL put there."""
    size = shutil.disk_usage(host.SHM).total if host.SHM.is_dir() else 0
    required = host.object_store_bytes()
    state = f"{host.SHM} has {size / GIB:.1f} GiB; Ray's object store would take {required / GIB:.1f} GiB"
    do = f"in Docker --shm-size={required / GIB + 1:.0f}g, in Kubernetes an emptyDir of medium Memory at /dev/shm"
    if n_gpus > 1 and size < NCCL_SHM:
        yield fail("shared memory", f"{state}, and NCCL needs some too", do)
    elif size < required:
        yield warn("shared memory", f"{state}, or uses the disk, slowly", do)
    else:
        yield confirm("shared memory", state)


def check_limits() -> Iterator[Finding]:
    """Check limits of open files and processes; Ray needs some of both for each worker and each connection."""
    files, processes = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    do = "ulimit -n 65536 in the shell that starts Ray; for good in /etc/security/limits.conf"
    if _is_below(files, TOO_FEW_FILES):
        yield fail("limits", f"ulimit -n is {files}", do)
    elif _is_below(files, FEW_FILES):
        yield warn("limits", f"ulimit -n is {files}", do)
    else:
        yield confirm("limits", f"ulimit -n is {'unlimited' if files == resource.RLIM_INFINITY else files}")
    if _is_below(processes, FEW_PROCESSES):
        yield warn("limits", f"ulimit -u is {processes}", "ulimit -u 65536: threads count, too")
    for state, do in host.find_small_limits():
        yield fail("limits", state, do)


def _is_below(limit: int, least: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < least
