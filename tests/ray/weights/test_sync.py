"""The driver's pushes by each way, with real workers in Ray (see actor.py, and wire.py for what stands in for GPUs)."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gkd.actor.group import ActorGroup
from gkd.cluster.workers.group import Group, gather
from gkd.cluster.workers.reserve import RemoteWorker
from gkd.config import Config, load
from gkd.driver.groups.weight_sync import WeightSync
from gkd.errors import RunFailed
from gkd.rollout.group import RolloutGroup
from gkd.types import Prompt, SampleRequest, Sampling
from tests.ray.cluster.conftest import eventually
from tests.weights.reports import reports

# By ipc engines are on the actor's GPUs, the other way round.
ACTOR_GPUS = ["GPU-0", "GPU-1"]
WAYS = {
    "ipc": "tests.ray.weights.wire:CopyIpc",
    "nccl": "tests.ray.weights.wire:GlooNccl",
    "object_store": "object_store",
}
ENGINE_GPUS = {"ipc": ["GPU-1", "GPU-0"], "nccl": ["GPU-2", "GPU-3", "GPU-4"], "object_store": ["GPU-2", "GPU-3"]}
SHAPE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("student")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2, vocab_size=500)).save_pretrained(path)
    return str(path)


def group(name: str, gpus: list[str], target: str, args: list[tuple[Any, ...]]) -> Group:
    """Built workers that believe to be on these GPUs."""
    workers = [RemoteWorker.options(num_cpus=0).remote() for _ in gpus]
    built = Group(name, tuple(workers), tuple(reports(name, *gpus)))
    gather([built.submit_build(target, args, environment={"OMP_NUM_THREADS": "1"})], 120)
    return built


def settings(transfer: str, **weights: object) -> Config:
    return load(
        {
            "weights": {"transfer": WAYS[transfer], "bucket_mb": 1, "timeout_s": 60.0, **weights},
            "rollout": {"engine": "tests.ray.weights.wire:Keeper", "gpus_of_engines": ENGINE_GPUS[transfer]},
            "cluster": {"cpu_threads": 1, "start_timeout_s": 120.0},
        }
    )


@dataclass
class System:
    """An actor of two ranks, shared by all tests, and engines."""

    actor: ActorGroup
    rollout: RolloutGroup
    sync: WeightSync

    def push(self, version: int) -> None:
        self.actor.version = version
        self.sync.push()

    def engine_states(self) -> list[Any]:
        return self.rollout.living_group.control("state", timeout_s=30)

    def expect_served(self, version: int) -> list[Any]:
        """Every living engine has exactly the actor's weights and may sample from them."""
        expected, states = self.actor.group.call("gathered", timeout_s=30)[0], self.engine_states()
        for tensors, served, intact, _, _ in states:
            assert served == version
            assert intact
            assert tensors.keys() == expected.keys()
            assert all(torch.equal(tensors[name], expected[name]) for name in expected)
        return states

    def trouble(self, engine: int, what: str, number: int) -> None:
        self.rollout.group.select([engine]).control("make_trouble", what, number, timeout_s=30)


@pytest.fixture(scope="module")
def actors(local_ray: None, model_path: str) -> Iterator[Group]:
    """Two ranks of a student; they outlive what goes wrong with engines."""
    config = settings("ipc")
    ranks = group(
        "actor",
        ACTOR_GPUS,
        "tests.ray.weights.actor:CpuActor",
        [(config, model_path, rank, 2, ACTOR_GPUS) for rank in range(2)],
    )
    ActorGroup(ranks, config, model_path, lambda: ranks).load()
    yield ranks
    end(ranks)


def start(actors: Group, engines: Group, config: Config) -> System:
    actors.call("use", config, timeout_s=30)
    actor, rollout = ActorGroup(actors, config, "", lambda: actors), RolloutGroup(engines, config)
    return System(actor, rollout, WeightSync(actor, rollout, engines.reports, config))


def make_engines(config: Config, n: int) -> Group:
    gpus = config.rollout.class_settings().gpus_of_engines[:n]
    return group("rollout", gpus, "tests.ray.weights.wire:CpuRollout", [(config, rank) for rank in range(n)])


def end_worker(worker: Any) -> None:
    """Return when it has ended, which Ray may do after ``kill``: an end in the middle of a push is another case."""
    life = worker.block_until_end.remote()
    ray.kill(worker)
    assert ray.wait([life], timeout=30)[0]


