"""The layout solver against a brute-force search, and what it tells the user."""

import itertools
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gkd.cluster.layout import fit
from gkd.cluster.layout import nodes as layout_nodes
from gkd.cluster.layout.fit import find_nearest_layout, require_fit
from gkd.cluster.layout.nodes import GroupRequest, Node, choose_devices, group_requests, solve
from gkd.config import GROUP_OF
from gkd.config.compose import compose, groups
from gkd.errors import ConfigError
from tests.error_text import contains_in_order


def node(name, n_gpus, cpus=64.0):
    return Node(name, name, tuple(range(n_gpus)), cpus, n_gpus, cpus)


def pool(group, n, nnodes=1, gpus=None, tp=1, by_node=()):
    return GroupRequest(group, n, nnodes, gpus, tp, by_node=by_node)


def usual(actor, rollout, teacher):
    return [pool("actor", actor), pool("rollout", rollout), pool("teacher", teacher)]


small_nodes = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(
    lambda counts: [node(f"n{i}", n) for i, n in enumerate(counts)]
)
ranges = st.sets(st.integers(0, 5), min_size=1, max_size=3).map(lambda s: tuple(sorted(s)))


@st.composite
def small_asks(draw):
    requests = []
    for group in ("actor", "rollout", "teacher")[: draw(st.integers(1, 3))]:
        gpus = draw(st.none() | ranges)
        if gpus and draw(st.booleans()):  # another range of as many on a second node
            other = tuple(sorted(draw(st.permutations(range(6)))[: len(gpus)]))
            requests.append(pool(group, len(gpus), 2, by_node=(gpus, other)))
            continue
        n = len(gpus) if gpus else draw(st.integers(1, 4))
        requests.append(pool(group, n, draw(st.integers(1, 2)), gpus))
    return requests


@st.composite
def busy_nodes(draw):
    """Of which others hold some GPUs and CPUs."""
    nodes = []
    for i, n in enumerate(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))):
        free_cpus = float(draw(st.integers(0, 6)))
        nodes.append(Node(f"n{i}", f"n{i}", tuple(range(n)), 6.0, draw(st.integers(0, n)), free_cpus))
    return nodes


def fits_by_brute_force(requests, nodes, cpus=0.0):
    where = [itertools.permutations if a.by_node else itertools.combinations for a in requests]
    choices = [ways(range(len(nodes)), a.nnodes) for a, ways in zip(requests, where, strict=True)]
    for choice in itertools.product(*choices):
        requested = [
            zip(where, a.by_node or [a.gpus] * a.nnodes, strict=True) for a, where in zip(requests, choice, strict=True)
        ]
        on_node = [[] for _ in nodes]
        for a, places in zip(requests, requested, strict=True):
            for position, gpus in places:
                on_node[position].append((a.n_gpus, gpus))
        if all(_node_holds(one, here, cpus) for one, here in zip(nodes, on_node, strict=True)):
            return True
    return False


def _node_holds(one, requested, cpus):
    named, n = [gpu for _, gpus in requested for gpu in gpus or ()], sum(n for n, _ in requested)
    has_room = n <= one.free_gpus and n * cpus <= one.free_cpus
    return has_room and len(set(named)) == len(named) and set(named) <= set(one.gpus)


@given(small_asks(), small_nodes)
def test_it_finds_a_layout_exactly_when_there_is_one(requests, nodes):
    assert (solve(requests, nodes, 0.0) is not None) == fits_by_brute_force(requests, nodes)


@given(small_asks(), busy_nodes(), st.sampled_from([0.5, 1.0, 1.5]))
def test_it_finds_a_layout_beside_others_exactly_when_there_is_one(requests, nodes, cpus):
    assert (solve(requests, nodes, cpus) is not None) == fits_by_brute_force(requests, nodes, cpus)


