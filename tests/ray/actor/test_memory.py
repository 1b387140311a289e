"""Running out of memory, for real: a process that may not have more than so much."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gkd.actor.batches import SampleLength, count_tokens, pack
from gkd.actor.group import ActorGroup
from gkd.actor.memory import is_out_of_memory, out_of_memory_text, shrink_budget
from gkd.cluster.session.connect import connect
from gkd.cluster.workers.group import gather
from gkd.cluster.workers.placement import place
from gkd.config import Config, load
from gkd.errors import OutOfMemory
from gkd.weights.transfer import Bucket
from tests.actor import models
from tests.error_text import contains_in_order
from tests.ray.actor.ranks import Ranks, put
from tests.weights.received import received

SETTINGS = {"lr": 1e-6, "max_tokens_per_micro_batch": 30_000, "loss_chunk": 256}


def config(**actor: object) -> Config:
    return load(
        {
            "actor": {**SETTINGS, **actor},
            "algorithm": {"aggregation": "sequence_mean"},
            "trainer": {"total_steps": 10},
            "cluster": {"cpu_threads": 1},
        }
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("student")
    shape = {**models.SHAPE, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    LlamaForCausalLM(LlamaConfig(**{**shape, "max_position_embeddings": 16384})).save_pretrained(directory)
    return str(directory)


@contextmanager
def actor_of(path: str, world: int, settings: Config) -> Iterator[ActorGroup]:
    """A placed and loaded actor, as a run has it."""
    trainer = settings.trainer.model_copy(update={"n_gpus_per_node": world})
    settings = settings.model_copy(update={"trainer": trainer})
    with connect(settings) as session:
        placement = place(settings, session)
        actor = ActorGroup(placement.groups["actor"], settings, path, partial(placement.restart, "actor"))
        gather([actor.submit_build()], 120)
        actor.load()
        yield actor


def leave(actor: ActorGroup, megabytes: int) -> None:
    """Let the last rank's process have only so much more than it has now."""

    def limit(_: object) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (megabytes << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    ray.get(actor.group.workers[-1].__ray_call__.remote(limit), timeout=60)


def weights(actor: ActorGroup) -> dict[str, Tensor]:
    def pack(number: int) -> list[Bucket]:
        calls = [
            worker.__ray_call__.remote(lambda it, packs: it._object.weights.publisher.pack(0, number, packs), rank == 0)
            for rank, worker in enumerate(actor.group.workers)
        ]
        buckets: list[Bucket] = ray.get(calls, timeout=60)
        return buckets

    return received(pack)


def pids(actor: ActorGroup) -> set[int]:
    return {report.pid for report in actor.group.reports}


@pytest.fixture(scope="module")
def two(local_ray: None, path: str) -> Iterator[ActorGroup]:
    """Two ranks, which get new processes where theirs run out of memory."""
    with actor_of(path, 2, config(epochs=2)) as actor:
        yield actor


def test_the_update_is_done_again_in_smaller_micro_batches_with_the_same_gradient(
    two: ActorGroup,
    processes: dict[int, Ranks],
    path: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one of two ranks; two updates before memory runs out, so that there are moments, and two after it.

    What the other one waits in is aborted, as where it keeps it from handing on what it has.
    """
    monkeypatch.setattr("gkd.actor.ranks.KEEP_S", 0.0)
    batch, small = put(models.scored(200, k=4, lengths=(80, 100))), put(models.scored(8, k=4, lengths=(8, 9)))
    started = pids(two)
    two.update(small, 1)
    leave(two, 100)  # of the 250 to 320 that the update takes
    metrics = two.update(batch, 2)
    warnings = [record.getMessage() for record in caplog.records if "done again" in record.getMessage()]
    again = two.update(batch, 3)
    assert contains_in_order("".join(warnings), "step 2: ", "actor.max_tokens_per_micro_batch=")
    assert len(warnings) == sum("done again" in record.getMessage() for record in caplog.records)  # said once
    assert pids(two).isdisjoint(started)  # what waits for another rank is ended
    assert two.version == 3
    after = weights(two)
    plain, expected = processes[1].become(path, config(max_tokens_per_micro_batch=2_000)), []
    for step, learned in enumerate((small, batch, batch), 1):
        plain.run("compute_logprobs", learned, True, False)
        one, other = (plain.run("update", learned, step) for _ in range(2))
        expected.append({name: (one[name] + other[name]) / 2 for name in one})
        same = plain.weights()
    assert metrics == pytest.approx(expected[1], rel=1e-4)
    assert again == pytest.approx(expected[2], rel=1e-4)
    assert all(torch.allclose(after[name], same[name], rtol=0, atol=1e-7) for name in same)


def test_one_sequence_that_does_not_fit_ends_with_advice_and_changes_nothing(two: ActorGroup, tmp_path: Path) -> None:
    two.update(put(models.scored(8, k=4, lengths=(8, 9))), 4)
    before = weights(two)
    leave(two, 60)
    with pytest.raises(OutOfMemory, match=r"one sequence .*\d+ tokens; "):
        two.update(put(models.scored(2, k=4, lengths=(12_000, 12_001))), 5)
    assert two.read_applied().step == two.stage().step == 4
    files = gather([two.write_staged(str(tmp_path))], 60)[0]
    assert [name for name, _ in files] == ["rank_00000.safetensors", "rank_00001.safetensors"]
    after = weights(two)
    assert all(before[name].equal(after[name]) for name in before)


def test_memory_that_runs_out_in_a_backward_pass_costs_no_gradient(processes: dict[int, Ranks], path: str) -> None:
    """On the only rank, where FSDP takes itself to be within that pass for good.

    Then in the second of a step's chunks: the gradient of the first goes with its process, and is done again.
    """
    batch = put(models.scored(8, k=4, lengths=(80, 100)))

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, hidden: Tensor) -> Tensor:
            return hidden.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("out of memory")

    def fail(worker: Any, passes: int) -> None:
        left = [passes]  # that succeed

        def hook(_: object, __: object, hidden: Tensor) -> Tensor:
            left[0] -= 1
            return hidden if left[0] >= 0 else Fails.apply(hidden)

        worker._object.trainer.student.lm.model.layers[0].register_forward_hook(hook)

    settings = config(max_tokens_per_micro_batch=400)
    plain = processes[1].become(path, settings)
    with actor_of(path, 1, settings) as actor:
        ray.get(actor.group.workers[0].__ray_call__.remote(fail, 0), timeout=60)
        for step in (1, 2):
            expected = plain.run("update", batch, step)
            assert actor.update(batch, step) == pytest.approx(expected, rel=1e-3)  # the gradient's norm is among them
        started = pids(actor)
        ray.get(actor.group.workers[0].__ray_call__.remote(fail, 2), timeout=60)
        for chunks in ([batch[:2]], [batch[2:5], batch[5:]]):
            actor.accumulate(chunks)
        assert actor.evaluate(batch)["distill/reverse_kl"] > 0  # a validation, before the optimizer step
        metrics = actor.apply(3)
        assert metrics.pop("timing_s/update") > 0
        assert metrics == pytest.approx(plain.run("update", batch, 3), rel=1e-3)
        assert actor.version == 3 and pids(actor).isdisjoint(started)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NCCL error in: NCCLUtils.cpp:93, unhandled cuda error, NCCL version 2.28.9\nncclUnhandledCudaError: Call to "
         "CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'", True),
        ("Last error:\nCuda failure 'out of memory'", True),
        ("Last error:\nFailed to CUDA calloc 6291456 bytes", True),
        ("CUDA driver error: out of memory", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("ncclUnhandledCudaError: Last error:\nCuda failure 1 'invalid argument'", False),
        ("NCCL error: remote process exited or there was a network error", False),
    ],
)  # fmt: skip
def test_which_errors_of_libraries_mean_that_memory_ran_out(text: str, expected: bool) -> None:
    assert is_out_of_memory(torch.distributed.DistBackendError(text)) == expected
    assert not is_out_of_memory(ValueError(text))


@given(
    # Number of a prompt, and tokens of a response.
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 500)), min_size=1, max_size=40),
    st.integers(1, 2000),
    st.sampled_from(["packed", "padded", "shared"]),
)
def test_a_smaller_budget_makes_the_largest_micro_batch_smaller(
    samples: list[tuple[int, int]], budget: int, computed: str
) -> None:
    padded = computed == "padded"
    prompts = [(100 * number if computed == "shared" else 0, number, n) for number, n in samples]
    lengths = [SampleLength(n_prompt + n, number, n_prompt) for n_prompt, number, n in prompts]
    sizes = [length.n_tokens for length in lengths]

    def largest(budget: int) -> int:
        return max(count_tokens(part, lengths, padded) for part in pack(lengths, budget, padded))

    smaller = shrink_budget(budget, lengths, padded)
    if smaller is None:
        alone = [sizes[part[0]] for part in pack(lengths, budget, padded) if len(part) == 1]
        assert largest(budget) in alone
    else:
        assert largest(smaller) < largest(budget)


def test_a_rank_without_samples_tries_half_of_its_budget() -> None:
    """Memory may run out there as well, in passes that it makes with the others."""
    assert [shrink_budget(budget, []) for budget in (8192, 1)] == [4096, 1]


def test_advice_names_only_what_is_not_done_yet() -> None:
    text = out_of_memory_text(config(), 3000, 3000, "why")
    assert "actor.gradient_checkpointing=true" in text
    assert "actor.lora.r=16" in text
    assert "\n" not in text
    done = config(gradient_checkpointing=True, loss_chunk=64, offload_optimizer=True, lora={"r": 8})
    text = out_of_memory_text(done, 3000, 3000, "why")
    assert "gradient_checkpointing" not in text
    assert "actor.lora.r=4" in text
    assert f"trainer.n_gpus_per_node={2 * done.trainer.n_gpus_per_node}" in text
