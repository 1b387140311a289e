"""A real cluster: jobs that finish, fail and are stopped, two runs beside each other, the doctor."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import psutil

from tests.e2e.conftest import PAUSE
from tests.e2e.on_a_cluster.conftest import HEAD_GPUS, WORKER_GPUS, ClusterHere
from tests.error_text import contains_in_order
from tests.ray.cluster.conftest import eventually

USERS = """
import os, pathlib
import gkd
def odd(completion):
    pathlib.Path({report!r}).write_text(gkd.__file__ + " " + os.environ["RAY_JOB_STOP_WAIT_TIME_S"])
    return 0.5 * (completion.n_tokens % 2)
def even(completion):
    return 0.5 - odd(completion)
"""
OTHER_RAY = "import sys, ray; ray.__version__ = '2.59.1'; from {module} import main; sys.exit(main(sys.argv[1:]))"


def rows(output: Path) -> list[dict[str, float]]:
    file = output / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def devices(records: list[dict[str, list[str]]]) -> set[str]:
    return {uuid for record in records for uuid in record["gpu_uuids"]}


def test_two_jobs_beside_each_other_one_that_ends_and_one_that_is_stopped(
    cluster: ClusterHere, small: list[str], tmp_path: Path
) -> None:
    """Each has GPUs, names and ports of its own, and brings its code; what is stopped leaves nothing."""
    output, pause = tmp_path / "run", tmp_path / "pause.py"
    pause.write_text(PAUSE)
    paused = f"reward.functions=[accuracy,{pause}:pause]"
    submitted = cluster.submit(*small, paused, "trainer.total_steps=100000", f"trainer.output_dir={output}")
    assert submitted.returncode == 0, submitted.stderr
    name = re.findall(r"^submitted (\S+) to", submitted.stdout, re.M)[0]
    assert eventually(lambda: len(rows(output)) > 2, 300), cluster.submit("--status").stdout
    placed = json.loads((output / "placement.json").read_text())
    processes = [psutil.Process(record["pid"]) for record in placed]
    processes += [child for process in processes for child in process.children(recursive=True)]
    assert len(processes) >= 3  # actor, rollout, and the one that computes rewards

    others = _a_job_from_a_users_directory(cluster, small, tmp_path / "user")
    assert others and not others & devices(placed)

    stopped = cluster.submit("--stop", name)
    assert (stopped.returncode, stopped.stdout) == (0, f"stopped {name}\n"), stopped.stderr
    assert stopped.stderr.startswith(f"stopping {name}, ")
    assert eventually(lambda: not any(process.is_running() for process in processes), 60)
    assert eventually(lambda: cluster.free_gpus() == HEAD_GPUS + WORKER_GPUS, 60)
    assert f"{name}  STOPPED  {output}" in cluster.submit("--status").stdout
    attached = cluster.submit("--attach", name)
    assert attached.returncode == 143
    assert "before training" in attached.stdout
    assert "Traceback" not in attached.stdout
    assert re.search(r"checkpoint .*\bstep \d+", attached.stdout), attached.stdout[-1500:]
    assert re.search(r"^stopped by SIGTERM; checkpoint: .*/checkpoints/step_\d+ \(", attached.stdout, re.M)


def _a_job_from_a_users_directory(cluster: ClusterHere, small: list[str], directory: Path) -> set[str]:
    """The reward and gkd itself travel, the relative output directory means this one; returns the job's GPUs."""
    report = directory / "told"
    (directory / "data").mkdir(parents=True)
    (directory / "mine.py").write_text(USERS.format(report=str(report)))
    (directory / "data" / "large.bin").write_bytes(os.urandom(3_000_000))
    settings = [
        "trainer.total_steps=2",
        "trainer.output_dir=my runs/first",
        "reward.functions=['mine.py:odd','mine:even']",
    ]
    done = cluster.submit("--follow", *small, *settings, cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    output = directory / "my runs" / "first"
    assert [row["step"] for row in rows(output)] == [0, 1, 2]
    assert "step 2/2" in done.stdout
    packed = re.search(r"packed \d+ files of .*, ([\d.]+) MB", done.stdout)
    assert packed is not None
    assert float(packed[1]) < 1.0
    code, time_to_stop_s = report.read_text().split()
    assert "/working_dir_files/" in code
    assert float(time_to_stop_s) > 60  # for a last checkpoint; without it Ray kills after 3 s
    return devices(json.loads((output / "placement.json").read_text()))


def test_a_jobs_own_exit_code_and_what_it_said(cluster: ClusterHere, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    files = ["data.train_files=[rows.jsonl]", "data.val_files=[rows.jsonl]", "data.answer_key=answer"]
    done = cluster.submit("--follow", "+recipe=grpo", "model.path=/nowhere/model", *files, cwd=tmp_path)
    assert done.returncode == 2
    assert "error: model.path=/nowhere/model: " in done.stdout
    [name] = re.findall(r"^(grpo-\S+): FAILED with exit code 2$", done.stderr, re.M)
    stopped = cluster.submit("--stop", name)
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert contains_in_order(stopped.stdout, name, "FAILED", "exit code 2")


def test_an_engine_over_two_nodes(cluster: ClusterHere, small: list[str], tmp_path: Path) -> None:
    """One GPU on each: what both halves sample with is what is trained, also after weights came in flight."""
    done = cluster.run(
        sys.executable, "-m", "gkd.main", *small, "rollout.engine=vllm", "rollout.nnodes=2",
        "rollout.tensor_parallel_size=2", "rollout.across_nodes=true", "reward.functions=[format]",
        "reward.format.pattern='^[0-3]'", "actor.lr=0.01", "trainer.total_steps=3", "schedule.max_staleness=1",
        "schedule.in_flight=true", f"trainer.output_dir={tmp_path / 'run'}", timeout_s=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"at {cluster.address}" in done.stdout
    placed = json.loads((tmp_path / "run" / "placement.json").read_text())
    nodes = {(row["group"], row["rank"]): row["node"] for row in placed}
    assert nodes["rollout", 0] != nodes["rollout", 1]
    metrics = rows(tmp_path / "run")
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert all(abs(row.get("mismatch/kl", 0.0)) < 1e-4 for row in metrics[1:])  # of fresh tokens, where there are any
    ages = [row["staleness/max"] for row in metrics[1:]]  # on a busy machine weights may come before it samples again
    assert ages[0] == 0 and set(ages) <= {0, 1}
    assert sum(row["actor/grad_norm"] for row in metrics[1:3]) > 0  # there were new weights
    assert eventually(lambda: cluster.free_gpus() == HEAD_GPUS + WORKER_GPUS, 60)


def test_the_doctor_looks_at_every_node(cluster: ClusterHere, tmp_path: Path) -> None:
    done = cluster.run(sys.executable, "-m", "gkd.doctor", "--address", cluster.address)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    findings = [(level, what, rest) for level, what, rest in lines if what in ("nodes", "clock", "packages", "gpus")]
    assert [(level, rest[:9]) for level, what, rest in findings if what == "nodes"] == [("ok", "2 answer:")]
    assert any((level, what) == ("ok", "clock") and "2 nodes" in rest for level, what, rest in findings)
    assert any((level, what) == ("ok", "packages") and "2 nodes" in rest for level, what, rest in findings)
    simulated = [rest for _, what, rest in findings if what == "gpus" and "simulates" in rest]
    assert len(simulated) == 2
    assert f"simulates {HEAD_GPUS}" in simulated[0] + simulated[1]


def test_a_head_that_runs_is_not_started_again(cluster: ClusterHere) -> None:
    ports = ("--port", str(cluster.port), "--dashboard-port", str(cluster.dashboard_port))
    again = cluster.node("head", *ports)
    assert again.returncode == 0
    assert f"cluster {cluster.address} runs here" in again.stdout
    other = cluster.node("head", "--port", "6399")
    assert other.returncode == 2
    assert other.stderr.startswith("error: a head")


def test_a_port_that_is_taken_is_named(cluster: ClusterHere, tmp_path: Path) -> None:
    directory = Path(f"{cluster.directory}-none")
    done = cluster.run(
        "env", f"GKD_RAY_DIR={directory}", "./launch/ray_cluster.sh", "head", "--port", str(cluster.port)
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert contains_in_order(done.stderr, f"error: port {cluster.port} ", "--port")
    directory.rmdir()


def test_another_version_of_ray_is_one_line(cluster: ClusterHere, small: list[str], tmp_path: Path) -> None:
    run = [sys.executable, "-c", OTHER_RAY.format(module="gkd.cli.train"), *small]
    joined = cluster.run(*run, f"cluster.address={cluster.address}", f"trainer.output_dir={tmp_path / 'run'}")
    job = cluster.run(
        sys.executable, "-c", OTHER_RAY.format(module="gkd.cli.submit"), "--address", cluster.dashboard, "--status"
    )
    for done, where in ((joined, f"cluster.address={cluster.address}"), (job, f"--address {cluster.dashboard}")):
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith(f"error: {where}: ")
        assert "Ray 2.59.1" in done.stderr
        assert done.stderr.count("\n") == 1


def test_an_unknown_job_is_one_line(cluster: ClusterHere) -> None:
    done = cluster.submit("--stop", "nobody")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
