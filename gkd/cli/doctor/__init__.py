"""Check what this machine, or a cluster, has against what runs need; each line states what to do.

    gkd doctor                         # this machine, and the cluster that a run started here would join
    gkd doctor --address HOST:6379     # every node of that cluster as well

Exit codes: 0 nothing failed (there may be warnings), 1 something did, 2 the address does not answer.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from gkd.cli.doctor.finding import Finding, confirm, fail, warn
from gkd.errors import Parser, RunFailed, entry_point


@entry_point
def main(arguments: Sequence[str]) -> int:
    """Print the findings as they come; returns the exit code."""
    parser = Parser("gkd doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", metavar="HOST:PORT", help="a node of the cluster to check")
    address = parser.parse_args(arguments).address
    counted: Counter[str] = Counter()
    for finding in _findings(address):
        counted[finding.level] += 1
        print(finding, flush=True)
    print(f"{counted['ok']} ok, {counted['warning']} warnings, {counted['failed']} failed")
    return 1 if counted["failed"] else 0


def _findings(address: str | None) -> Iterator[Finding]:
    if find_spec("packaging") is None or find_spec("ray") is None:
        yield fail(
            "python",
            f"{sys.executable} has none of this project's packages",
            "./launch/quickstart.sh installs them; then .venv/bin/python -m gkd.doctor",
        )
        return
    from gkd.cli.doctor import devices, packages, system
    from gkd.cluster.session import local

    gpus, lost = devices.NO_GPUS, list[Finding]()
    try:
        gpus = devices.read_gpus()
    except RunFailed as error:
        lost.append(fail("gpus", str(error), "reset that GPU, or the machine: no run starts here"))
    n_gpus = len(gpus.devices)
    yield from packages.check_python()
    yield from packages.check_packages()
    yield from packages.check_build(n_gpus)
    yield from packages.check_bytecode()
    yield from lost or devices.check_gpus(gpus)
    yield from devices.check_compiler(gpus)
    yield from devices.check_mps(gpus)
    yield from devices.check_torch(gpus)
    yield from system.check_ports(bool(local.nodes()))
    yield from system.check_disks(_places())
    if obstacle := local.find_obstacle():
        yield warn("cluster", obstacle, "./launch/ray_cluster.sh starts no node with this one")
    yield from system.check_shared_memory(n_gpus)
    yield from system.check_limits()
    yield from _cluster(address)


def _places() -> dict[str, Path]:
    from gkd.cluster.session import local

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or "/") / ".cache") / "gkd"
    places = {
        "outputs": Path.cwd() / "outputs",
        "Ray": Path(os.environ.get("RAY_TMPDIR") or "/tmp"),
        "cache": cache,
    }
    return places | ({local.DIRECTORY: local.directory()} if os.environ.get(local.DIRECTORY) else {})


def _cluster(option: str | None) -> Iterator[Finding]:
    import ray

    from gkd.cli.doctor.cluster import check_cluster
    from gkd.cluster.session.connect import cluster_address, join

    address = cluster_address(option)
    if address is None:
        yield confirm("cluster", "none is named and none was started here: a run starts a private Ray")
        return
    join(address, "RAY_ADDRESS" if option is None and "RAY_ADDRESS" in os.environ else "--address")
    try:
        yield from check_cluster()
    finally:
        ray.shutdown()
