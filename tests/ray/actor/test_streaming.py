"""A batch in chunks has the gradient and the metrics of the batch as a whole: every loss, LoRA, one rank and two."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch.distributed.tensor import DTensor

from gkd.actor.batches import balance_over_ranks, measure_lengths
from gkd.actor.worker import ActorWorker
from gkd.algorithms.aggregation import Totals, chunk_weights, token_weights
from gkd.config import Algorithm
from gkd.types import TrainingSample
from tests.actor import models
from tests.ray.actor.ranks import Ranks, call, config, put

LIMIT = 12
CHUNKS = [(0, 1), (1, 5), (5, 9)]  # the first leaves the second of two ranks without a sample


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("student")
    models.make("qwen2 tied").save_pretrained(path)
    return str(path)


def gradient(ranks: Ranks) -> torch.Tensor:
    """What has been accumulated, of all parameters."""

    def collect(worker: ActorWorker) -> torch.Tensor:
        gradients = [p.grad for p in worker.trainer.student.parameters() if p.requires_grad]
        return torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in gradients])

    flat: torch.Tensor = ray.get([w.__ray_call__.remote(collect) for w in ranks.workers], timeout=60)[0]
    return flat


def accumulate(ranks: Ranks, samples: list[TrainingSample], weights: list[float], *last: int) -> None:
    shares = balance_over_ranks(measure_lengths(samples, shared=True), len(ranks.workers))
    calls = [
        call(worker, "trainer.accumulate", [samples[i] for i in part], [weights[i] for i in part], *last)
        for worker, part in zip(ranks.workers, shares, strict=True)
    ]
    ray.get(calls, timeout=120)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("algorithm", "lora"),
    [
        ({"loss": {"name": "reverse_kl"}}, None),
        ({"loss": {"name": "forward_kl", "temperature": 2.0}, "aggregation": "constant"}, None),
        ({"loss": {"name": "jsd"}, "aggregation": "sequence_mean"}, None),
        ({"loss": {"name": "sampled_reverse_kl"}, "importance_sampling": {"level": "token"}}, None),
        ({"name": "grpo", "kl": {"coef": 0.1}}, None),
        ({"name": "grpo", "kl": {"coef": 0.1}}, 4),
        ({"name": "grpo", "policy": {"surrogate": "cispo"}}, None),
        ({"name": "gspo", "aggregation": "sequence_mean"}, None),
        ({"reward_weight": 0.5, "aggregation": "constant"}, None),
    ],
)
def test_chunks_add_up_to_the_batch(
    processes: dict[int, Ranks],
    model_path: str,
    algorithm: dict[str, Any],
    lora: int | None,
    world: int,
    tmp_path: Path,
) -> None:
    k = 0 if algorithm.get("loss", {}).get("name") == "sampled_reverse_kl" else 7
    *scored, last = models.scored(5, k, seed=4)
    scored += [*models.group(4, n_prompt=6, k=k), last]
    batch = put([dataclasses.replace(s, reference=s.sample.sampled_logprobs) for s in scored])
    batch[3] = dataclasses.replace(batch[3], in_loss=False)
    lengths, kept = [sample.n_sampled for sample in batch], [sample.in_loss for sample in batch]
    chosen = config(lora={"r": lora}).model_copy(update={"algorithm": Algorithm.model_validate(algorithm)})
    how = chosen.algorithm.aggregation
    ranks = processes[world]
    other = put(models.scored(3, 7, seed=9))  # a validation, and log-probabilities of the next chunk
    results: list[tuple[torch.Tensor, dict[str, float]]] = []
    for whole in (True, False):
        ranks.become(model_path, chosen)  # with an optimizer that has done nothing yet
        if whole:
            totals = Totals()
            accumulate(ranks, batch, token_weights(lengths, kept, how, LIMIT), sum(lengths))
        else:
            totals = Totals.from_lengths(lengths, kept, how)
            for number, (start, stop) in enumerate(CHUNKS):
                weights = chunk_weights(lengths[start:stop], kept[start:stop], how, LIMIT)
                accumulate(ranks, batch[start:stop], weights, 1, number)
                ranks.run("evaluate", other, Algorithm())
                ranks.run("compute_logprobs", other, False, True)
            ray.get([call(w, "state.save", str(tmp_path)) for w in ranks.workers], timeout=60)  # the best so far
        summed = gradient(ranks) * totals.scale
        rows = ray.get([call(w, "trainer.apply", totals, 1) for w in ranks.workers], timeout=60)
        assert all(row == rows[0] for row in rows)
        results.append((summed, rows[0]))
    (expected, row), (summed, streamed) = results
    assert expected.abs().max() > 0
    # In float32: 3.4e-7 to 6.5e-7 with the kernels of SSE, AVX2 and AVX-512.
    assert (summed - expected).norm() <= 1e-6 * expected.norm()
    assert streamed == pytest.approx(row, rel=1e-5, abs=1e-7)  # the clipped norm and the losses among them


def test_chunks_without_those_before_them_are_refused(processes: dict[int, Ranks], model_path: str) -> None:
    ranks = processes[1].become(model_path, config())
    with pytest.raises(ray.exceptions.RayTaskError, match="chunk 1"):
        accumulate(ranks, put(models.scored(2, seed=3)), [1.0, 1.0], 1, 1)
    with pytest.raises(ray.exceptions.RayTaskError, match="a gradient"):
        ray.get(call(ranks.workers[0], "trainer.apply", Totals(), 1), timeout=60)
