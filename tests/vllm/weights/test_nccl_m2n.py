"""From two FSDP ranks to vLLM engines by ``nccl_m2n``, gloo in place of NCCL and NVIDIA's library (gloo_m2n.py)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from gkd.actor.group import ActorGroup
from gkd.cluster.workers.environment import environment
from gkd.cluster.workers.group import Group, gather
from gkd.cluster.workers.reserve import RemoteWorker
from gkd.config import Config, load
from gkd.data.model_info import ModelInfo
from gkd.driver.groups.weight_sync import WeightSync
from gkd.errors import RunFailed
from gkd.inference.engine import EngineSpec
from gkd.rollout.group import RolloutGroup
from gkd.types import Sample, Sampling
from tests.vllm.inference.test_engines import EOS, N_TOKENS, SHAPE, make, requests, worst_difference
from tests.vllm.weights.test_processes import save
from tests.weights.reports import reports


def group(name: str, *gpus: str) -> Group:
    workers = tuple(RemoteWorker.options(num_cpus=0).remote() for _ in gpus)
    return Group(name, workers, tuple(reports(name, *gpus)))


def progress(rollout: RolloutGroup) -> list[tuple[int, int]]:
    """Passes through each engine's model so far, and responses that are not finished."""
    return rollout.group.control("progress", timeout_s=30)


def require_logprobs_of_versions(models: list[torch.nn.Module], samples: list[Sample]) -> None:
    """Every token's log-probability is that of the model of its version, computed over all tokens before it."""
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        with torch.no_grad():
            logits = [model(ids[None]).logits[0, :-1].float() for model in models]
        for its in logits:
            its[:, N_TOKENS:] = -torch.inf
        own = [its.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy() for its in logits]
        n_prompt = len(ids) - len(sample.sampled_ids)
        for span in sample.versions:
            measured = sample.sampled_logprobs[span.start - n_prompt : span.stop - n_prompt]
            np.testing.assert_allclose(measured, own[span.version][span.start - 1 : span.stop - 1], atol=2e-3)


def test_engines_sample_from_the_weights_of_two_ranks(local_ray: None, tmp_path: Path) -> None:
    """Two pushes to two engines, the first while they sample, one to the second alone, and one in which it dies."""
    config: Config = load(
        {
            "weights": {"transfer": "tests.vllm.weights.gloo_m2n:GlooM2n"},
            "model": {"dtype": "float32"},
            "rollout": {"enforce_eager": True},
            "schedule": {"max_staleness": 1, "in_flight": True},
            "cluster": {"cpu_threads": 1},
        }
    )
    trained = make(False, seed=7)
    paths = save(make(False, seed=0), tmp_path / "before"), save(trained, tmp_path / "trained")
    actor, engines = group("actor", "SIM-0", "SIM-1"), group("rollout", "SIM-2", "SIM-3")
    model = ModelInfo(SHAPE["vocab_size"], SHAPE["max_position_embeddings"], [EOS], N_TOKENS)
    ranks: list[Any] = [(config, paths[1], rank, 2, "cpu") for rank in range(2)]
    specs = [(config, EngineSpec.for_rollout(config, paths[0], model, 64, rank, "cpu")) for rank in range(2)]
    here = environment("cpu", [], 1)
    module = "tests.vllm.weights.gloo_m2n"
    gather(
        [actor.submit_build(f"{module}:Actor", ranks, environment=here),
         engines.submit_build(f"{module}:Rollout", specs, environment=here)], 300,
    )  # fmt: skip
    try:
        actor_group, rollout = ActorGroup(actor, config, paths[1], lambda: actor), RolloutGroup(engines, config)
        actor_group.load()
        sync = WeightSync(actor_group, rollout, engines.reports, config)
        sample_requests = requests(Sampling(12))
        rollout.collect(rollout.submit(sample_requests), 120)  # fills the prefix cache with the old weights
        passes = progress(rollout)
        # So many that some are still to be sampled when the push comes, however busy the machine is.
        in_flight, deadline = rollout.submit(requests(Sampling(40), 20) * 20), time.monotonic() + 60
        while not all(now > before for (before, _), (now, _) in zip(passes, progress(rollout), strict=True)):
            assert time.monotonic() < deadline
        for version, to in ((1, None), (2, None), (3, [1])):
            actor_group.version = version
            sync.push(to)
            if version == 1:
                samples = [scored.sample for scored in rollout.fetch(rollout.collect(in_flight, 120))]
                assert {span.version for sample in samples for span in sample.versions} == {0, 1}
                require_logprobs_of_versions([make(False, 0), trained], samples)
            if version < 3:
                finished = rollout.collect(rollout.submit(sample_requests), 120)
                samples = [scored.sample for scored in rollout.fetch(finished)]
                assert {span.version for sample in samples for span in sample.versions} == {version}
                assert worst_difference(trained, sample_requests, samples) < 2e-3
                assert worst_difference(make(False, 0), sample_requests, samples) > 0.1
        joined = rollout.group.control("joined", timeout_s=30)
        layers = SHAPE["num_hidden_layers"]  # what follows attention, and the MLP's last: the others vLLM fuses
        assert joined == [([(2, 4)], [2 * layers]), ([(3, 4), (2, 3)], [2 * layers] * 2)]
        engines.select([1]).control("end_after", 5, timeout_s=30)
        actor_group.version = 4
        with pytest.raises(RunFailed, match=r"rollout rank 1 .* died: .*bucket 3 .*version 4"):
            sync.push()
    finally:
        for worker in (*actor.workers, *engines.workers):
            ray.kill(worker)
