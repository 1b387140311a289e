"""One Ray cluster of simulated GPUs for all tests of the folder: four nodes of eight on this machine."""

import contextlib
import logging
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group, remove_placement_group

from gkd.cluster import gpu
from gkd.cluster.session import reaper
from gkd.cluster.session.connect import connect, start_needed_servers_only
from gkd.cluster.workers.placement import place
from gkd.cluster.workers.reserve import read_nodes
from gkd.config import load


def pytest_collection_modifyitems(items):
    # A process has one connection to Ray. The other folders share another Ray for the whole session, so these tests
    # come first and close their own behind them; before that come those that need no connection.
    items.sort(key=lambda item: ("tests/ray/cluster/" not in item.nodeid, "cluster" in item.fixturenames))


@pytest.fixture(scope="package")
def cluster():
    directory = tempfile.mkdtemp(prefix="gkd-test-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        # Its own directory, so that it is not what `address=auto` finds for others on this machine.
        patch.setenv("RAY_TMPDIR", directory)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv(gpu.SIMULATED, "1")
        patch.delenv(gpu.VISIBLE, raising=False)
        patch.delenv("RAY_ADDRESS", raising=False)
        with start_needed_servers_only():
            made = _four_nodes(directory)
        ray.init(address=made.address, log_to_driver=False, logging_level=logging.ERROR)
        try:
            yield made
        finally:
            ray.shutdown()
            made.shutdown()
            assert reaper.end_all(directory) == []
            shutil.rmtree(directory)


def _four_nodes(directory):
    node = {"num_gpus": 8, "num_cpus": 8}

    def start():
        made = Cluster(True, head_node_args={**node, "include_dashboard": False})
        for _ in range(3):
            made.add_node(wait=False, **node)
        made.wait_for_nodes()
        return made

    try:
        return start()
    except Exception:  # Ray gives a node 30 s to start, which a busy machine with two cores may miss: once more
        reaper.end_all(directory, grace_s=0)
        return start()


def configuration(trainer=1, rollout=1, teacher=1, **cluster_settings):
    """A configuration of pools; each is a count, or a dict of pool settings, None for an external teacher."""

    def pool(value):
        return value if isinstance(value, dict) else {"n_gpus_per_node": value}

    tree = {"trainer": pool(trainer), "rollout": pool(rollout), "cluster": cluster_settings}
    if teacher is None:
        models = {"model": {"path": "x"}, "data": {"train_files": ["x"], "val_files": ["x"]}}
        return load({**tree, **models, "teacher": {"server_ip": "127.0.0.1"}})
    return load({**tree, "teacher": pool(teacher)})


@pytest.fixture
def placed(cluster):
    """Place a configuration on the cluster; everything is given back after the test."""

    def free():
        return sum(node.free_gpus + node.free_cpus for node in read_nodes())

    before = free()
    with contextlib.ExitStack() as stack:

        def run(config):
            return place(config, stack.enter_context(connect(config)))

        yield run
    assert eventually(lambda: free() >= before)


@pytest.fixture
def hold(cluster):
    """Take GPUs as another job would: ``hold({node_id: n})`` returns when they are taken; ``hold.release()``."""

    class Hold:
        def __init__(self):
            self.groups = []

        def __call__(self, n_by_node):
            nodes = [node for node, n in n_by_node.items() for _ in range(n)]
            selector = [{"ray.io/node-id": node} for node in nodes]
            group = placement_group([{"GPU": 1}] * len(nodes), bundle_label_selector=selector)
            self.groups.append(group)
            assert group.wait(30)

        def release(self):
            while self.groups:
                remove_placement_group(self.groups.pop())

    held = Hold()
    yield held
    held.release()


def alive(pid):
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second where it goes between opening and reading
        return False


def device_ids(placement):
    """Ray's GPU ids by group, in rank order."""
    return {name: [int(r.ray_gpu_ids[0]) for r in group.reports] for name, group in placement.groups.items()}


def eventually(condition, timeout_s=60.0):
    """Whether a condition comes true in time; Ray frees and ends things in the background."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
