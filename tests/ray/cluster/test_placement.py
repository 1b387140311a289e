"""Placing groups on four Ray nodes of eight simulated GPUs: order, exact ranges, and waiting for others."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gkd.cluster.session.connect import connect
from gkd.cluster.workers import reserve as reserve_module
from gkd.cluster.workers.placement import place
from gkd.cluster.workers.reserve import read_nodes
from gkd.errors import ConfigError, RunFailed
from tests.error_text import contains_in_order
from tests.ray.cluster.conftest import alive, configuration, device_ids, eventually


def test_groups_take_gpus_in_order_on_one_node(placed):
    placement = placed(configuration(1, 2, 2))
    assert list(placement.groups) == ["actor", "rollout", "teacher"]
    assert device_ids(placement) == {"actor": [0], "rollout": [1, 2], "teacher": [3, 4]}
    assert len({r.node for r in placement.reports}) == 1
    assert len({r.pid for r in placement.reports}) == 5
    assert all(r.device == "cpu" and r.cuda_visible_devices == r.ray_gpu_ids[0] for r in placement.reports)


@pytest.mark.parametrize(
    ("actor", "rollout", "teacher"),
    [([2, 3], [0, 1], [4, 5]), ([4], [2, 3], [0, 1]), ([3], [5, 2], None)],
)
def test_ranges_are_honoured_exactly(placed, actor, rollout, teacher):
    last = 2 if teacher is None else {"gpus": teacher}
    placement = placed(configuration({"gpus": actor}, {"gpus": rollout}, last))
    expected = {"actor": sorted(actor), "rollout": sorted(rollout), "teacher": teacher or [0, 1]}
    assert device_ids(placement) == expected


def test_thirty_two_gpus_on_four_nodes(placed):
    placement = placed(configuration(8, {"n_gpus_per_node": 8, "nnodes": 2}, 8))
    assert len({uuid for r in placement.reports for uuid in r.gpu_uuids}) == 32
    rollout = placement.groups["rollout"].reports
    assert [int(r.ray_gpu_ids[0]) for r in rollout] == [*range(8), *range(8)]
    assert len({r.node for r in rollout[:8]}) == len({r.node for r in rollout[8:]}) == 1
    assert len({r.node for r in placement.reports}) == 4


def test_an_external_teacher_has_no_pool(placed):
    placement = placed(configuration(1, 1, None))
    assert list(placement.groups) == ["actor", "rollout"]


def test_groups_share_gpus_where_the_configuration_says_so(placed):
    shared = {"gpus": [3], "colocate_with": "actor"}
    placement = placed(configuration({"gpus": [2, 3]}, {"gpus": [2, 3], "colocate_with": "actor"}, shared))
    assert device_ids(placement) == {"actor": [2, 3], "rollout": [2, 3], "teacher": [3]}
    uuids = {(r.group, r.rank): r.gpu_uuids for r in placement.reports}
    assert uuids["actor", 1] == uuids["rollout", 1] == uuids["teacher", 0] != uuids["actor", 0]
    assert len({r.pid for r in placement.reports}) == 5


def test_colocated_groups_are_on_the_gpus_of_their_host_over_nodes(placed):
    host = {"n_gpus_per_node": 5, "nnodes": 2}
    placement = placed(configuration(1, host, {"n_gpus_per_node": 2, "nnodes": 2, "colocate_with": "rollout"}))
    hosts, colocated = placement.groups["rollout"].reports, placement.groups["teacher"].reports
    assert [report.gpu_uuids for report in colocated] == [hosts[i].gpu_uuids for i in (0, 1, 5, 6)]


def test_colocated_groups_need_cpus_of_their_own(cluster, hold):
    config = configuration(8, {"n_gpus_per_node": 8, "colocate_with": "actor"}, 1)
    with connect(config) as session, pytest.raises(ConfigError, match=r"= 9 GPUs and 17 CPUs.*cpus_per_worker=0.5"):
        place(config, session)


def test_a_group_on_uneven_nodes_goes_where_there_is_room(placed, hold):
    first, second, third, fourth = (node.id for node in read_nodes())
    hold({first: 7, second: 6, third: 8, fourth: 8})
    placement = placed(configuration(2, 1, None))
    assert [r.node_id for r in placement.reports] == [second, second, first]
    assert device_ids(placement) == {"actor": [6, 7], "rollout": [7]}


@pytest.mark.parametrize(
    ("actor", "devices"), [({"gpus": [1], "nnodes": 2}, [1, 1]), ({"gpus_by_node": [[2], [1]]}, [2, 1])]
)
def test_exact_gpus_on_two_nodes_with_a_group_without_range_beside(placed, actor, devices):
    placement = placed(configuration(actor, 1, None))
    first, second = placement.groups["actor"].reports
    assert first.node != second.node
    assert device_ids(placement) == {"actor": devices, "rollout": [0]}


def test_what_was_looked_at_but_not_wanted_is_given_back(placed):
    placed(configuration({"gpus": [5]}, 1, None))
    assert eventually(lambda: sum(node.free_gpus for node in read_nodes()) == 30)


def test_leaving_gives_everything_back(cluster):
    config = configuration(1, 1, None)
    with pytest.raises(KeyError), connect(config) as session:
        pids = [r.pid for r in place(config, session).reports]
        raise KeyError
    assert eventually(lambda: not any(map(alive, pids)))
    assert eventually(lambda: sum(node.free_gpus for node in read_nodes()) == 32)
    assert eventually(lambda: sum(node.free_cpus for node in read_nodes()) == 32)


def test_a_layout_beyond_the_cluster_ends_at_once(cluster):
    config = configuration(1, {"n_gpus_per_node": 8, "nnodes": 4}, 1)
    with connect(config) as session, pytest.raises(ConfigError, match=r"8 .*\b4 nodes.*that fits"):
        place(config, session)
    config = configuration(1, {"n_gpus_per_node": 8, "nnodes": 4}, 1, reserve_timeout_s=1.0)
    with connect(config) as session, pytest.raises(RunFailed, match=r"\b1 s \(cluster\.reserve_timeout_s"):
        place(config, session, nodes_come=True)  # in place of one that left


def test_cpus_are_counted(cluster):
    config = configuration(1, 1, None, cpus_per_worker=8.5)
    with connect(config) as session, pytest.raises(ConfigError, match=r"fits: cluster\.cpus_per_worker=8$"):
        place(config, session)


def test_waiting_for_gpus_says_so_and_ends_at_the_deadline(cluster, hold, caplog, monkeypatch):
    monkeypatch.setattr(reserve_module, "LOG_EVERY_S", 0.5)
    caplog.set_level(logging.INFO, "gkd")
    hold({node.id: 8 for node in read_nodes()})
    config = configuration(1, 1, None, reserve_timeout_s=2.0)
    with connect(config) as session, pytest.raises(RunFailed, match=r"\b2 s \(cluster\.reserve_timeout_s\)"):
        place(config, session)
    waiting = [record.getMessage() for record in caplog.records if "waiting for GPUs" in record.getMessage()]
    assert contains_in_order(waiting[0], "actor 1, rollout 1 = 2 GPUs and 2 CPUs", "0 of 32 GPUs and 32 of 32 CPUs")


def test_it_goes_on_as_soon_as_gpus_are_free(placed, hold):
    hold({node.id: 8 for node in read_nodes()})
    timer = threading.Timer(1.0, hold.release)
    timer.start()
    assert device_ids(placed(configuration(1, 1, None, reserve_timeout_s=60.0))) == {"actor": [0], "rollout": [1]}
    timer.join()


def test_a_wanted_gpu_that_someone_else_holds_is_named_and_everything_given_back(cluster, hold):
    nodes = read_nodes()
    hold({node.id: 8 for node in nodes[1:]} | {nodes[0].id: 6})  # Ray gives the lowest first: 6 and 7 are left
    config = configuration({"gpus": [0]}, 1, None, reserve_timeout_s=1.0)
    with connect(config) as session:
        with pytest.raises(RunFailed, match=r"GPU 0 .*actor"):
            place(config, session)
        assert session.workers == session.placement_groups == []
        assert eventually(lambda: read_nodes()[0].free_gpus == 2)


def test_a_wanted_gpu_is_taken_on_another_node_when_it_is_held_on_the_first(placed, hold):
    nodes = read_nodes()
    hold({nodes[0].id: 6, nodes[1].id: 8, nodes[2].id: 8})
    placement = placed(configuration({"gpus": [0]}, {"gpus": [1]}, None, reserve_timeout_s=60.0))
    assert {r.node_id for r in placement.reports} == {nodes[3].id}
    assert device_ids(placement) == {"actor": [0], "rollout": [1]}


def test_a_node_that_joins_while_waiting_is_used_though_it_has_fewer_gpus(cluster, hold):
    first, *others = read_nodes()
    hold({first.id: 5} | {node.id: 8 for node in others})
    config = configuration(3, 2, None, reserve_timeout_s=60.0)
    with connect(config) as session, ThreadPoolExecutor(1) as pool:
        placing = pool.submit(place, config, session)
        time.sleep(1.0)
        assert not placing.done()
        joined = cluster.add_node(wait=True, num_gpus=2, num_cpus=2)  # Ray wants the main thread for this
        try:
            placement = placing.result(timeout=60)
            assert [r.node_id for r in placement.reports] == [first.id] * 3 + [joined.node_id] * 2
            assert device_ids(placement) == {"actor": [5, 6, 7], "rollout": [0, 1]}
        finally:
            cluster.remove_node(joined)
    assert eventually(lambda: len(read_nodes()) == 4)


def test_a_node_that_leaves_while_waiting_is_done_without(cluster, hold):
    """It is the only one with room for the first group, and gone before there is any for the second."""
    hold({node.id: 8 for node in read_nodes()})
    leaving = cluster.add_node(wait=True, num_gpus=2, num_cpus=2)
    config = configuration(2, 2, None, reserve_timeout_s=60.0)
    with connect(config) as session, ThreadPoolExecutor(1) as pool:
        placing = pool.submit(place, config, session)
        time.sleep(1.0)
        assert not placing.done()
        cluster.remove_node(leaving)
        hold.release()
        reports = placing.result(timeout=60).reports
        assert leaving.node_id not in {r.node_id for r in reports}
        assert len({uuid for r in reports for uuid in r.gpu_uuids}) == 4
    assert eventually(lambda: len(read_nodes()) == 4)


@pytest.mark.parametrize(
    ("step", "pool"),
    [
        ("_take", 2),
        ("start_workers", 2),
        ("_read_indices", {"gpus": [1]}),
    ],
)
def test_a_node_that_leaves_while_pools_are_reserved_is_done_without(placed, cluster, hold, monkeypatch, step, pool):
    """The only node with room is gone when this step is done, and the others are free again."""
    hold({node.id: 8 for node in read_nodes()})
    leaving = cluster.add_node(wait=True, num_gpus=2, num_cpus=4)
    real = getattr(reserve_module, step)

    def leave(*arguments, **more):
        if hold.groups:
            if step == "_take":
                result = real(*arguments, **more)
            cluster.remove_node(leaving)
            hold.release()
            if step == "_take":
                return result
        return real(*arguments, **more)

    monkeypatch.setattr(reserve_module, step, leave)
    reports = placed(
        configuration(pool, {"n_gpus_per_node": 1, "colocate_with": "actor"}, None, reserve_timeout_s=60.0)
    ).reports
    assert leaving.node_id not in {r.node_id for r in reports}
    assert not hold.groups
    assert eventually(lambda: len(read_nodes()) == 4)
