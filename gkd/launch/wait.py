"""Waiting for a cluster to answer, and for its nodes to come."""

from __future__ import annotations

import time

import ray

from gkd.cluster.address import require_cluster
from gkd.cluster.session import join
from gkd.errors import ConfigError, RunFailed

CONNECT_TIMEOUT_S = 10.0


def wait_for_head(address: str, timeout_s: float) -> None:
    """Wait until the head at ``host:port`` answers. Raises ConfigError, as for one attempt, after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return require_cluster(address, "--address", CONNECT_TIMEOUT_S)
        except ConfigError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def wait_for_nodes(address: str, n_nodes: int, timeout_s: float) -> None:
    """Wait until the cluster has ``n_nodes``. Raises RunFailed when it has fewer after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    wait_for_head(address, timeout_s)
    join(address, "--address")
    try:
        while (n_there := sum(bool(node["Alive"]) for node in ray.nodes())) < n_nodes:
            if time.monotonic() > deadline:
                raise RunFailed(f"{n_there} of {n_nodes} nodes joined {address} within {timeout_s:.0f} s")
            time.sleep(0.5)
    finally:
        ray.shutdown()
