"""Runs what a GPU would run on a device that is not the host (:mod:`tests.gpu.other_device`), and on the host.

    python -m tests.gpu.on_other_device [CHECK ...]

Prints the largest difference of each check; exit code 1 where one is too large. What is shown: every tensor is where it
has to be, answers are not read before they are there, collectives and FSDP2 work beside a device. What is not: CUDA's
own kernels, memory and speed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import multiprocessing
from transformers import MiniCPM3Config, MiniCPM3ForCausalLM, PreTrainedModel

from gkd.actor import training
from gkd.actor.worker import ActorWorker
from gkd.cluster.session.port import free_port
from gkd.config import Rollout
from gkd.config.compose import compose
from gkd.config.device import Device
from gkd.inference.engine import EngineSpec
from gkd.inference.hf import HFSampler
from gkd.inference.torch_scorer import TorchScorer
from gkd.types import Prompt, SampleRequest, Sampling, VersionSpan
from gkd.weights.transfer import Bucket
from tests.actor import models
from tests.data.models import word_tokenizer
from tests.families import make
from tests.gpu import other_device
from tests.inference.test_torch_scorer import INFO, mixed, of_a_prompt, run, spec_of

Figures = Iterator[Any]
TOLERANCE = {"float32": 1e-4} | dict.fromkeys(("bfloat16", "latent", "states", "caps"), 0.05)
RUNS: dict[str, tuple[str, dict[str, object]]] = {
    "distill": ("on_policy_distill", {}),
    "bfloat16": ("on_policy_distill", {"model.dtype": "bfloat16"}),
    "latent": ("on_policy_distill", {"model.dtype": "bfloat16"}),
    "stale": ("on_policy_distill", {"schedule.max_staleness": 2, "algorithm.loss.name": "sampled_reverse_kl"}),
    "lora": ("grpo", {"actor.epochs": 2, "actor.lora.r": 4, "algorithm.kl.coef": 0.1}),
    "offload": ("grpo", {"actor.offload_optimizer": True}),
    "offload_weights": ("grpo", {"actor.offload_weights": True}),
    "checkpointing": ("gspo", {"actor.gradient_checkpointing": True}),
    "states": ("grpo", {"model.dtype": "bfloat16", "actor.gradient_checkpointing": True}),
    "caps": ("grpo", {"model.dtype": "bfloat16"}),
}


def scores(device: Device, directory: Path) -> Figures:
    """Score requests of every kind with the torch engine; on a GPU answers are taken apart during the next pass."""
    make("qwen2 tied", 0).save_pretrained(directory)
    for target in run(TorchScorer(replace(spec_of(directory), device=device)), [*mixed(), *of_a_prompt(4, 20)]):
        yield from (target.token_logprobs, target.ids, target.logprobs)


def samples(device: Device, directory: Path) -> Figures:
    """Sample with transformers, load new weights twice, sample again."""
    model = make("qwen2 tied", 0)
    model.save_pretrained(directory)
    engine = HFSampler(EngineSpec("rollout", str(directory), INFO, Rollout(engine="hf"), device, "float32"))
    for how in ({}, {"temperature": 0.7, "presence_penalty": 0.5}, {"top_p": 0.8}, {"temperature": 0.0}):
        for key in range(5):
            prompt = Prompt(key, np.arange(3, 6 + key).astype(np.int32), "")
            engine.add(key, SampleRequest(prompt, 0, key, Sampling(9, **how)))
        while engine.has_unfinished_requests():
            for _, sample in engine.step():
                yield from (sample.token_ids, sample.sampled_logprobs)
        state = {name: 1.01 * value for name, value in model.state_dict().items() if name != "lm_head.weight"}
        engine.load_weights(Bucket(1, 0, True), state)


def make_latent() -> PreTrainedModel:
    """Make a model of latent attention, whose values are narrower than its queries."""
    torch.manual_seed(0)
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 8}
    # Its head scales nothing: tensors of the other device have no addresses, by which scaling is seen.
    sizes |= {"num_key_value_heads": 4, "tie_word_embeddings": False, "dim_model_base": models.SHAPE["hidden_size"]}
    return MiniCPM3ForCausalLM(MiniCPM3Config(**models.SHAPE | sizes))


def trains(
    recipe: str, overrides: dict[str, object], make_student: Callable[[], PreTrainedModel]
) -> Callable[[Device, Path], Figures]:
    """Return a check that does two steps as the actor's one rank, with its state saved and loaded between them."""

    def train(device: Device, directory: Path) -> Figures:
        values = {
            "actor.max_tokens_per_micro_batch": 40, "actor.loss_chunk": 7, "model.dtype": "float32",
            "actor.compile": False, **overrides,
        }  # fmt: skip
        config = compose([f"+recipe={recipe}", *(f"{name}={json.dumps(value)}" for name, value in values.items())])
        make_student().save_pretrained(directory)
        word_tokenizer().save_pretrained(directory)
        scored = [*models.scored(3, models.VOCAB), *models.group(3, n_prompt=5)]
        samples = [models.on_driver("ref", i, sample, (-1.0) ** i) for i, sample in enumerate(scored)]
        spans = [VersionSpan(s.n_tokens - s.n_sampled, s.n_tokens, 0) for s in samples]
        samples = [replace(s, versions=(span,)) for s, span in zip(samples, spans, strict=True)]
        weights = [1.0 / s.n_sampled for s in samples]
        training.fetch_samples = lambda *_: scored
        worker = ActorWorker(config, str(directory), 0, 1, device)
        worker.store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        worker.join("", 0)
        worker.load()
        epochs = config.actor.epochs
        for step in (1, 2):
            worker.trainer.compute_logprobs(samples, epochs > 1, config.algorithm.needs_reference)
            for epoch in range(epochs):
                yield worker.trainer.update(samples, weights, 10, step, epoch == epochs - 1)
            if step == 1:
                worker.state.stage()
                name, _ = worker.state.write_staged(str(directory))
                worker.state.load([str(directory / name)], step)
                worker.state.offload()
                worker.state.onload()
        yield worker.trainer.evaluate(samples, weights, 10, config.algorithm)
        worker.state.take_over(worker.state.keep())
        worker.state.save(str(directory / "model"))
        yield {name: tensor.float().cpu() for name, tensor in worker.weights._tensors()}
        dist.destroy_process_group()

    return train


