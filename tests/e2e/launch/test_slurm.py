"""launch/slurm.sbatch on a real Slurm: a job whose node dies, to its end, and one that is cancelled."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import PAUSE, SMALL
from tests.e2e.launch.slurm import Slurm, missing, slurm_in
from tests.e2e.on_a_cluster.conftest import marked
from tests.ray.cluster.conftest import eventually

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
RUN = ["+recipe=grpo", "rollout.engine=hf", *SMALL, "data.val_limit=16", "trainer.batch_size=4", "rollout.n=4"]


RESUMED = re.compile(r"\bgoing on .*\bstep \d+")


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
    return eventually(lambda: not slurm.processes(job) and not marked(directory), 60)


def test_a_job_goes_on_after_a_node_died_to_its_end_and_one_that_is_cancelled_leaves_nothing(
    slurm: Slurm, cache: Path, tmp_path: Path
) -> None:
    output, pause, n_steps = tmp_path / "run", tmp_path / "pause.py", 12
    pause.write_text(PAUSE)
    settings = [
        *RUN,
        f"reward.functions=[accuracy,{pause}:pause]",
        f"data.cache_dir={cache}",
        "trainer.save_every=1",
        f"trainer.output_dir={output}",
    ]
    job = slurm.submit(*settings, f"trainer.total_steps={n_steps}")
    assert eventually(lambda: len(steps(output)) > 3, 240), slurm.log(job)
    n_cores = [len(raylet.cpu_affinity()) for raylet in slurm.raylets(job)]
    assert n_cores == [min(2, os.cpu_count() or 1)] * 2  # --cpus-per-task
    placed = json.loads((output / "placement.json").read_text())
    assert len({worker["node"] for worker in placed}) == 2
    slurm.kill_node("node2", job)
    slurm.wait_for(job, "PENDING", 120)
    assert eventually(lambda: not slurm.processes(job), 60)
    assert steps(output)[-1] < n_steps
    slurm.resume("node2", job)
    slurm.wait_for(job, "COMPLETED 0:0", 240)
    resumed = RESUMED.search(slurm.log(job))
    assert resumed is not None
    assert steps(output) == list(range(n_steps + 1))
    assert (output / "summary.json").exists()
    ended = slurm.log(job)[resumed.end() :]
    assert "Killed" not in ended  # Ray's nodes end by themselves
    assert nothing_is_left(slurm, job)
    assert not Path(f"/tmp/gkd-{job}").exists()
    cancelled = tmp_path / "other"
    other = slurm.submit(*settings[:-1], "trainer.total_steps=100000", f"trainer.output_dir={cancelled}")
    assert eventually(lambda: len(steps(cancelled)) > 1, 240), slurm.log(other)
    slurm.cancel(other)
    slurm.wait_for(other, "CANCELLED", 120)
    assert nothing_is_left(slurm, other)
    shutil.rmtree(f"/tmp/gkd-{other}")  # Ray's logs
