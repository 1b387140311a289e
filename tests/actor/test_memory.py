"""Running out of memory, for real: a process that may not have more than so much."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from gkd.actor.balance import pack
from gkd.actor.memory import out_of_memory_text, smaller_budget
from gkd.config import Config, load
from tests.actor import models
from tests.actor.test_ranks import Ranks, put

SETTINGS = {"lr": 1e-6, "max_tokens_per_micro_batch": 30_000, "loss_chunk": 256}


def config(**actor: object) -> Config:
    return load({"actor": {**SETTINGS, **actor}, "trainer": {"total_steps": 10}, "cluster": {"cpu_threads": 1}})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("student")
    shape = {**models.SHAPE, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    LlamaForCausalLM(LlamaConfig(**{**shape, "max_position_embeddings": 16384})).save_pretrained(directory)
    return str(directory)


@pytest.fixture
def worker(local_ray: None, path: str) -> Iterator[Ranks]:
    found = Ranks(path, 1, config())
    yield found
    found.end()


def leave(worker: Ranks, megabytes: int) -> None:
    """Let the process have only so much more than it has now."""

    def limit(_: object) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (megabytes << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    ray.get(worker.workers[0].__ray_call__.remote(limit), timeout=60)


def test_the_update_is_done_again_in_smaller_micro_batches_with_the_same_gradient(worker: Ranks) -> None:
    batch = put(models.scored(200, k=4, lengths=(80, 100)))
    leave(worker, 400)
    found = worker.run("update", batch, 1)
    budget = found.pop("actor/micro_batch_tokens")
    assert budget < 15_000
    again = worker.run("update", batch, 1)
    assert again["actor/micro_batch_tokens"] == budget  # not tried with more again
    worker.end()
    plain = Ranks(worker.path, 1, config(max_tokens_per_micro_batch=2_000))
    expected = plain.run("update", batch, 1)
    plain.end()
    assert expected.pop("actor/micro_batch_tokens") == 2_000
    assert found == pytest.approx(expected, rel=1e-4)


def test_one_sequence_that_does_not_fit_ends_with_advice_and_changes_nothing(worker: Ranks) -> None:
    before = worker.weights()
    leave(worker, 60)
    with pytest.raises(ray.exceptions.RayTaskError, match=r"even with one sequence of \d+ tokens; what would help"):
        worker.run("update", put(models.scored(2, k=4, lengths=(12_000, 12_001))), 1)
    after = worker.weights()
    assert all(before[name].equal(after[name]) for name in before)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 2000))
def test_a_smaller_budget_makes_the_largest_micro_batch_smaller(lengths: list[int], budget: int) -> None:
    parts = pack(lengths, budget)
    smaller = smaller_budget(budget, lengths, parts)
    largest = max(sum(lengths[i] for i in part) for part in parts)
    if smaller is None:
        assert any(len(part) == 1 and lengths[part[0]] == largest for part in parts)
    else:
        assert max(sum(lengths[i] for i in part) for part in pack(lengths, smaller)) < largest


def test_advice_names_only_what_is_not_done_yet() -> None:
    text = out_of_memory_text(config(), 1, 3000, 3000, "why")
    assert "actor.gradient_checkpointing=true" in text
    assert "actor.lora.r=16" in text
    assert "\n" not in text
    done = config(gradient_checkpointing=True, loss_chunk=64, offload_optimizer=True, lora={"r": 8})
    text = out_of_memory_text(done, 2, 3000, 3000, "why")
    assert "gradient_checkpointing" not in text
    assert "actor.lora.r=4" in text
    assert "trainer.n_gpus_per_node=4" in text
