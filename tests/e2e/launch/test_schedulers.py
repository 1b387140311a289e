"""launch/slurm.sbatch and launch/kuberay/rayjob.yaml: what Slurm and Kubernetes would make of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray
import yaml
from jsonschema import Draft202012Validator

from gkd.config.compose import compose
from tests.e2e.conftest import ROOT, environment
from tests.e2e.on_a_cluster.conftest import marked
from tests.error_text import contains_in_order

SBATCH = ROOT / "launch" / "slurm.sbatch"
# One machine as two nodes: srun drops its own options and starts the rest here.
SRUN = '#!/usr/bin/env bash\nwhile [[ ${1:-} == --* ]]; do shift; done\nexec "$@"\n'
SCONTROL = "#!/usr/bin/env bash\nprintf 'here\\nhere\\n'\n"


def directives() -> dict[str, str]:
    lines = [line for line in SBATCH.read_text().splitlines() if line.startswith("#SBATCH")]
    matches = [re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?(?:\s+#.*)?", line) for line in lines]
    assert all(matches), lines
    return {match[1]: match[2] or "" for match in matches if match}


def test_slurm_reads_the_directives() -> None:
    lines = SBATCH.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert (
        max(i for i, line in enumerate(lines) if line.startswith("#SBATCH")) < first_command
    )  # later ones are ignored
    options = directives()
    assert options.keys() >= {"nodes", "gpus-per-node", "cpus-per-task", "time", "output"}
    assert options["ntasks-per-node"] == "1"
    assert "/" not in options["output"]  # Slurm makes no directories, and ends a job without a log without a word
    assert sum("EDIT:" in line for line in lines) == 5
    subprocess.run(["bash", "-n", SBATCH], check=True)


def test_a_job_that_was_queued_again_goes_on_in_its_own_directory_or_that_of_its_settings(tmp_path: Path) -> None:
    part = SBATCH.read_text().partition("# A job that was queued again")[2].partition("\n\n")[0].partition("\n")[2]
    file, own = tmp_path / "own=1.yaml", f"trainer.output_dir={tmp_path}/run"

    def settled(content: str, *arguments: str, restarts: str = "1") -> list[str]:
        file.write_text(content)
        command = ["bash", "-euc", f'{part}\nprintf "%s\\n" "$@"', "bash", *arguments]
        job = {"SLURM_JOB_ID": "7", "GKD_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
        variables = {**os.environ, **job, "SLURM_RESTART_COUNT": restarts}
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.splitlines()

    path, again, waits = str(file), "trainer.resume=auto", "cluster.reserve_timeout_s=900"
    assert settled("recipe: grpo\n", path) == [waits, path, "trainer.output_dir=outputs/slurm-7", again]
    assert settled("recipe: grpo\n", path, restarts="0") == [waits, path, "trainer.output_dir=outputs/slurm-7"]
    assert settled(f"trainer: {{output_dir: {tmp_path}/run}}", path) == [waits, path, again]
    assert settled("recipe: grpo\n", own, path) == [waits, own, path, again]
    assert settled("recipe: grpo\n", "+recipe=grpo", own, restarts="0") == [waits, "+recipe=grpo", own]
    assert settled("recipe: grpo\n", f"++{own}", restarts="0") == [waits, f"++{own}"]
    ends = "cluster: {reserve_timeout_s: 60}\ntrainer: {output_dir: a}\n"
    assert settled(ends, path, restarts="0") == [path]
    assert settled("", "cluster.reserve_timeout_s=60", own, restarts="0") == ["cluster.reserve_timeout_s=60", own]


@pytest.mark.parametrize(
    ("own", "known", "expected"),
    [
        ("10.0.0.5", "", "10.0.0.5:7"),
        ("127.0.1.1", "127.0.1.1 STREAM a\n10.0.0.5 STREAM a", "10.0.0.5:7"),  # Debian's /etc/hosts, and no way out
        ("127.0.0.1", "2001:db8::5 STREAM a", "[2001:db8::5]:7"),
        ("::1", "::1 STREAM a\n2001:db8::5 STREAM a", "[2001:db8::5]:7"),
        ("127.0.0.1", "127.0.1.1 STREAM a", None),
        ("127.0.0.1", "", None),
    ],
)
def test_workers_get_an_address_of_the_head_that_they_reach(own: str, known: str, expected: str | None) -> None:
    text = SBATCH.read_text()
    part = text[text.index("own_ip=") : text.index("steps=()")]
    played = """
srun() { case "$*" in *getent*) printf '%s\\n' "$KNOWN"; [ -n "$KNOWN" ] ;; *) printf '%s\\n' "$OWN" ;; esac; }
nodes=(a b); head=a; port=7; GKD_PYTHON=python
"""
    command = ["bash", "-euo", "pipefail", "-c", f'{played}{part}\nprintf "%s\\n" "$address"']
    variables = {**os.environ, "OWN": own, "KNOWN": known}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if expected is None:
        assert done.returncode == 2 and contains_in_order(done.stderr, "error: b ", " of a ", "loopback")
    else:
        assert (done.stdout, done.stderr, done.returncode) == (f"{expected}\n", "", 0)


def test_the_script_starts_a_cluster_ends_it_and_has_the_runs_exit_code(tmp_path: Path) -> None:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = str(2_000_000 + os.getpid() % 1_000_000)  # none of those of slurm.py, beside which it may run
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "here[1-2]"}
    variables = {**environment(), **slurm, "GKD_PYTHON": sys.executable, "GKD_SIMULATE_GPUS": "2"}
    done = subprocess.run(
        ["bash", SBATCH, "+recipe=grpo", "model.path=/nowhere/model", "data.train_files=[x]", "data.val_files=[x]",
         "data.answer_key=a", f"trainer.output_dir={tmp_path / 'run'}"],
        env={**variables, "PATH": f"{tmp_path}:{variables['PATH']}"}, capture_output=True, text=True, timeout=600,
        check=False, cwd=tempfile.gettempdir(),
    )  # fmt: skip
    directory = Path(f"/tmp/gkd-{job}")
    try:
        assert done.returncode == 2, done.stdout + done.stderr
        assert "the head" in done.stdout
        assert "the worker" in done.stdout
        assert "error: model.path=/nowhere/model: " in done.stderr
        assert marked(directory) == []
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def test_kubernetes_accepts_the_ray_job() -> None:
    """KubeRay's schema for RayJob, and what it leaves to the operator."""
    text = (ROOT / "launch" / "kuberay" / "rayjob.yaml").read_text()
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    schema = Draft202012Validator(json.loads((Path(__file__).parent / "rayjob_schema.json").read_text()))
    assert [f"{error.json_path}: {error.message}" for error in schema.iter_errors(job)] == []
    wrong = yaml.safe_load(text.replace("submissionMode: K8sJobMode", "submissionmode: K8sJobMode"))
    assert "submissionmode" in next(schema.iter_errors(wrong)).message
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == ray.__version__
    assert isinstance(yaml.safe_load(spec["runtimeEnvYAML"]), dict)
    (worker,) = cluster["workerGroupSpecs"]
    assert worker["minReplicas"] <= worker["replicas"] <= worker["maxReplicas"]
    for group in (cluster["headGroupSpec"], worker):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert all(isinstance(variable["value"], str) for variable in container["env"])
        assert "# EDIT" in text
    program, module, name, *overrides = shlex.split(spec["entrypoint"])
    assert (program, module, name) == ("python", "-m", "gkd.main")
    config = compose(overrides)
    n_gpus = int(worker["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert sum(pool.n_workers for _, pool in config.pools()) <= n_gpus * worker["replicas"]