def trains_on_two(*overrides: str) -> Callable[[Device, Path], Figures]:
    """Return a check that does two steps as two ranks, each in a process of its own, and saves."""

    def train(device: Device, directory: Path) -> Figures:
        models.make("llama").save_pretrained(directory)
        word_tokenizer().save_pretrained(directory)
        arguments = free_port(), device, directory, overrides
        multiprocessing.start_processes(_rank, arguments, 2, start_method="forkserver")  # type: ignore[no-untyped-call]
        yield from json.loads((directory / "figures.json").read_text())

    return train


def _rank(rank: int, port: int, device: Device, directory: Path, overrides: Sequence[str]) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        other_device.set_up()
    with other_device.entered() if device == "cuda" else nullcontext():
        config = compose(
            ["+recipe=on_policy_distill", "model.dtype=float32", "actor.compile=false", "trainer.n_gpus_per_node=2",
             "actor.max_tokens_per_micro_batch=40", *overrides]
        )  # fmt: skip
        own = [(sample, models.on_driver("ref", i, sample)) for i, sample in enumerate(models.scored(6, models.VOCAB))]
        own = own[rank::2]
        training.fetch_samples = lambda *_: [scored for scored, _ in own]
        worker = ActorWorker(config, str(directory), rank, 2, device)
        worker.store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]
        worker.join("127.0.0.1", port)
        worker.load()
        samples, weights = [sample for _, sample in own], [1.0 / sample.n_sampled for _, sample in own]
        figures: list[dict[str, float]] = [worker.trainer.update(samples, weights, 10, step) for step in (1, 2)]
        worker.state.save(str(directory / "model"))
        figures.append({name: float(tensor.float().abs().sum()) for name, tensor in worker.weights._tensors()})
        if rank == 0:
            (directory / "figures.json").write_text(json.dumps(figures))
        dist.barrier()
        last = directory / "rank_1_is_done"
        if rank:
            last.touch()
        else:  # it has the store, which the other's threads still look at
            _wait_for(last)
    os._exit(0)  # as Ray's workers end: while libraries are taken down, a rank under load was once ended by SIGABRT


def _wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{file.name} was not there within a minute")
        time.sleep(0.02)
    time.sleep(0.2)  # until that rank has ended


def notices() -> bool:
    """Return whether tensors of the host and of the device do not mix, and copies to the host come late."""
    on = torch.arange(3.0).to("cuda")
    try:
        on + torch.ones(3)
    except RuntimeError:
        copy = on.to("cpu", non_blocking=True)
        early = copy.isnan().all().item()
        torch.cuda.Event().synchronize()
        return bool(early) and copy.tolist() == [0.0, 1.0, 2.0]
    return False


STUDENTS = {"latent": make_latent, "states": partial(models.make, "qwen3_5"), "caps": partial(models.make, "gemma2")}
LLAMA = partial(models.make, "llama")
CHECKS = {"scores": scores, "samples": samples}
CHECKS |= {name: trains(*how, STUDENTS.get(name, LLAMA)) for name, how in RUNS.items()}
CHECKS |= {"ranks": trains_on_two(), "ranks_lora": trains_on_two("actor.lora.r=4")}
CHECKS |= {"copies": trains_on_two("actor.fsdp_size=1")}
CHECKS |= {f"ranks_{its}": trains_on_two(f"actor.{its}=true") for its in ("offload_optimizer", "offload_weights")}


def difference(ours: Any, theirs: Any) -> float:
    """Return the largest difference, of numbers of more than 1 relative to them."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        return max(difference(ours[name], theirs[name]) for name in ours)
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert a.shape == b.shape and np.array_equal(np.isnan(a), np.isnan(b))
    return float(np.nan_to_num(np.abs(a - b) / np.maximum(1.0, np.abs(b))).max(initial=0.0))


def main(names: list[str]) -> int:
    """Do the checks; returns the exit code."""
    other_device.set_up()
    set_forkserver_preload(["tests.gpu.on_other_device"])  # imported once for all ranks
    with other_device.entered():
        noticed = notices()
    print(json.dumps({"check": "notices", "ok": noticed, "figures": 0, "difference": 0.0}), flush=True)
    failed = int(not noticed)
    for name in names or list(CHECKS):
        figures: list[list[Any]] = []
        for device in ("cpu", "cuda"):
            with tempfile.TemporaryDirectory() as directory:
                if device == "cpu":
                    figures.append(list(CHECKS[name]("cpu", Path(directory))))
                    continue
                with other_device.entered():
                    figures.append(list(CHECKS[name]("cuda", Path(directory))))
        host, other = figures
        most = max(difference(a, b) for a, b in zip(other, host, strict=True))
        ok = most < TOLERANCE.get(name, TOLERANCE["float32"])
        failed += not ok
        print(json.dumps({"check": name, "ok": ok, "figures": len(host), "difference": most}), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
