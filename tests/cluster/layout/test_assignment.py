"""The check of who got which GPU, on made-up reports, and how it is shown."""

import json
from dataclasses import fields
from types import SimpleNamespace

import pytest

from gkd.cluster.layout.assignment import DeviceReport, Report, assignment_line, describe_use, faults, placement_table
from gkd.cluster.workers import placement as placement_module
from gkd.cluster.workers.group import Group
from gkd.cluster.workers.placement import Placement, _require_whole_gpus, place
from gkd.cluster.workers.reserve import Claim
from gkd.config import load
from gkd.errors import ConfigError, RunFailed
from gkd.observability.progress import console, print_table
from tests.error_text import contains_in_order

NO_RANGES = {"actor": None, "rollout": None}


def report(group, rank, gpu, uuid=None, **changes):
    facts = {
        "node_id": "n1", "ip": "10.0.0.1", "pid": 100 + gpu, "cuda_visible_devices": str(gpu), "node": "10.0.0.1",
        "ray_gpu_ids": [str(gpu)], "gpu_uuids": [uuid or f"GPU-{gpu}"], "gpu_indices": [gpu],
    }  # fmt: skip
    return Report(**{**facts, **changes}, group=group, rank=rank)


def test_a_right_assignment_has_no_faults():
    assert faults([report("actor", 0, 0), report("rollout", 0, 1), report("rollout", 1, 2)], NO_RANGES) == []


def test_a_gpu_that_other_programs_use_is_named_once():
    some, much = ({"gpu_bytes": 80 << 30, "gpu_used": used << 30} for used in (2, 40))
    reports = [report("actor", 0, 0, **some), report("rollout", 0, 1, **much), report("teacher", 0, 1, **much)]
    (line,) = describe_use([*reports, report("teacher", 1, 2)])
    assert contains_in_order(line, "GPU-1", "10.0.0.1", "40.0", "80.0 GiB")


def test_a_shared_gpu_names_both_workers():
    lines = faults([report("actor", 0, 0, "GPU-x"), report("rollout", 0, 1, "GPU-x")], NO_RANGES)
    assert len(lines) == 1
    workers = ("actor rank 0 (pid 100 on 10.0.0.1)", "rollout rank 0 (pid 101 on 10.0.0.1)")
    assert contains_in_order(lines[0], *workers, "GPU-x")


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"trainer.n_gpus_per_node": 2}, "actor"),
        ({"rollout.n_gpus_per_node": 2, "rollout.tensor_parallel_size": 2}, "rollout"),
        ({"rollout.n_gpus_per_node": 2}, None),
    ],
)
def test_slices_of_gpus_are_for_workers_that_need_one(settings, refused):
    config = load({}).with_settings({"teacher.n_gpus_per_node": 1, **settings})
    for prefix in ("GPU", "MIG"):
        reports = [report(group, i, i, f"{prefix}-{i}") for i, group in enumerate(("actor", "rollout"))]
        if refused and prefix == "MIG":
            with pytest.raises(ConfigError, match=rf"{refused} rank .*\(MIG\).* GPUs would"):
                _require_whole_gpus(config, reports)
        else:
            _require_whole_gpus(config, reports)


def test_two_workers_of_one_group_must_not_share_either():
    assert len(faults([report("rollout", i, i, "GPU-x") for i in range(3)], NO_RANGES)) == 3


def test_sharing_is_allowed_only_between_the_groups_told():
    reports = [report("actor", 0, 0, "GPU-x"), report("rollout", 0, 1, "GPU-x"), report("teacher", 0, 2, "GPU-x")]
    lines = faults(reports, NO_RANGES, shared=[frozenset(("actor", "rollout"))])
    assert len(lines) == 2
    assert all("teacher" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cuda_visible_devices": "0"}, "CUDA_VISIBLE_DEVICES=0"),
        ({"gpu_uuids": []}, "sees 0 GPUs instead of 1"),
        (
            {"cuda_visible_devices": "1,2", "ray_gpu_ids": ["1", "2"], "gpu_uuids": ["a", "b"]},
            "sees 2 GPUs instead of 1",
        ),
    ],
)
def test_a_worker_that_sees_another_device_than_its_own_is_named(changes, expected):
    (line,) = faults([report("actor", 0, 1, **changes)], NO_RANGES)
    assert expected in line
    assert "actor rank 0" in line


def test_a_range_that_was_not_honoured_says_what_was_asked_and_had():
    reports = [report("actor", 0, 2), report("actor", 1, 4)]
    (line,) = faults(reports, {"actor": [[2, 3]]})
    assert contains_in_order(line, "actor", "2-3", "2,4", "10.0.0.1")
    assert faults(reports, {"actor": [[2, 4]]}) == []


def test_a_range_holds_on_every_node():
    reports = [report("actor", 0, 2), report("actor", 1, 3, node="10.0.0.2")]
    (line,) = faults(reports, {"actor": [[2]]})
    assert contains_in_order(line, "actor", "2", "3", "10.0.0.2")
    assert faults([reports[0], report("actor", 1, 2, "GPU-x", node="10.0.0.2")], {"actor": [[2]]}) == []


