#!/usr/bin/env python
"""Gradients of micro-batches with compiled decoder layers against the same layers as they are, in turn.

    python tests/benchmarks/compile.py [--tokens 4096] [--width 512] [--layers 4] [--rounds 5] [--threads 2]

A random Qwen2 on random samples of different lengths, in packs of ``--tokens``; float32 on a CPU, bfloat16 on a GPU.
Prints a line of JSON: medians of the seconds of a forward and backward pass of each, the ratio, what compiling took,
the loss's relative difference and the largest one of any gradient relative to that gradient's largest value.
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
from transformers import Qwen2Config, Qwen2ForCausalLM

from gkd.actor.batches import SampleLength, pack
from gkd.actor.collate import collate
from gkd.actor.compiling import compile_student
from gkd.actor.loading import load
from gkd.actor.model import Student
from gkd.config import Algorithm, Rollout
from gkd.losses.micro_batch import MicroBatch
from gkd.losses.objective import objective
from gkd.types import Prompt, Sample, SampleRequest, Sampling, ScoredSample

VOCABULARY = 1024


def micro_batches(n_tokens: int, seed: int) -> list[MicroBatch]:
    """Return packs of samples of 64 to 512 tokens, which learn their own answers."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(max(4, 3 * n_tokens // 288)):
        prompt = Prompt(i, rng.integers(0, VOCABULARY, 32).astype(np.int32), "")
        ids = rng.integers(0, VOCABULARY, int(rng.integers(32, 480))).astype(np.int32)
        sample = Sample.single_turn(
            SampleRequest(prompt, 0, 0, Sampling(480)), ids, np.full(len(ids), np.nan, np.float32), 0, "stop"
        )
        samples.append(ScoredSample(sample))
    parts = pack([SampleLength(len(one.sample.token_ids)) for one in samples], n_tokens)
    return [collate([samples[i] for i in part], None, [1.0] * len(part), [1.0] * len(part)) for part in parts]


def seconds(student: Student, micro: MicroBatch, device: torch.device) -> tuple[float, float]:
    """Return seconds of a forward and backward pass, and the loss."""
    algorithm = Algorithm(name="grpo")
    student.zero_grad()
    began = time.perf_counter()
    loss, _ = student(micro, objective(micro, algorithm, Rollout(n=2), 1024))
    loss.backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, float(loss.detach())


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 4096), ("width", 512), ("layers", 4), ("rounds", 5), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    heads = options.width // 64
    config = Qwen2Config(
        hidden_size=options.width, intermediate_size=4 * options.width, num_hidden_layers=options.layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), vocab_size=VOCABULARY,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as path:
        Qwen2ForCausalLM(config).save_pretrained(path)
        students = [load(path).to(device) for _ in range(2)]
    if device.type == "cuda":
        students = [student.bfloat16() for student in students]
    plain, compiled = students
    compiled.compilation = compile_student(compiled.lm, True, options.tokens, device)
    packs = [micro.to(device) for micro in micro_batches(options.tokens, 0)]
    began = time.perf_counter()
    for micro in packs:
        seconds(compiled, micro, device)
    first = time.perf_counter() - began
    times: list[tuple[float, float]] = []
    apart, slopes = 0.0, 0.0
    for i in range(options.rounds * len(packs)):
        micro = packs[i % len(packs)]
        (a, loss), (b, other) = (seconds(student, micro, device) for student in students)
        times.append((a, b))
        apart = max(apart, abs(other - loss) / abs(loss))
        pairs = zip(plain.parameters(), compiled.parameters(), strict=True)
        both = [(p.grad, q.grad) for p, q in pairs if p.grad is not None and q.grad is not None]
        slopes = max([slopes, *(float((p - q).abs().max() / p.abs().max()) for p, q in both)])
    figures = {"plain_s": statistics.median(a for a, _ in times), "compiled_s": statistics.median(b for _, b in times)}
    figures |= {"ratio": statistics.median(b / a for a, b in times), "first_passes_s": first}
    figures |= {"loss_apart": apart, "gradient_apart": slopes}
    print(json.dumps({**vars(options), **{name: float(f"{value:.3g}") for name, value in figures.items()}}))


if __name__ == "__main__":
    main()
