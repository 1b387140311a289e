"""Workers that make one engine: who leads, what each part sees, and what happens when one is lost."""

import json
import os
import re
import signal

import pytest

from gkd.cluster.health.watched import return_text
from gkd.cluster.workers.engines import Engines
from gkd.cluster.workers.failure import NodeLost
from gkd.cluster.workers.group import gather
from gkd.cluster.workers.reserve import read_nodes
from gkd.errors import RunFailed
from tests.ray.cluster.conftest import alive, configuration, eventually

PART = "tests.ray.cluster.cluster_targets:Part"


def rollout_of(placed, **settings):
    return placed(configuration(1, settings, None)).groups["rollout"]


def test_a_leader_sees_all_the_gpus_of_its_engine(placed):
    rollout = rollout_of(placed, n_gpus_per_node=4, tensor_parallel_size=2)
    ids = [r.cuda_visible_devices for r in rollout.reports]
    engines = Engines.from_group(rollout, 2, timeout_s=30)
    assert (len(engines.leaders), len(engines.followers)) == (2, 0)
    gather(engines.submit_build(PART, PART, [("a",), ("b",)], {}), 30)
    assert engines.leaders.call("what", timeout_s=30) == [
        ("a", None, f"{ids[0]},{ids[1]}"), ("b", None, f"{ids[2]},{ids[3]}"),
    ]  # fmt: skip
    assert engines.bind().refs == ()
    assert Engines.from_group(rollout, 1, timeout_s=30).leaders is rollout


def test_an_engine_over_nodes_has_a_part_on_each_and_ends_with_any(placed):
    rollout = rollout_of(placed, n_gpus_per_node=2, nnodes=4, tensor_parallel_size=4, across_nodes=True)
    by_node = [rollout.reports[first : first + 2] for first in range(0, 8, 2)]
    engines = Engines.from_group(rollout, 4, timeout_s=30)
    assert [report.rank for report in engines.leaders.reports] == [0, 4]
    assert [report.rank for report in engines.followers.reports] == [2, 6]
    gather(engines.submit_build(PART, PART, [("a",), ("b",)], {}), 30)
    leading, following = (group.call("what", timeout_s=30) for group in (engines.leaders, engines.followers))
    for parts, node_rank, nodes in ((leading, 0, by_node[::2]), (following, 1, by_node[1::2])):
        for (name, span, seen), expected, reports, head in zip(
            parts, "ab", nodes, engines.leaders.reports, strict=True
        ):
            assert name == expected
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
    assert engines.leaders.select([0]).call("what", timeout_s=30)  # the other engine goes on
    assert alive(children[0])
    os.kill(engines.leaders.reports[0].pid, signal.SIGKILL)
    assert eventually(lambda: not alive(engines.followers.reports[0].pid))


def test_an_engine_with_more_gpus_on_one_node_than_on_another_is_refused(placed):
    rollout = rollout_of(placed, n_gpus_per_node=3, nnodes=2)
    with pytest.raises(RunFailed, match=r"tensor_parallel_size=4 from rank 0 .*3 \+ 1 GPUs"):
        Engines.from_group(rollout, 4, timeout_s=30)


def test_an_engine_whose_node_has_left_is_started_on_another_one(cluster, placed, hold, tmp_path):
    """Of two GPUs, on the only node that has as many free; where there is none it is given up; others come back."""
    first, *others = read_nodes()
    hold({node.id: 8 for node in others})
    leaving = cluster.add_node(wait=True, num_gpus=2, num_cpus=4)
    hold({first.id: 5})  # the first engine and the actor fit beside that
    placement = placed(
        configuration(1, {"n_gpus_per_node": 2, "nnodes": 2, "tensor_parallel_size": 2}, None, reserve_timeout_s=2.0)
    )
    placement.write_json(tmp_path / "placement.json")
    engines = Engines.from_group(placement.groups["rollout"], 2, timeout_s=30)
    stays, leaves = engines.leaders.reports
    assert (stays.node_id, leaves.node_id) == (first.id, leaving.node_id)
    cluster.remove_node(leaving)
    with pytest.raises(NodeLost, match=r"node left, .*\b2 s"):
        engines.start_again(placement, 1)
    os.kill(stays.pid, signal.SIGKILL)  # what is reserved elsewhere is as it was
    assert engines.start_again(placement, 0).reports[0].gpu_uuids == stays.gpu_uuids

    hold.release()
    hold({others[0].id: 7} | {node.id: 8 for node in others[1:]})
    worker = engines.start_again(placement, 1)
    (report,) = worker.reports
    assert (report.node_id, report.rank) == (first.id, 2)
    ranks = placement.groups["rollout"].reports[2:]
    assert len({uuid for r in placement.reports for uuid in r.gpu_uuids}) == 5
    gather([worker.submit_build(PART, [("c", None)])], 30)
    assert worker.call("what", timeout_s=30) == [("c", None, ",".join(r.cuda_visible_devices for r in ranks))]
    written = json.loads((tmp_path / "placement.json").read_text())
    assert [(r["node"], r["pid"]) for r in written[-2:]] == [(r.node, r.pid) for r in ranks]
    os.kill(report.pid, signal.SIGKILL)  # and there it comes back like any other
    assert engines.start_again(placement, 1).reports[0].gpu_uuids == report.gpu_uuids
    text = return_text(report, leaves)
    assert re.match(rf"{re.escape(str(report))} .* \(SIM-", text)
    assert leaves.node in text.rpartition("): ")[2]