@given(small_asks(), small_nodes)
def test_no_two_groups_share_a_gpu_ranges_are_exact_and_ranks_go_by_node_and_device(requests, nodes):
    slots = solve(requests, nodes, 1.0)
    if slots is None:
        return
    assert [s.group for s in slots] == [a.group for a in requests for _ in range(a.nnodes)]
    chosen = choose_devices(slots, {n.id: n.gpus for n in nodes})
    assert isinstance(chosen, list)
    used = [(slot.node_id, gpu) for slot, devices in zip(slots, chosen, strict=True) for gpu in devices]
    assert len(set(used)) == len(used)
    for slot, devices in zip(slots, chosen, strict=True):
        assert len(devices) == slot.n_gpus
        assert devices == sorted(devices)
        assert slot.gpus is None or tuple(devices) == slot.gpus
    for a in requests:
        where = [s.node_id for s in slots if s.group == a.group]
        assert len(set(where)) == len(where) == a.nnodes
        assert where == sorted(where)
        assert not a.by_node or sorted(s.gpus for s in slots if s.group == a.group) == sorted(a.by_node)


@given(small_asks(), small_nodes)
def test_the_nearest_layout_fits_and_gives_up_as_few_gpus_as_possible(requests, nodes):
    layout = find_nearest_layout(requests, nodes, 0.0)
    smaller = [
        [pool(a.group, n, k) for n in range(1, a.n_gpus + 1) for k in range(1, a.nnodes + 1)]
        + ([pool(a.group, a.n_gpus, k, a.gpus) for k in range(1, a.nnodes + 1)] if a.gpus else [])
        + ([a] if a.by_node else [])
        for a in requests
    ]
    fitting = [mix for mix in itertools.product(*smaller) if fits_by_brute_force(mix, nodes)]
    if not fitting:
        assert layout is None
        return
    assert fits_by_brute_force(layout, nodes)
    assert sum(a.total for a in layout) == max(sum(a.total for a in mix) for mix in fitting)
    assert all(new.n_gpus <= old.n_gpus and new.nnodes <= old.nnodes for old, new in zip(requests, layout, strict=True))


def test_groups_take_gpus_in_order():
    slots = solve(usual(1, 3, 4), [node("a", 8)], 1.0)
    assert choose_devices(slots, {"a": range(8)}) == [[0], [1, 2, 3], [4, 5, 6, 7]]


def test_groups_without_a_range_avoid_those_of_others():
    requests = [pool("actor", 2), pool("rollout", 2, gpus=(0, 1)), pool("teacher", 2, gpus=(3, 4))]
    assert choose_devices(solve(requests, [node("a", 8)], 1.0), {"a": range(8)}) == [[2, 5], [0, 1], [3, 4]]


def test_groups_may_name_the_same_gpus_of_different_nodes():
    requests = [
        pool("actor", 4, by_node=((0, 1, 2, 3),)),
        pool("rollout", 4, 2, by_node=((4, 5, 6, 7), (0, 1, 2, 3))),
    ]
    slots = solve(requests, [node("a", 8), node("b", 8)], 1.0)
    assert [(s.group, s.node_id, s.gpus[0]) for s in slots] == [
        ("actor", "a", 0),
        ("rollout", "a", 4),
        ("rollout", "b", 0),
    ]


@pytest.mark.parametrize(
    ("requested", "sizes"),
    [(pool("rollout", 2, 3), [2, 4, 2]), (pool("rollout", 2, 2, by_node=((6, 7), (0, 1))), [2, 8])],
)
def test_ranks_go_by_node_also_where_nodes_differ(requested, sizes):
    nodes = [node("abc"[i], n) for i, n in enumerate(sizes)]
    assert [slot.node_id for slot in solve([requested], nodes, 1.0)] == [n.id for n in nodes]


def test_a_held_device_is_named():
    slots = solve([pool("actor", 2, gpus=(0, 3))], [node("a", 8)], 1.0)
    problem = choose_devices(slots, {"a": [1, 2, 3]})
    assert isinstance(problem, str) and contains_in_order(problem, "GPU 0", "actor")


