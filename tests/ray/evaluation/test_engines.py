"""Eight engines on eight simulated GPUs, with imposed times: questions go out as engines free up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import ray

from gkd.cluster.workers.group import Group, gather
from gkd.cluster.workers.reserve import RemoteWorker
from gkd.config import Config, load
from gkd.data.model_info import ModelInfo
from gkd.evaluation.answering import AnswerJob, answer_all
from gkd.evaluation.engines import EngineReplies, LocalModel
from gkd.evaluation.questions import Question
from gkd.evaluation.strategies import plain
from gkd.recipes.sort_digits.sorting import make_tokenizer
from gkd.rollout.group import RolloutGroup
from gkd.types import Prompt, Sampling
from tests.weights.reports import reports

N, SLOTS, PASSES, ROUNDS = 8, 4, 60, 5


def settings() -> Config:
    engine = "tests.ray.evaluation.imposed:ImposedEngine"
    return load({"rollout": {"engine": engine, "max_num_seqs": SLOTS}})


@pytest.fixture
def workers(local_ray: None) -> Iterator[list[object]]:
    made = [RemoteWorker.options(num_cpus=0).remote() for _ in range(N)]
    yield made
    for worker in made:
        ray.kill(worker)


def test_eight_engines_are_eight_times_as_fast_as_one(workers: list[object]) -> None:
    """In passes of the engines, which take a fixed time on a busy machine too; one may take a round of another."""
    worker_reports = tuple(reports("rollout", *(f"GPU-{i}" for i in range(N))))
    group = Group("rollout", tuple(workers), worker_reports)
    target = "tests.ray.evaluation.imposed:ImposedRollout"
    gather([group.submit_build(target, [(settings(), rank) for rank in range(N)])], 120)
    rollout = RolloutGroup(group, settings())
    model = LocalModel("toy", "", "f", make_tokenizer(), ModelInfo(64, None, [2], 14))
    source = EngineReplies(settings(), model, rollout, 64)
    questions = [Question(f"{i:x}", Prompt(i, np.array([1], np.int32), "?"), {}) for i in range(N * SLOTS * ROUNDS)]
    answered, jobs = list[int](), [AnswerJob(question, 0) for question in questions]
    answer_all(source, jobs, plain, Sampling(8), 0, 60.0, lambda job, _: answered.append(job.question.prompt.id))
    assert sorted(answered) == list(range(len(questions)))
    passes = [progress[0] for progress in group.control("progress", timeout_s=30)]
    one = len(questions) * PASSES / SLOTS  # passes of a single engine with all of its places taken
    assert one / max(passes) >= N * ROUNDS / (ROUNDS + 1), passes