def end(pool: Group) -> None:
    for worker in pool.workers:
        ray.kill(worker)


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("transfer", ["object_store", "ipc", "nccl"])
def test_every_engine_gets_every_tensor_as_it_is(actors: Group, pair: Group, transfer: str, checksum: bool) -> None:
    config, gpus = settings(transfer, checksum=checksum), ENGINE_GPUS[transfer][:2]
    pair.control("use", config, gpus, timeout_s=30)
    system = start(actors, replace(pair, reports=tuple(reports("rollout", *gpus))), config)
    as_pending = Group.as_pending
    for version in (1, 2):
        calls: Counter[str] = Counter()

        def count(group: Group, what: str, refs: Any, calls: Counter[str] = calls) -> Any:
            calls[what.partition(" ")[0]] += len(refs)
            return as_pending(group, what, refs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Group, "as_pending", count)
            system.push(version)
        # One to each rank, and to an engine where a collective needs it, however many buckets there are.
        assert (calls["sending"], calls["loading"]) == (2, 2 if transfer == "nccl" else 0)
        assert calls["becoming"] == (2 if transfer == "nccl" and version == 1 else 0)  # to join the group
        states = system.expect_served(version)
        if transfer != "object_store":
            assert all(buckets > 3 for *_, buckets, _ in states)
    if transfer == "nccl":  # met once for both pushes, each with a place of its own
        assert [groups[-1] for *_, groups in states] == [(1, 3), (2, 3)]
        assert [len(groups) for *_, groups in states] == [1 + checksum] * 2


