#!/usr/bin/env python
"""Gradients of groups of samples: in padded rows, laid end to end, and with their prompt computed once, in turn.

    python tests/benchmarks/shared_prompts.py [--family qwen2] [--prompt 512] [--response 128] [--n 8] [--prompts 4]
        [--rounds 5] [--width 256] [--layers 4] [--budget 8192] [--threads 2]

A random model of a family (qwen2; gemma2, gpt_oss, qwen3_5, some of whose layers are given rows) by GRPO's loss,
responses of half to one and a half times ``--response`` tokens, packs of ``--budget``; float32 on a CPU, bfloat16 on a
GPU. Prints a line of JSON: of each way tokens, packs, and the median of the seconds of all forward and backward passes;
for each of the latter two the ratio to the way before it, its least and most, and how far the gradients are apart,
relative to their norm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from gkd.actor.batches import SampleLength, pack
from gkd.actor.collate import collate
from gkd.actor.loading import load
from gkd.actor.model import Student
from gkd.config import Algorithm, Rollout
from gkd.losses.micro_batch import MicroBatch
from gkd.losses.objective import objective
from gkd.modeling.backbone import use_padded_rows
from gkd.types import Prompt, Sample, SampleRequest, Sampling, ScoredSample

VOCABULARY = 1024


def groups(n_prompts: int, n: int, n_prompt: int, n_response: int) -> list[ScoredSample]:
    """Return ``n`` samples of each prompt."""
    rng = np.random.default_rng(0)
    samples = []
    for number in range(n_prompts):
        prompt = Prompt(number, rng.integers(0, VOCABULARY, n_prompt).astype(np.int32), "")
        for index in range(n):
            ids = rng.integers(0, VOCABULARY, int(rng.integers(n_response // 2, 3 * n_response // 2 + 1)))
            request = SampleRequest(prompt, index, 0, Sampling(2 * n_response))
            logprobs = -rng.random(len(ids)).astype(np.float32)
            samples.append(ScoredSample(Sample.single_turn(request, ids.astype(np.int32), logprobs, 0, "stop")))
    return samples


def micro_batches(samples: list[ScoredSample], budget: int, padded: bool, shared: bool) -> list[MicroBatch]:
    """Return packs of at most ``budget`` tokens, with ``padded`` padding included."""
    prompts = [one.sample.request.prompt for one in samples]
    lengths = [
        SampleLength(len(one.sample.token_ids), prompt.id, len(prompt.token_ids) if shared else 0)
        for one, prompt in zip(samples, prompts, strict=True)
    ]
    weight, packs = 1 / sum(len(one.sample.sampled_ids) for one in samples), []
    for part in pack(lengths, budget, padded):
        advantages = [(-1.0) ** samples[i].sample.request.index for i in part]
        packs.append(collate([samples[i] for i in part], None, [weight] * len(part), advantages, shared=shared))
    return packs


def accumulate(student: Student, packs: list[MicroBatch], n: int, device: torch.device) -> float:
    """Return the seconds of all passes, whose gradients are the student's then."""
    student.zero_grad()
    began = time.perf_counter()
    for micro in (each.to(device) for each in packs):
        loss, _ = student(micro, objective(micro, Algorithm(name="grpo"), Rollout(n=n), 1024))
        loss.backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def gradient(student: Student) -> Tensor:
    """Return all gradients in one."""
    return torch.cat([p.grad.flatten().float() for p in student.parameters() if p.grad is not None])


def make(family: str, width: int, layers: int, longest: int) -> PreTrainedModel:
    """Return a random model, its attention of heads of 64 in groups of two, every other layer of two kinds."""
    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "head_dim": 64}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 128)}
    shape |= heads | {"vocab_size": VOCABULARY, "max_position_embeddings": longest}
    if family == "qwen3_5":
        kinds = ["linear_attention", "full_attention"] * (layers // 2)
        linear = {"linear_num_key_heads": width // 128, "linear_num_value_heads": width // 64}
        linear |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape, **linear, layer_types=kinds))
    if family == "gpt_oss":
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": width}
        return GptOssForCausalLM(GptOssConfig(**shape | experts, rope_parameters={"rope_theta": 1e4}))
    if family == "gemma2":
        return Gemma2ForCausalLM(Gemma2Config(**shape))
    return Qwen2ForCausalLM(Qwen2Config(**shape))


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return what is printed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as directory:
        make(given.family, given.width, given.layers, given.prompt + 2 * given.response).save_pretrained(directory)
        student = load(directory)
    student.to(device, torch.bfloat16 if device.type == "cuda" else None)
    samples = groups(given.prompts, given.n, given.prompt, given.response)
    ways: dict[str, tuple[list[MicroBatch], Callable[[], AbstractContextManager[None]]]] = {
        "rows": (micro_batches(samples, given.budget, padded=True, shared=False), lambda: use_padded_rows(student.lm)),
        "end_to_end": (micro_batches(samples, given.budget, student.takes_rows, shared=False), nullcontext),
        "shared": (micro_batches(samples, given.budget, student.takes_rows, shared=True), nullcontext),
    }

    def run(way: str) -> float:
        packs, using = ways[way]
        with using():
            return accumulate(student, packs, given.n, device)

    gradients = {}
    for way in ways:  # once each before they are timed
        run(way)
        gradients[way] = gradient(student)
    rounds = [{way: run(way) for way in ways} for _ in range(given.rounds)]
    result: dict[str, Any] = {}
    for way, (packs, _) in ways.items():
        result[way] = {
            "tokens": sum(len(micro.sequences) for micro in packs),
            "packs": len(packs),
            "seconds": round(statistics.median(times[way] for times in rounds), 3),
        }
    for before, way in pairwise(ways):
        ratios = [times[way] / times[before] for times in rounds]
        apart = (gradients[way] - gradients[before]).norm() / gradients[before].norm()
        result[way] |= {
            "ratio": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
            "gradients_apart": float(apart),
        }
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", choices=["qwen2", "gemma2", "gpt_oss", "qwen3_5"], default="qwen2")
    for name, value in {"prompt": 512, "response": 128, "n": 8, "prompts": 4, "rounds": 5, "width": 256, "layers": 4,
                        "budget": 8192, "threads": 2}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(json.dumps(vars(arguments) | measure(arguments)))