def test_a_large_group_that_only_fits_the_second_node_is_found_there():
    slots = solve([pool("actor", 4), pool("rollout", 8)], [node("big", 8), node("small", 4)], 1.0)
    assert [(s.group, s.node_id) for s in slots] == [("actor", "small"), ("rollout", "big")]


def test_groups_share_a_node_while_it_lasts_and_then_go_on_to_the_next():
    slots = solve(
        [pool("actor", 2), pool("rollout", 2, nnodes=2), pool("teacher", 4)], [node(n, 4) for n in "abc"], 1.0
    )
    assert [(s.group, s.node_id) for s in slots] == [
        ("actor", "a"), ("rollout", "a"), ("rollout", "b"), ("teacher", "c"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("requests", "fits"),
    [
        (
            [pool("actor", 1, 4), pool("rollout", 2, 6), pool("teacher", 8, 3)],
            False,
        ),  # two nodes are wholly free
        ([pool("actor", 3, 4), pool("rollout", 5, 8), pool("teacher", 3, 6)], True),
        (
            [pool("actor", 2, 16), pool("rollout", 6, 4), pool("teacher", 4, 9), pool("reference", 1, 12)],
            False,
        ),
    ],
)
def test_of_nodes_that_all_differ_few_choices_are_tried(requests, fits, monkeypatch):
    """Of millions of ways to choose among 16 of them."""
    tried, choices = [], layout_nodes._choices

    def count_choices(*arguments):
        for positions in choices(*arguments):
            tried.append(positions)
            yield positions

    monkeypatch.setattr(layout_nodes, "_choices", count_choices)
    held = [0, 0, 1, 5, 3, 2, 4, 1, 3, 2, 5, 4, 1, 3, 2, 4]
    nodes = [Node(f"n{i}", f"n{i}", tuple(range(8)), 64.0, 8 - n, 64.0 - 2 * n - i) for i, n in enumerate(held)]
    assert (solve(requests, nodes, 1.0) is not None) == fits
    assert len(tried) <= 10


def test_a_search_ends_after_its_tries():
    requests, nodes = [pool("actor", 1), pool("rollout", 4)], [node("n0", 4), node("n1", 1)]
    assert solve(requests, nodes, 0.0, tries=1) is None  # the actor on the first node, which the rollout needs
    assert solve(requests, nodes, 0.0) is not None


def test_of_many_groups_that_do_not_fit_a_selection_of_smaller_ones_is_looked_at(monkeypatch):
    """Of thirty million layouts of five groups on four nodes."""
    mixes = []

    def product(*options):
        for mix in itertools.islice(itertools.product(*options), fit.MOST_MIXES + 1):
            mixes.append(mix)
            yield mix

    monkeypatch.setattr(fit, "itertools", SimpleNamespace(product=product))
    requests = [pool(group, 8, 4) for group in ("actor", "rollout", "teacher", "reference", "reward_model")]
    with pytest.raises(ConfigError, match=r"= 160 GPUs; .* fits: "):
        require_fit(requests, [node(f"n{i}", 8) for i in range(4)], 1.0)
    assert 0 < len(mixes) <= fit.MOST_MIXES


def test_a_thousand_nodes_are_no_trouble():
    nodes = [node(f"n{i}", 8) for i in range(1000)]
    assert len(solve([pool("actor", 8, 400), pool("rollout", 8, 300), pool("teacher", 8, 300)], nodes, 1.0)) == 1000
    with pytest.raises(ConfigError, match=r"fits: .*trainer\.nnodes=399"):
        require_fit([pool("actor", 8, 400), pool("rollout", 8, 300), pool("teacher", 8, 301)], nodes, 1.0)


@pytest.mark.parametrize(
    ("requests", "nodes", "message"),
    [
        (
            usual(1, 4, 4),
            [node("a", 8)],
            "asked for actor 1, rollout 4, teacher 4 = 9 GPUs; this cluster has 8 on 1 node; nearest that fits: "
            "trainer.n_gpus_per_node=1 rollout.n_gpus_per_node=3 teacher.n_gpus_per_node=4",
        ),
        (
            [pool("rollout", 8, tp=4), pool("teacher", 4, tp=2)],
            [node("a", 11)],
            "nearest that fits: rollout.n_gpus_per_node=8 teacher.n_gpus_per_node=2",
        ),
        (
            [pool("rollout", 4, nnodes=3)],
            [node("a", 8), node("b", 4)],
            "rollout 4 on each of 3 nodes = 12 GPUs; this cluster has 8+4 on 2 nodes; "
            "nearest that fits: rollout.n_gpus_per_node=4 rollout.nnodes=2",
        ),
        (
            [pool("rollout", 8, nnodes=5, tp=4)],
            [*(node(name, 6) for name in "abcd"), node("e", 2)],
            "nearest that fits: rollout.n_gpus_per_node=4 rollout.nnodes=4",
        ),
        (
            [pool("rollout", 4, gpus=(6, 7, 8, 9))],
            [node("a", 8)],
            "rollout.gpus=6-9 is beyond this cluster: a node has the GPUs 0-7; "
            "nearest that fits: rollout.gpus=null rollout.n_gpus_per_node=4",
        ),
        (
            [pool("rollout", 2, 2, by_node=((6, 7), (8, 9)))],
            [node("a", 8), node("b", 8)],
            "rollout.gpus_by_node=[6-7,8-9] is beyond this cluster: a node has the GPUs 0-7; "
            "nearest that fits: rollout.gpus_by_node=null rollout.n_gpus_per_node=2",
        ),
        (
            [pool("rollout", 2, 2, by_node=((0, 1), (2, 3)))],
            [node("a", 8)],
            "asked for rollout 2 on each of 2 nodes (GPUs 0-1 and 2-3) = 4 GPUs; this cluster has 8 on 1 node",
        ),
        (
            usual(1, 1, 2),
            [node("a", 8, cpus=2)],
            "4 GPUs and 4 CPUs (cluster.cpus_per_worker=1); this cluster has 2 CPUs on 1 node; "
            "nearest that fits: cluster.cpus_per_worker=0.5",
        ),
        (usual(1, 1, 1), [node("a", 8, cpus=2)], "nearest that fits: cluster.cpus_per_worker=0.66"),
        (
            usual(1, 1, 9),
            [node("a", 4, cpus=2)],
            "trainer.n_gpus_per_node=1 rollout.n_gpus_per_node=1 teacher.n_gpus_per_node=2 cluster.cpus_per_worker=0.5",
        ),
        (
            usual(1, 1, 1),
            [node("a", 2)],
            "no layout of 3 groups fits: each needs a GPU of its own (an external teacher, teacher.server_ip, needs "
            "none here); placement=2gpu lets them share",
        ),
        (usual(1, 1, 1), [node("a", 1)], "; placement=single_gpu lets them share"),
        (
            [pool("actor", 1, gpus=(0,)), pool("rollout", 1), pool("teacher", 1, by_node=((2,),))],
            [node("a", 2)],
            "placement=2gpu in place of trainer.gpus and teacher.gpus_by_node lets them share",
        ),
        (usual(1, 1, 1), [], "this cluster has 0 on 1 node"),
    ],
)
def test_what_does_not_fit_is_told_with_the_nearest_layout_that_does(requests, nodes, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        require_fit(requests, nodes, 1.0)
    assert "\n" not in str(caught.value)


def test_a_range_of_another_numbering_is_accepted():
    require_fit([pool("actor", 2, gpus=(4, 5))], [Node("a", "a", (4, 5, 6, 7), 8.0)], 1.0)


SCORED = ["algorithm.kl.coef=0.1", "reward.functions=[accuracy,reward_model]", "reward_model.model.path=x"]
DISTIL, REWARD = ["+recipe=distill_and_reward"], ["+recipe=grpo", *SCORED]
ALL = [*DISTIL, *SCORED]
# By placement and recipe: GPUs of the machines, and the devices of actor, rollout, teacher, reference and reward model;
# a to d are the machines.
PLACED = {
    "single_gpu": (ALL, [1], "a0", "a0", "a0", "a0", "a0"),
    "2gpu": (ALL, [2], "a0 a1", "a0 a1", "a1", "a1", "a1"),
    "3gpu": (ALL, [3], "a0 a1", "a0 a1", "a2", "a2", "a2"),
    "4gpu": (ALL, [4], "a0", "a1 a2", "a3", "a3", "a3"),
    "auto": (ALL, [5], "a0", "a1", "a2", "a3", "a4"),
    "cpu": (DISTIL, [3], "a0", "a1", "a2"),
    "8gpu": (DISTIL, [8], "a0", "a1 a2 a3", "a4 a5 a6 a7"),
    "8gpu_two_actors": (DISTIL, [8], "a2 a3", "a0 a1", "a4 a5 a6 a7"),
    "2x8gpu": (DISTIL, [8, 8], "a0 a1", "a2 a3 a4 a5 a6 a7", "b0 b1 b2 b3 b4 b5 b6 b7"),
    "4x8gpu": (
        DISTIL, [8] * 4, *(" ".join(f"{m}{i}" for m in group for i in range(8)) for group in ("a", "bc", "d")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("placement", groups()["placement"])
def test_every_placement_puts_the_groups_where_its_file_says(placement):
    recipe, machines, *expected = PLACED[placement]
    config = compose([*recipe, f"placement={placement}"])
    assert _devices(config, machines) == expected
    assert {device for group in expected for device in group.split()} == {
        f"{'abcd'[i]}{gpu}" for i, n in enumerate(machines) for gpu in range(n)
    }


@pytest.mark.parametrize("n_gpus", [1, 2, 3, 4])
def test_where_groups_are_more_than_gpus_the_placement_that_shares_them_is_named(n_gpus):
    nodes = [node("a", n_gpus)]
    with pytest.raises(ConfigError, match=r"\b5 groups") as caught:
        require_fit(group_requests(compose([*ALL, "placement=auto"])), nodes, 1.0)
    named = re.search(r"placement=\w+", str(caught.value))[0]
    require_fit(group_requests(compose([*ALL, named])), nodes, 1.0)


@pytest.mark.parametrize("placement", ["8gpu", "8gpu_two_actors", "2x8gpu", "4x8gpu"])
def test_reference_and_reward_model_fit_in_the_place_of_a_teacher(placement):
    assert _devices(compose([*REWARD, f"placement={placement}"]), PLACED[placement][1])


def _devices(config, machines):
    """Machine and index of every worker in rank order, by group."""
    nodes = [node("abcd"[i], n) for i, n in enumerate(machines)]
    requests = group_requests(config)
    slots = solve(requests, nodes, 1.0)
    chosen = choose_devices(slots, {n.id: n.gpus for n in nodes})
    by_group = {}
    for a in requests:
        per_node = [
            [f"{slot.node_id}{gpu}" for gpu in devices]
            for slot, devices in zip(slots, chosen, strict=True)
            if slot.group == a.group
        ]
        by_group[a.group] = " ".join(device for devices in per_node for device in devices)
        for other in a.colocated:
            by_group[other.group] = " ".join(on[i] for on in per_node[: other.nnodes] for i in other.positions)
    return [by_group[GROUP_OF[section]] for section, _ in config.pools()]


def test_a_gpu_is_shared_by_all_that_compute_on_it():
    """Colocated workers, and actors that an engine starts by itself."""
    teacher = layout_nodes.ColocatedGroup("teacher", (0,), 1)
    alone = GroupRequest("rollout", 2, 1)
    requests = [alone, replace(alone, others_per_gpu=1), replace(alone, colocated=(teacher,), others_per_gpu=1)]
    assert [request.workers_per_gpu for request in requests] == [1, 2, 3]
