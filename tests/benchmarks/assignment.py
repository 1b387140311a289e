"""How long the check of who has which GPU takes, and how that grows with the number of workers.

    python tests/benchmarks/assignment.py [--rounds 3]

Starts four Ray nodes with eight simulated GPUs each on this machine and runs, in turn, launch/verify_gpus.py for 8, 16
and 32 workers (placement=8gpu, 2x8gpu, 4x8gpu). Prints, for each, the medians over the rounds of

- *program*: the whole command, from its start to its end,
- *placing*: in it, from the first reservation to the last report, without Python's start, joining and leaving,
- *CPU*: what Ray's processes, workers included, computed meanwhile, which other programs on the machine change less,

and how many times longer each took than for half as many workers: at most 2 means no faster than the workers. A round
before is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import ray
from ray.cluster_utils import Cluster

sys.path.insert(0, str(Path(__file__).parents[2]))

from gkd.cluster import gpu
from gkd.cluster.session import reaper
from gkd.cluster.session.connect import connect
from gkd.cluster.workers.placement import place
from gkd.cluster.workers.reserve import read_nodes
from gkd.config.compose import compose

ROOT = Path(__file__).parents[2]
LAYOUTS = {8: "8gpu", 16: "2x8gpu", 32: "4x8gpu"}
FREE_TIMEOUT_S = 60.0


def start_nodes(directory: str) -> Cluster:
    """Four nodes of eight simulated GPUs, as the tests of gkd.cluster have them."""
    os.environ |= {
        "RAY_TMPDIR": directory,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        gpu.SIMULATED: "1",
    }
    os.environ.pop(gpu.VISIBLE, None)
    node = {"num_gpus": 8, "num_cpus": 8}
    cluster = Cluster(True, head_node_args={**node, "include_dashboard": False, "no_monitor": True})
    for _ in range(3):
        cluster.add_node(wait=False, **node)
    cluster.wait_for_nodes()
    return cluster


def program_s(address: str, workers: int, report: Path) -> float:
    """Seconds launch/verify_gpus.py takes; every worker must have a GPU of its own."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, ROOT / "launch" / "verify_gpus.py", "--json", report, f"cluster.address={address}",
         f"placement={LAYOUTS[workers]}"], stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    took = time.perf_counter() - began
    assert len({uuid for record in json.loads(report.read_text()) for uuid in record["gpu_uuids"]}) == workers
    return took


def cpu_s(directory: str) -> float:
    """Seconds that the living processes of this Ray have computed."""
    times = [psutil.Process(pid).cpu_times() for pid in reaper.processes_of(directory)]
    seconds: float = sum(each.user + each.system for each in times)
    return seconds


def placing_s(workers: int, directory: str) -> tuple[float, float]:
    """Seconds that reserving, starting and checking takes, and CPU seconds of it."""
    config = compose([f"placement={LAYOUTS[workers]}", "cluster.simulate_gpus=null"])
    with connect(config) as session:
        began, computed = time.perf_counter(), cpu_s(directory)
        place(config, session)
        return time.perf_counter() - began, cpu_s(directory) - computed


def wait_until_free() -> None:
    """Ray frees and ends things in the background."""
    deadline = time.monotonic() + FREE_TIMEOUT_S
    while sum(node.free_gpus for node in read_nodes()) < 32:
        if time.monotonic() > deadline:
            raise TimeoutError(f"GPUs were not free again after {FREE_TIMEOUT_S:.0f} s")
        time.sleep(0.1)
    time.sleep(2.0)  # for the processes to end, too


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    times: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="gkd-b-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        cluster = start_nodes(directory)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        try:
            for round_ in range(-1, rounds):
                for workers in LAYOUTS:
                    durations = {"program": program_s(cluster.address, workers, Path(directory) / "report.json")}
                    wait_until_free()
                    durations["placing"], durations["CPU"] = placing_s(workers, directory)
                    wait_until_free()
                    summary = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in durations.items())
                    print(f"round {round_ + 1}: {workers} workers: {summary}", flush=True)
                    for what, seconds in durations.items() if round_ >= 0 else ():
                        times.setdefault((what, workers), []).append(seconds)
        finally:
            ray.shutdown()
            cluster.shutdown()
            reaper.end_all(directory)
    for what in ("program", "placing", "CPU"):
        medians = [statistics.median(times[what, workers]) for workers in LAYOUTS]
        growth = [f"{more / less:.2f}" for less, more in itertools.pairwise(medians)]
        figures = ", ".join(f"{n} workers {median:.1f} s" for n, median in zip(LAYOUTS, medians, strict=True))
        print(f"{what}: {figures}; twice the workers take {', '.join(growth)} times as long")


if __name__ == "__main__":
    main()