@pytest.mark.parametrize("transfer", ["object_store", "nccl"])
def test_drained_engines_get_weights_one_by_one_but_in_a_group_together(
    actors: Group, pair: Group, transfer: str
) -> None:
    config, gpus = settings(transfer), ENGINE_GPUS[transfer][:2]
    pair.control("use", config, gpus, timeout_s=30)
    system = start(actors, replace(pair, reports=tuple(reports("rollout", *gpus))), config)
    system.push(1)
    pushes, push_now = list[tuple[float, float]](), system.sync.push
    drained, order = iter([[1], [0], []] if transfer == "object_store" else [[0, 1], []]), list[Any]()

    def drain(timeout_s: float, together: bool) -> list[int]:
        assert timeout_s == config.rollout.timeout_s and together == (transfer == "nccl")
        order.append([state[1] for state in system.engine_states()])
        return next(drained)

    def push(engines: list[int]) -> None:
        began = time.monotonic()
        push_now(engines)
        pushes.append((began, time.monotonic()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system.rollout, "drain", drain)
        patch.setattr(system.sync, "push", push)
        system.actor.version = 2
        waits = system.sync.push_drained(lambda: order.append(system.rollout.version))
    assert len(waits) == len(pushes) + 1 == (3 if transfer == "object_store" else 2)
    for (before, after), (began, ended) in zip(pairwise(waits), pushes, strict=True):
        assert before[0] <= before[1] <= began and ended <= after[0]  # no wait is of a push
    # What is requested is for the new weights, and comes once the first engine has these.
    assert order == [[1, 1], 2, *([[1, 2]] if transfer == "object_store" else []), [2, 2]]
    system.expect_served(2)


def test_by_nccl_an_engine_samples_on_while_another_one_does_a_long_step(actors: Group, pair: Group) -> None:
    config, gpus = settings("nccl"), ENGINE_GPUS["nccl"][:2]
    pair.control("use", config, gpus, timeout_s=30)
    system = start(actors, replace(pair, reports=tuple(reports("rollout", *gpus))), config)
    system.push(1)
    pair.select([0]).control("do_long_step", timeout_s=30)
    with ThreadPoolExecutor() as pool:
        push = pool.submit(system.push, 2)
        time.sleep(1.5)
        assert [(version, samples) for _, version, samples, _, _ in system.engine_states()] == [(1, True), (1, True)]
        assert not push.done()
        pair.select([0]).control("end_long_step", timeout_s=30)
        push.result(30)
    system.expect_served(2)


@pytest.mark.parametrize("engines_of_push", [None, [0]])
def test_by_nccl_the_others_go_on_without_an_engine_that_hangs_before_the_push(
    actors: Group, engines_of_push: list[int] | None
) -> None:
    """Also where the push was for that one alone, as for one that has come back: no group is formed of nobody."""
    config = settings("nccl", timeout_s=10.0)
    engines = make_engines(config, 2)
    system = start(actors, engines, config)
    system.push(1)
    engines.select([0]).control("do_long_step", timeout_s=30)
    if engines_of_push is not None:
        system.sync.push(engines_of_push)
        assert system.rollout.present_engines == [1]
    system.push(2)
    assert system.rollout.present_engines == [1]
    system.expect_served(2)
    end(engines)


@pytest.fixture(scope="module")
def pair(local_ray: None) -> Iterator[Group]:
    """Two engines for tests that do them no harm."""
    engines = make_engines(settings("nccl"), 2)
    RolloutGroup(engines, settings("nccl"))  # which has them serve
    yield engines
    end(engines)


def test_by_ipc_the_others_go_on_without_an_engine_that_dies(actors: Group) -> None:
    config = settings("ipc", checksum=True)
    engines = make_engines(config, 2)
    system = start(actors, engines, config)
    system.trouble(0, "die in receive", 2)
    system.push(1)  # it dies in the middle of this one
    assert system.rollout.present_engines == [1]
    system.expect_served(1)
    system.push(2)  # and is not there at this one: nobody packs for it
    assert [len(destinations) for destinations in system.sync._destinations()] == [1, 0]
    system.expect_served(2)
    system.trouble(1, "damage", 1)
    with pytest.raises(RunFailed, match=r"^weights version 7, bucket 2 .*\(weights\.checksum"):
        system.push(7)
    (state,) = system.engine_states()
    assert (state[1], state[2]) == (2, False)
    system.rollout.submit([SampleRequest(Prompt(0, np.ones(1, np.int32), ""), 0, 0, Sampling(1))])
    engine = system.rollout.group.select([1])
    assert eventually(lambda: engine.control("progress", timeout_s=30) == [(0, 1)], 60)
    time.sleep(1.0)
    assert engine.control("progress", timeout_s=30) == [(0, 1)]  # it waits, unsampled
    end(engines)


def test_by_nccl_a_new_group_is_made_of_those_alive_and_a_death_in_a_broadcast_ends_the_run(actors: Group) -> None:
    config = settings("nccl")
    engines = make_engines(config, 3)
    system = start(actors, engines, config)
    system.push(1)
    end_worker(engines.workers[0])
    system.push(2)
    assert system.rollout.present_engines == [1, 2]
    assert [groups for *_, groups in system.expect_served(2)] == [[(2, 4), (1, 3)], [(3, 4), (2, 3)]]
    system.trouble(2, "die in receive", 1)
    # At once: at the deadline it would not be a death.
    with pytest.raises(RunFailed, match=r"rollout rank 2 .* died: .*bucket 2 .*version 3"):
        system.push(3)
    end(engines)


@pytest.mark.parametrize("transfer", ["ipc", "nccl"])
def test_a_push_may_take_longer_than_any_of_its_buckets(actors: Group, pair: Group, transfer: str) -> None:
    """As of a large model over a slow network."""
    config, gpus = settings(transfer, timeout_s=2.5), ENGINE_GPUS[transfer][:2]
    pair.control("use", config, gpus, timeout_s=30)
    system = start(actors, replace(pair, reports=tuple(reports("rollout", *gpus))), config)
    for engine in (0, 1):
        system.trouble(engine, "slow in receive", 0)
    began = time.monotonic()
    system.push(8)
    assert time.monotonic() - began > 1.5 * config.weights.timeout_s
    for engine in (0, 1):
        system.trouble(engine, "", 0)
    system.expect_served(8)


def test_an_engine_that_hangs_takes_no_time_from_the_others_and_the_last_one_ends_the_run(
    actors: Group, caplog: pytest.LogCaptureFixture
) -> None:
    """All that a push may take is waited for it, and as much again for the others; it is named with its bucket."""
    config = settings("ipc", timeout_s=6.0)
    engines = make_engines(config, 2)
    system = start(actors, engines, config)
    system.trouble(0, "hang in receive", 1)
    system.push(4)
    assert system.rollout.present_engines == [1]
    system.expect_served(4)
    text = r"loading bucket 2 of weights version {} \(weights.timeout_s=6\): not done after .* s, .*rollout rank {} \("
    assert any(re.search(text.format(4, 0), record.getMessage()) for record in caplog.records)
    system.trouble(1, "hang in receive", 1)
    with pytest.raises(RunFailed, match=text.format(5, 1)) as caught:
        system.push(5)
    assert "\n" not in str(caught.value)
    end(engines)


def test_who_does_not_join_a_group_is_named_with_the_version(actors: Group) -> None:
    """By the driver or by the engine's worker, which wait equally long."""
    config = settings("nccl", timeout_s=4.0)
    engines = make_engines(config, 1)
    system = start(actors, engines, config)
    system.trouble(0, "hang in join", 0)
    with pytest.raises(RunFailed, match=r"\bversion 4 \(weights\.timeout_s=4\)") as caught:
        system.push(4)
    assert re.search(r"\brollout rank 0\b", str(caught.value))
    end(engines)
