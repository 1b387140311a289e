"""launch/slurm.sbatch on a real Slurm: a job to its end, one whose node dies, one that is cancelled."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import SMALL
from tests.e2e.launch.slurm import Slurm, missing, slurm_in
from tests.e2e.on_a_cluster.conftest import marked
from tests.ray.cluster.conftest import eventually

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
RUN = ["+recipe=grpo", "rollout.engine=hf", *SMALL, "data.val_limit=16", "trainer.batch_size=4", "rollout.n=4"]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    folder = Path(tempfile.mkdtemp(prefix="gkd-s-", dir="/tmp"))
    with slurm_in(folder) as running:
        yield running
    shutil.rmtree(folder)


def steps(output: Path) -> list[int]:
    file = output / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def nothing_is_left(slurm: Slurm, job: int) -> bool:
    directory = Path(f"/tmp/gkd-{job}")
    gone = eventually(lambda: not slurm.processes(job) and not marked(directory), 60)
    shutil.rmtree(directory, ignore_errors=True)
    return gone


def test_a_job_runs_to_its_end(slurm: Slurm, cache: Path, tmp_path: Path) -> None:
    settings = [*RUN, f"data.cache_dir={cache}", "trainer.total_steps=2", f"trainer.output_dir={tmp_path / 'run'}"]
    job = slurm.submit(*settings)
    slurm.wait_for(job, "COMPLETED 0:0", 240)
    assert steps(tmp_path / "run") == [0, 1, 2]
    placed = json.loads((tmp_path / "run" / "placement.json").read_text())
    assert len({worker["node"] for worker in placed}) == 2
    assert (tmp_path / "run" / "summary.json").exists()
    assert "Killed" not in slurm.log(job)  # Ray's nodes end by themselves
    assert nothing_is_left(slurm, job)


def test_a_job_goes_on_after_a_node_died_until_it_is_cancelled(slurm: Slurm, cache: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    job = slurm.submit(*RUN, f"data.cache_dir={cache}", "trainer.total_steps=100000", "trainer.save_every=1",
                       f"trainer.output_dir={output}")  # fmt: skip
    assert eventually(lambda: len(steps(output)) > 3, 240), slurm.log(job)
    slurm.kill_node("node2", job)
    slurm.wait_for(job, "PENDING", 120)
    assert eventually(lambda: not slurm.processes(job), 60)
    before = steps(output)[-1]
    slurm.resume("node2", job)
    assert eventually(lambda: steps(output)[-1] > before + 2, 240), slurm.log(job)
    assert "going on after step" in slurm.log(job)
    assert steps(output) == list(range(len(steps(output))))
    slurm.cancel(job)
    slurm.wait_for(job, "CANCELLED", 120)
    assert nothing_is_left(slurm, job)
    assert (output / "checkpoints" / "latest").exists()
