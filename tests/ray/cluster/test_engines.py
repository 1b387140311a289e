"""Workers that make one engine: who leads, what each part sees, and what happens when one is lost."""

import os
import signal

import pytest

from gkd.cluster.engines import Engines
from gkd.cluster.group import gather
from gkd.errors import RunFailed
from tests.ray.cluster.conftest import alive, configuration, eventually

PART = "tests.ray.cluster.cluster_targets:Part"


def rollout_of(placed, **settings):
    return placed(configuration(1, settings, None)).groups["rollout"]


def test_a_leader_sees_all_the_gpus_of_its_engine(placed):
    rollout = rollout_of(placed, n_gpus_per_node=4, tensor_parallel_size=2)
    ids = [r.cuda_visible_devices for r in rollout.reports]
    engines = Engines.of(rollout, 2, timeout_s=30)
    assert (len(engines.leaders), len(engines.followers)) == (2, 0)
    gather(engines.submit_build(PART, PART, [("a",), ("b",)], {}), 30)
    assert engines.leaders.call("what", timeout_s=30) == [
        ("a", None, f"{ids[0]},{ids[1]}"), ("b", None, f"{ids[2]},{ids[3]}"),
    ]  # fmt: skip
    assert engines.bind().refs == ()
    assert Engines.of(rollout, 1, timeout_s=30).leaders is rollout


def test_an_engine_over_nodes_has_a_part_on_each_and_ends_with_any(placed):
    rollout = rollout_of(placed, n_gpus_per_node=2, nnodes=4, tensor_parallel_size=4, across_nodes=True)
    by_node = [rollout.reports[first : first + 2] for first in range(0, 8, 2)]
    engines = Engines.of(rollout, 4, timeout_s=30)
    assert [report.rank for report in engines.leaders.reports] == [0, 4]
    assert [report.rank for report in engines.followers.reports] == [2, 6]
    gather(engines.submit_build(PART, PART, [("a",), ("b",)], {}), 30)
    leading, following = (group.call("what", timeout_s=30) for group in (engines.leaders, engines.followers))
    for told, node_rank, nodes in ((leading, 0, by_node[::2]), (following, 1, by_node[1::2])):
        for (name, span, seen), wanted, reports, head in zip(told, "ab", nodes, engines.leaders.reports, strict=True):
            assert name == wanted
            assert (span.nnodes, span.node_rank, span.master_addr) == (2, node_rank, head.ip)
            assert seen == ",".join(r.cuda_visible_devices for r in reports)
    assert [span.master_port for _, span, _ in leading] == [span.master_port for _, span, _ in following]

    serving = engines.bind()
    assert len(serving.refs) == 2
    children = engines.leaders.call("spawn_child", timeout_s=30)
    os.kill(engines.followers.reports[1].pid, signal.SIGKILL)
    assert eventually(lambda: not alive(engines.leaders.reports[1].pid) and not alive(children[1]))
    with pytest.raises(RunFailed, match=r"rollout rank 6 .* died"):
        gather([serving], 30)
    assert engines.leaders.only([0]).call("what", timeout_s=30)  # the other engine goes on
    assert alive(children[0])
    os.kill(engines.leaders.reports[0].pid, signal.SIGKILL)
    assert eventually(lambda: not alive(engines.followers.reports[0].pid))


def test_an_engine_with_more_gpus_on_one_node_than_on_another_is_refused(placed):
    rollout = rollout_of(placed, n_gpus_per_node=3, nnodes=2)
    with pytest.raises(RunFailed, match=r"an engine of tensor_parallel_size=4 from rank 0 on has 3 \+ 1 GPUs"):
        Engines.of(rollout, 4, timeout_s=30)
