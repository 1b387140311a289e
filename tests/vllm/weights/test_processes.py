"""From a real actor to a real vLLM engine, each in a process of its own: the engine samples from the actor's weights.

Through the object store this runs anywhere. ``ipc`` needs a GPU, ``nccl`` two, and both the CUDA build of vLLM.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
import torch
from tokenizers import Tokenizer
from tokenizers import models as kinds
from transformers import PreTrainedTokenizerFast

from gkd.actor.group import ActorGroup
from gkd.cluster.gpu import nvml_uuids
from gkd.cluster.workers.environment import environment
from gkd.cluster.workers.group import Group, gather
from gkd.cluster.workers.reserve import RemoteWorker
from gkd.config import Config, Weights, load
from gkd.config.device import installed_device
from gkd.config.transfer import choose_transfer
from gkd.data.model_info import ModelInfo
from gkd.driver.groups.weight_sync import WeightSync
from gkd.inference.engine import EngineSpec
from gkd.rollout.group import RolloutGroup
from gkd.types import Sampling
from tests.vllm.inference.test_engines import EOS, N_TOKENS, SHAPE, make, requests, worst_difference
from tests.weights.reports import report

GPUS = nvml_uuids() if installed_device() == "cuda" else []
HERE = "cuda" if GPUS else "cpu"


def needs(n: int) -> pytest.MarkDecorator:
    reason = f"needs {n} CUDA GPU{'s' if n > 1 else ''} and the CUDA build of vLLM"
    return pytest.mark.skipif(len(GPUS) < n, reason=reason)


def worker(group: str, index: int) -> Group:
    """One worker on GPU ``index``, or on a simulated one."""
    started = RemoteWorker.options(num_cpus=0).remote()
    # The Ray of these tests hands out simulated GPUs; this worker is given a real one past it.
    ray.get(started.set_visible_devices.remote([str(index)], False), timeout=60)
    return Group(group, (started,), (report(group, 0, GPUS[index] if GPUS else f"SIM-{index}"),))


def save(model: torch.nn.Module, path: Path) -> str:
    model.save_pretrained(path)
    words = {f"t{i}": i for i in range(N_TOKENS)}
    tokenizer = Tokenizer(kinds.WordLevel(words, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"t{EOS}").save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("transfer", "engine_gpu", "tied"),
    [
        ("object_store", 0, True),
        pytest.param("ipc", 0, False, marks=needs(1)),
        pytest.param("ipc", 0, True, marks=needs(1)),
        pytest.param("nccl", 1, False, marks=needs(2)),
        pytest.param("nccl", 1, True, marks=needs(2)),
    ],
)
def test_the_engine_samples_from_the_actors_weights(
    local_ray: None, tmp_path: Path, transfer: str, engine_gpu: int, tied: bool
) -> None:
    config: Config = load(
        {
            "weights": {"transfer": transfer, "checksum": True, "bucket_mb": 1},
            "model": {"dtype": "float32"},
            "rollout": {"gpu_memory_utilization": 0.3, "enforce_eager": True},
            "cluster": {"cpu_threads": 1},
        }
    )
    trained = make(tied, seed=7)
    paths = save(make(tied, seed=0), tmp_path / "before"), save(trained, tmp_path / "trained")
    actor, engine = worker("actor", 0), worker("rollout", engine_gpu)
    if transfer != "object_store":
        assert choose_transfer(Weights(), config.rollout, actor.reports, engine.reports) == transfer
    model = ModelInfo(SHAPE["vocab_size"], SHAPE["max_position_embeddings"], [EOS], N_TOKENS)
    surroundings = environment(HERE, [], 1)
    gather(
        [
            actor.submit_build(
                "gkd.actor.worker:ActorWorker", [(config, paths[1], 0, 1, HERE)], environment=surroundings
            ),
            engine.submit_build(
                "gkd.rollout.worker:RolloutWorker",
                [(config, EngineSpec.for_rollout(config, paths[0], model, 64, 0, HERE))],
                environment=surroundings,
            ),
        ],
        300,
    )
    try:
        actor_group, rollout = ActorGroup(actor, config, paths[1], lambda: actor), RolloutGroup(engine, config)
        actor_group.load()
        sync = WeightSync(actor_group, rollout, engine.reports, config)
        sample_requests = requests(Sampling(12))
        rollout.collect(rollout.submit(sample_requests), 120)  # fills the prefix cache with the old weights
        for version in (1, 2):  # a second one finds nothing in the way of the first
            actor_group.version = version
            sync.push()
            finished = rollout.collect(rollout.submit(sample_requests), 120)
            samples = [scored.sample for scored in rollout.fetch(finished)]
            assert {span.version for sample in samples for span in sample.versions} == {version}
            assert worst_difference(trained, sample_requests, samples) < 2e-3
            assert worst_difference(make(tied, 0), sample_requests, samples) > 0.1
    finally:
        for group in (actor, engine):
            ray.kill(group.workers[0])
