"""launch/verify_gpus.py as users run it: what it prints, what it writes, and its exit code."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from gkd.cli import verify_gpus
from tests.error_text import contains_in_order
from tests.ray.cluster.conftest import configuration

REAL = ["cluster.simulate_gpus=null", "cluster.cpus_per_worker=0.5"]
SCRIPT = Path(__file__).parents[3] / "launch" / "verify_gpus.py"

FAKE_NVML = """
class NVMLError(Exception):
    pass

class NVMLError_NoPermission(NVMLError):
    pass

def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 4
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(index): return UUIDS[index]
def nvmlDeviceGetHandleByUUID(uuid): return 0 if uuid.startswith("MIG-") else UUIDS.index(uuid)
def nvmlDeviceGetMemoryInfo(index):
    return type("Memory", (), {"total": 80 << 30, "free": (79 - 30 * (index == 3)) << 30})
"""


def start(*arguments, cwd, script=SCRIPT, **environment):
    clean = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS", "PYTHONPATH")}
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        cwd=cwd, env={**clean, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def fake_gpus(folder, uuids):
    """A machine with four GPUs of these UUIDs, as far as NVML goes."""
    folder.mkdir()
    (folder / "pynvml.py").write_text(f"UUIDS = {uuids!r}\n{FAKE_NVML}")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{SCRIPT.parents[1]}", "GKD_SIMULATED_GPUS": ""}


def last_line(out):
    return out.rstrip("\n").splitlines()[-1]


def test_in_a_checkout_the_workers_use_its_own_code(tmp_path):
    """Not that of an installed version; from whatever directory the script is started."""
    checkout, imported = tmp_path / "checkout", tmp_path / "imported"
    for folder in ("gkd", "recipes", "conf", "launch"):
        shutil.copytree(SCRIPT.parents[1] / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    with (checkout / "gkd" / "cluster" / "gpu.py").open("a") as file:
        file.write(f"\nwith open({str(imported)!r}, 'a') as file:\n    print(os.getpid(), file=file)\n")
    done = start("--simulate-gpus", "3", "--json", "out.json", cwd=tmp_path, script=checkout / "launch" / SCRIPT.name)
    out, err = done.communicate(timeout=120)
    assert (done.returncode, err) == (0, ""), out
    workers = [record["pid"] for record in json.loads((tmp_path / "out.json").read_text())]
    assert len(workers) == 3 and {*workers} <= {*map(int, imported.read_text().split())}


def test_it_shows_the_assignment_also_when_the_parent_lists_fewer_gpus_than_are_simulated(tmp_path):
    run = start(
        "--simulate-gpus", "8", "trainer.n_gpus_per_node=1", "rollout.n_gpus_per_node=3", "--json", "out.json",
        "teacher.n_gpus_per_node=4", cwd=tmp_path, CUDA_VISIBLE_DEVICES="0,1",
    )  # fmt: skip
    out, err = run.communicate(timeout=120)
    assert (run.returncode, err) == (0, "")
    assert last_line(out) == "GPU Assignments: ['0', '1', '2', '3', '4', '5', '6', '7']"
    records = json.loads((tmp_path / "out.json").read_text())
    assert [(r["group"], r["rank"]) for r in records] == [
        ("actor", 0), *(("rollout", i) for i in range(3)), *(("teacher", i) for i in range(4)),
    ]  # fmt: skip
    keys = ["group", "rank", "node", "pid", "cuda_visible_devices", "ray_gpu_ids", "gpu_uuids"]
    assert all(list(record) == keys for record in records)
    assert [r["cuda_visible_devices"] for r in records] == list("01234567")
    assert len({uuid for r in records for uuid in r["gpu_uuids"]}) == 8
    rows = [line.split() for line in out.splitlines() if line.strip().startswith("rollout")]
    assert [(row[1], row[4]) for row in rows] == [("0", "1"), ("1", "2"), ("2", "3")]


def test_beside_a_run_on_one_cluster_it_has_other_gpus(placed, cluster, tmp_path):
    """Also where a token is at hand that the cluster does not ask for."""
    run = placed(configuration(1, 1, 1))
    assert ray.util.list_named_actors(all_namespaces=True) == []  # so two runs cannot take each other's names
    beside = start(f"cluster.address={cluster.address}", "--json", "out.json", cwd=tmp_path, RAY_AUTH_TOKEN="0" * 64)
    _, err = beside.communicate(timeout=120)
    assert (beside.returncode, err) == (0, "")
    other = [uuid for record in json.loads((tmp_path / "out.json").read_text()) for uuid in record["gpu_uuids"]]
    assert len(set(other)) == 3
    assert not set(other) & {uuid for report in run.reports for uuid in report.gpu_uuids}


def test_real_gpus_by_uuid_are_right_and_two_tokens_of_one_gpu_collide(tmp_path):
    gpus = [f"GPU-{letter * 8}" for letter in "abcd"]
    right = start(
        *REAL, "trainer.gpus=3", "rollout.gpus=1", "teacher.gpus=0", "--json", "out.json",
        cwd=tmp_path, CUDA_VISIBLE_DEVICES=f"{gpus[3]},{gpus[0]},{gpus[1]}", **fake_gpus(tmp_path / "a", gpus),
    )  # fmt: skip
    wrong = start(
        "cluster.simulate_gpus=null",
        "cluster.cpus_per_worker=0.5",
        cwd=tmp_path,
        **fake_gpus(tmp_path / "b", [gpus[0], gpus[1], gpus[1], gpus[2]]),
    )
    out, err = right.communicate(timeout=120)
    assert right.returncode == 0
    (line,) = err.splitlines()  # of the actor's GPU, which somebody else uses
    assert contains_in_order(line, gpus[3], "actor rank 0", "31.0", "80.0 GiB")
    assert [r["gpu_uuids"] for r in json.loads((tmp_path / "out.json").read_text())] == [
        [gpus[3]], [gpus[1]], [gpus[0]],
    ]  # fmt: skip

    out, err = wrong.communicate(timeout=120)
    assert wrong.returncode == 1
    assert last_line(out) == "GPU Assignments: ['0', '1', '2']"
    (line,) = [line for line in err.splitlines() if line.startswith("failed: ")]
    assert "rollout rank 0" in line
    assert "teacher rank 0" in line
    assert line.endswith(f"share GPU {gpus[1]}")
    (logs,) = [line.partition(": ")[2] for line in err.splitlines() if line.startswith("logs ")]
    assert Path(logs).is_dir()
    shutil.rmtree(Path(logs).parents[1])


def test_slices_of_gpus_have_the_numbers_of_their_places_in_the_list(tmp_path):
    """They have none of their own: a range would wait for as long as it may for GPUs that are free."""
    run = start(
        *REAL, "trainer.gpus=2", "rollout.gpus=0", "teacher.gpus=1", "cluster.reserve_timeout_s=30", "--json=out.json",
        cwd=tmp_path, CUDA_VISIBLE_DEVICES="MIG-b,MIG-a,MIG-c",
        **fake_gpus(tmp_path / "a", [f"GPU-{letter * 8}" for letter in "abcd"]),
    )  # fmt: skip
    _, err = run.communicate(timeout=120)
    assert (run.returncode, err) == (0, "")
    placed = json.loads((tmp_path / "out.json").read_text())
    assert [worker["gpu_uuids"] for worker in placed] == [["MIG-c"], ["MIG-b"], ["MIG-a"]]


def test_an_engine_spans_no_slices_of_gpus(tmp_path):
    run = start(
        *REAL, "rollout.n_gpus_per_node=2", "rollout.tensor_parallel_size=2", cwd=tmp_path,
        CUDA_VISIBLE_DEVICES="MIG-b,MIG-a,MIG-c,MIG-d",
        **fake_gpus(tmp_path / "a", [f"GPU-{letter * 8}" for letter in "abcd"]),
    )  # fmt: skip
    _, err = run.communicate(timeout=120)
    assert run.returncode == 2
    assert contains_in_order(err, "rollout rank 0", "(MIG)", "rollout.tensor_parallel_size=1")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--simulate-gpus", "8", "rollout.n_gpus_per_node=4", "teacher.n_gpus_per_node=4"], "nearest that fits: "),
        (["--simulate-gpus", "8", "teacher.gpus=7-8"], "teacher.gpus=7-8 is beyond this cluster"),
        (["--simulate-gpus", "8", "trainer.gpus=0-1", "rollout.gpus=1-2"], "both name GPU 1"),
        (
            ["--simulate-gpus", "8", "rollout.nnodes=3"],
            "1 on each of 3 nodes, teacher 1 = 5 GPUs; this cluster has 8 on 1",
        ),
        (["--simulate-gpus", "x"], "invalid int value"),
        (["teacher.n_gpu_per_node=1"], "teacher.n_gpus_per_node"),
        (["--json", "nowhere/at/all.json"], "there is no directory"),
        (["--json", "/"], "--json /: cannot be written"),
        (["--jsn"], "--help"),
    ],
)
def test_what_cannot_be_placed_ends_in_one_line(capfd, arguments, expected, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(verify_gpus, "exit_on_signals", lambda: None)
    assert verify_gpus.main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert expected in err
    assert err.count("\n") == 1


def test_help_says_what_it_is_for(tmp_path):
    run = start("--help", cwd=tmp_path)
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 0
    assert "--simulate-gpus N" in out
