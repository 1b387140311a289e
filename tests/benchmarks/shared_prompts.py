#!/usr/bin/env python
"""Gradients of groups of samples with their prompt computed once against one for each sample, in turn.

    python tests/benchmarks/shared_prompts.py [--prompt 512] [--response 128] [--n 8] [--prompts 4] [--rounds 5]
        [--width 256] [--layers 4] [--budget 8192] [--threads 2]

A random Qwen2 by GRPO's loss, responses of half to one and a half times ``--response`` tokens, packs of ``--budget``;
float32 on a CPU, bfloat16 on a GPU. Prints a line of JSON: tokens and packs of either, medians of the seconds of all
forward and backward passes, the ratio, and how far the gradients are apart, relative to their norm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from gkd.actor.batches import SampleLength, pack
from gkd.actor.collate import collate
from gkd.actor.loading import load
from gkd.actor.model import Student
from gkd.config import Algorithm, Rollout
from gkd.losses.micro_batch import MicroBatch
from gkd.losses.objective import objective
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


def micro_batches(samples: list[ScoredSample], budget: int, shared: bool) -> list[MicroBatch]:
    """Return packs of at most ``budget`` tokens."""
    prompts = [one.sample.request.prompt for one in samples]
    lengths = [
        SampleLength(len(one.sample.token_ids), prompt.id, len(prompt.token_ids) if shared else 0)
        for one, prompt in zip(samples, prompts, strict=True)
    ]
    weight, packs = 1 / sum(len(one.sample.sampled_ids) for one in samples), []
    for part in pack(lengths, budget):
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


def measure(given: argparse.Namespace) -> dict[str, float]:
    """Return what is printed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = {"hidden_size": given.width, "intermediate_size": 4 * given.width, "num_hidden_layers": given.layers}
    heads = {"num_attention_heads": given.width // 64, "num_key_value_heads": max(1, given.width // 128)}
    longest = given.prompt + 2 * given.response
    with tempfile.TemporaryDirectory() as directory:
        config = Qwen2Config(**shape, **heads, vocab_size=VOCABULARY, max_position_embeddings=longest)
        Qwen2ForCausalLM(config).save_pretrained(directory)
        student = load(directory)
    student.to(device, torch.bfloat16 if device.type == "cuda" else None)
    samples = groups(given.prompts, given.n, given.prompt, given.response)
    apart, shared = (micro_batches(samples, given.budget, once) for once in (False, True))
    gradients = []
    for packs in (apart, shared):  # once each before they are timed
        accumulate(student, packs, given.n, device)
        gradients.append(gradient(student))
    times = [[accumulate(student, packs, given.n, device) for packs in (apart, shared)] for _ in range(given.rounds)]
    return {
        "tokens": sum(len(micro.sequences) for micro in apart),
        "tokens_shared": sum(len(micro.sequences) for micro in shared),
        "packs": len(apart),
        "packs_shared": len(shared),
        "seconds": round(statistics.median(its for its, _ in times), 3),
        "seconds_shared": round(statistics.median(its for _, its in times), 3),
        "ratio": round(statistics.median(its / others for others, its in times), 3),
        "least": round(min(its / others for others, its in times), 3),
        "most": round(max(its / others for others, its in times), 3),
        "gradient_apart": float((gradients[1] - gradients[0]).norm() / gradients[0].norm()),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, value in {"prompt": 512, "response": 128, "n": 8, "prompts": 4, "rounds": 5, "width": 256, "layers": 4,
                        "budget": 8192, "threads": 2}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(json.dumps(vars(arguments) | measure(arguments)))
