"""Memory and time of one actor update: full fine-tuning, LoRA, smaller micro-batches, gradient checkpointing.

    python tests/benchmarks/memory.py [--hidden 512] [--layers 8] [--vocabulary 4096] [--sequences 16] [--length 256]

Every variant runs in a process of its own: a Llama with random weights, two updates by reverse KL on random targets
(K = 64), AdamW. Memory is the process' largest resident size beyond what it had before the model was made; time is that
of the second update. Without a GPU only: on one, see ``memory/actor/*`` in metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

VARIANTS: dict[str, dict[str, object]] = {
    "full fine-tuning": {},
    "LoRA r=8": {"lora": {"r": 8}},
    "LoRA r=8 beside 4-bit weights": {"lora": {"r": 8, "quantize": "nf4"}},
    "micro-batches of a quarter": {"quarter": True},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "all three": {"lora": {"r": 8}, "quarter": True, "gradient_checkpointing": True},
}


def measure(options: argparse.Namespace, variant: dict[str, object]) -> dict[str, float]:
    """GB beyond the start, and seconds of the second update."""
    import numpy as np

    from gkd.actor.batches import SampleLength, pack
    from gkd.actor.collate import collate
    from gkd.actor.loading import load
    from gkd.actor.optimizer import adamw
    from gkd.config import Actor, Algorithm, Lora, Rollout
    from gkd.losses.objective import objective
    from gkd.types import Prompt, Sample, SampleRequest, Sampling, ScoredSample, Target

    rng = np.random.default_rng(0)
    n, length, k = options.sequences, options.length, 64
    response = length * 3 // 4
    samples = []
    for i in range(n):
        ids = rng.integers(0, options.vocabulary, length).astype(np.int32)
        top = np.argsort(rng.random((response, options.vocabulary)), -1)[:, :k].astype(np.int32)
        logprobs = np.full((response, k), np.log(0.9 / k), dtype=np.float32)
        tail = np.full(response, np.log(0.1), dtype=np.float32)
        sample = Sample.single_turn(
            SampleRequest(Prompt(i, ids[: length - response], ""), 0, 0, Sampling(response)),
            ids[length - response :],
            np.full(response, -3, dtype=np.float32),
            0,
            "stop",
        )
        samples.append(ScoredSample(sample, Target(logprobs[:, 0], top, logprobs, tail_logprobs=tail)))
    Path("/proc/self/clear_refs").write_text("5")  # forget the largest size so far
    before = resident("VmRSS")
    lora = Lora.model_validate(variant.get("lora", {}))
    student = load(options.path, bool(variant.get("gradient_checkpointing")), lora)
    optimizer = adamw(student, Actor(lr=1e-6))
    budget = n * length // (4 if variant.get("quarter") else 1)
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        for part in pack([SampleLength(length)] * n, budget):
            weights = [1 / (n * response)] * len(part)
            micro = collate([samples[i] for i in part], k, weights, [0.0] * len(part))
            total, _ = student(micro, objective(micro, Algorithm(), Rollout(), 512))
            total.backward()
        optimizer.step()
        seconds = time.perf_counter() - began
    return {"gb": resident("VmHWM") - before, "seconds": seconds}


def resident(kind: str) -> float:
    """GB of this process in memory, now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(kind))
    return int(value) * 1024 / 1e9


def make_model(options: argparse.Namespace) -> None:
    """Write a Llama with random weights to ``options.path``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 64,
        vocab_size=options.vocabulary,
    )
    LlamaForCausalLM(config).save_pretrained(options.path)


def main() -> None:
    """Measure every variant and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"hidden": 512, "layers": 8, "vocabulary": 4096, "sequences": 16, "length": 256}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--variant", choices=list(VARIANTS), help="measure this one here and print JSON")
    parser.add_argument("--path", help="where the model is, with --variant")
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options, VARIANTS[options.variant])))
        return
    with tempfile.TemporaryDirectory() as options.path:
        make_model(options)
        compare([f"--{name}={getattr(options, name)}" for name in [*defaults, "path"]])


def compare(shape: list[str]) -> None:
    """Measure every variant in a process of its own."""
    results = {}
    for name in VARIANTS:
        done = subprocess.run(
            [sys.executable, __file__, *shape, "--variant", name],
            check=True,
            capture_output=True,
            text=True,
            timeout=900,
        )
        results[name] = json.loads(done.stdout.splitlines()[-1])
        full = results["full fine-tuning"]
        gb, seconds = results[name]["gb"], results[name]["seconds"]
        share, pace = gb / full["gb"] - 1, seconds / full["seconds"]
        print(f"{name:30} {gb:6.2f} GB  {share:+7.0%}   {seconds:6.2f} s  {pace:5.2f} x", flush=True)


if __name__ == "__main__":
    main()