def test_each_node_has_a_range_of_its_own():
    reports = [report("actor", 0, 2), report("actor", 1, 3, node="10.0.0.2")]
    assert faults(reports, {"actor": [[3], [2]]}) == []
    twice = [reports[0], report("actor", 1, 2, "GPU-x", node="10.0.0.2")]
    (line,) = faults(twice, {"actor": [[3], [2]]})
    assert contains_in_order(line, "actor", "3 and 2", "2", "10.0.0.2")
    (line,) = faults(reports, {"actor": [[2], [2]]})
    assert contains_in_order(line, "actor", "2 and 2", "3", "10.0.0.2")


def test_table_rows_are_not_broken_and_the_line_is_in_order(capsys):
    uuid = "GPU-8f2c1f3e-0000-1111-2222-123456789abc"
    reports = [
        report("actor", 0, 0, node="gpu-node-with-a-long-name.cluster.local", uuid=uuid),
        report("rollout", 0, 3),
    ]
    print_table(console(), placement_table(reports))
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("actor")]
    assert row.split() == ["actor", "0", "gpu-node-with-a-long-name.cluster.local", "100", "0", "0", uuid]
    assert assignment_line(reports) == "GPU Assignments: ['0', '3']"


def test_json_has_one_record_a_worker(tmp_path):
    reports = (report("actor", 0, 0),)
    Placement({"actor": Group("actor", (None,), reports)}).write_json(tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text()) == [
        {"group": "actor", "rank": 0, "node": "10.0.0.1", "pid": 100, "cuda_visible_devices": "0",
         "ray_gpu_ids": ["0"], "gpu_uuids": ["GPU-0"]}
    ]  # fmt: skip


def test_the_file_has_the_processes_of_workers_that_were_started_again(tmp_path, monkeypatch):
    """The monitor looks for them there."""
    pids = iter([7, 8, 9])

    def started_again(session, claims, cluster):
        return [claim(report("", 0, old.device.gpu_indices[0], pid=next(pids))) for old in claims]

    def written():
        return [(record["group"], record["pid"]) for record in json.loads((tmp_path / "placement.json").read_text())]

    monkeypatch.setattr("gkd.cluster.workers.placement.start_again", started_again)
    ranks = Group("actor", (None, None), (report("actor", 0, 0), report("actor", 1, 1)))
    service = object()
    placement = Placement({"actor": ranks}, {"actor": [claim(one) for one in ranks.reports]}, {"n1": "10.0.0.1"})
    placement.session.control = service  # type: ignore[assignment]
    placement.write_json(tmp_path / "placement.json")
    worker = placement.restart_worker("actor", 1)
    (alone,) = worker.reports
    assert (alone.rank, alone.pid) == (1, 7)
    assert placement.groups["actor"].service is service
    assert worker.service is None  # what waits for it beside the run must not take the one notice of its loss
    assert written() == [("actor", 100), ("actor", 7)]
    placement.restart("actor")
    assert written() == [("actor", 8), ("actor", 9)]


def test_a_fault_is_one_line_with_everything_in_it_after_what_there_is_was_shown(monkeypatch):
    shown = []
    for name, made in (("reserve", ({}, {})), ("group_requests", []), ("faults", ["a", "b"])):
        monkeypatch.setattr(placement_module, name, lambda *_, made=made: made)
    config = SimpleNamespace(cluster=None, groups=dict, may_share=dict)
    with pytest.raises(RunFailed, match=r": a; b$"):
        place(config, SimpleNamespace(), show=lambda _, is_right: shown.append(is_right))
    assert shown == [False]


def test_a_node_that_comes_back_under_another_name_has_the_gpus_that_it_had(monkeypatch):
    """Two engines were on n1, which is n3 now: the first of them to move may get the GPU that the other one had."""
    claims = {group: [claim(one) for one in own] for group, own in MOVED.items()}
    groups = {group: Group(group, ("worker",) * len(own), tuple(own), None) for group, own in MOVED.items()}
    placement = Placement(groups, claims, {"n1": "10.0.0.1", "n2": "10.0.0.2"})
    there = {"n2": "10.0.0.2", "n3": "10.0.0.1"}
    moved = claim(report("rollout", 0, 1, node_id="n3"))
    monkeypatch.setattr(placement_module, "start_elsewhere", lambda *arguments: ([moved], there))
    assert placement.move_workers("rollout", [0]).reports[0].gpu_uuids == ["GPU-1"]
    assert [one.node_id for one in placement.reports] == ["n2", "n3", "n1"]
    duplicate = claim(report("rollout", 1, 9, "GPU-a", node_id="n2"))  # which a living worker has
    monkeypatch.setattr(placement_module, "start_elsewhere", lambda *arguments: ([duplicate], there))
    monkeypatch.setattr(placement.session, "release", lambda *arguments: None)
    with pytest.raises(RunFailed, match=r"GPU-a"):
        placement.move_workers("rollout", [1])


MOVED = {
    "actor": [report("actor", 0, 8, "GPU-a", node_id="n2")],
    "rollout": [report("rollout", 0, 0), report("rollout", 1, 1)],
}


def claim(one):
    device = DeviceReport(**{field.name: getattr(one, field.name) for field in fields(DeviceReport)})
    return Claim("worker", SimpleNamespace(placement_group=None), device, {})
