"""Peaks of tensor bytes in real updates of the real actor, in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from gkd.actor.batches import SampleLength, pack
from gkd.actor.collate import collate
from gkd.actor.loading import load
from gkd.actor.model import Student
from gkd.actor.optimizer import adamw
from gkd.config import Config
from gkd.losses.objective import objective
from gkd.types import Prompt, Sample, SampleRequest, Sampling, ScoredSample, Target
from tests.planning.tensor_bytes import TensorBytes


def samples(lengths: Sequence[int], response: int, vocabulary: int, k: int | None, n: int = 1) -> list[ScoredSample]:
    """Random samples of these lengths, the last ``response`` tokens theirs; K targets each, none where k is None.

    ``n`` neighbours, of the same length, are samples of one prompt.
    """
    rng = np.random.default_rng(0)
    scored: list[ScoredSample] = []
    for i, length in enumerate(lengths):
        ids = rng.integers(0, vocabulary, length).astype(np.int32)
        if i % n:
            ids[: length - response] = scored[-1].sample.request.prompt.token_ids
        target = None
        if k is not None:
            top = (np.arange(k, dtype=np.int32) + np.zeros((response, 1), np.int32)) % vocabulary
            logprobs = np.full((response, k), np.log(0.9 / max(k, 1)), dtype=np.float32)
            tail = np.full(response, np.log(0.1), dtype=np.float32)
            target = Target(np.full(response, -3, np.float32), top, logprobs, tail_logprobs=tail)
        request = SampleRequest(Prompt(i // n, ids[: length - response], ""), i % n, 0, Sampling(response))
        sampled = np.full(response, -3, np.float32)
        reference = np.full(response, -3, np.float32)
        sample = Sample.single_turn(request, ids[length - response :], sampled, 0, "stop")
        scored.append(ScoredSample(sample, target, reference))
    return scored


def student_of(config: PretrainedConfig, run: Config) -> Student:
    """A random model of these shapes as the actor loads it."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as path:
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
        return load(path, run.actor.gradient_checkpointing, run.actor.lora)


def peak_of_update(student: Student, run: Config, scored: Sequence[ScoredSample], resizing: bool = False) -> int:
    """Peak bytes of tensors over an optimizer step as :meth:`gkd.actor.training.RankTrainer.update` makes it.

    It is a later one: a step of gradients that are 0 has made the optimizer's state.
    """
    optimizer = adamw(student, run.actor)
    for parameter in student.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    moments = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    prompts = [s.sample.request.prompt for s in scored]
    lengths = [
        SampleLength(len(s.sample.token_ids), prompt.id, len(prompt.token_ids))
        for s, prompt in zip(scored, prompts, strict=True)
    ]
    n = sum(len(s.sample.sampled_ids) for s in scored)
    tensors = TensorBytes(resizing)
    with tensors:
        tensors.count([*student.parameters(), *student.buffers(), *moments])
        with student.use_compute_type():
            for part in pack(lengths, run.actor.micro_batch_tokens):
                _accumulate([scored[i] for i in part], student, run, n)
        torch.nn.utils.clip_grad_norm_(student.parameters(), run.actor.grad_clip)
        optimizer.step()
    return tensors.peak


def _accumulate(scored: Sequence[ScoredSample], student: Student, run: Config, n: int) -> None:
    # In a function, as in the worker's loop, whose names are bound anew with every micro-batch.
    k = None if scored[0].teacher is None else scored[0].teacher.ids.shape[1]
    weights: list[Any] = [1 / n] * len(scored)
    micro = collate(scored, k, weights, [1.0] * len(scored), shared=True)
    total, _ = student(micro, objective(micro, run.algorithm, run.rollout, run.actor.loss_chunk))
    total.backward()
