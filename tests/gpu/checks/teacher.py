"""A teacher's rows, from each engine that scores, against transformers in float32."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.checks.context import Context, require

VOCABULARY, LENGTH, PROMPT, SEQUENCES = 4096, 200, 40, 6
LEFT_OUT = 96  # rows that the student does not have
TEMPERATURES = (1.0, 0.7)
MOST = {"float32": (2e-4, 2e-3), "bfloat16": (0.08, 0.6)}  # mean and largest difference of log-probabilities, nats


def rows(context: Context) -> None:
    """K = 0, 64 and the whole vocabulary, at two temperatures: the numbers, their order and their sum."""
    from gkd.cluster.workers.environment import environment
    from gkd.config import Teacher
    from gkd.data.model_info import ModelInfo

    device = "cpu" if context.rehearsal else "cuda"
    os.environ.update(environment(device, []))  # type: ignore[arg-type]
    path = context.scratch / "rows"
    _make(path, device)
    from gkd.inference.engine import EngineSpec

    dtype = "float32" if context.rehearsal else "bfloat16"
    checkpoint = ModelInfo(VOCABULARY, 2 * LENGTH, [1], VOCABULARY)
    sequences = np.random.default_rng(0).integers(2, VOCABULARY - LEFT_OUT, (SEQUENCES, LENGTH)).astype(np.int32)
    logits = _logits(path, sequences)
    for name in ("vllm", "torch"):
        settings = Teacher(
            engine=name, max_model_len=LENGTH, gpu_memory_utilization=0.3, enforce_eager=True, kv_cache_gb=1
        )
        began = time.monotonic()
        engine = settings.engine_class(EngineSpec("teacher", str(path), checkpoint, settings, device, dtype))  # type: ignore[arg-type]
        context.note({f"{name}_start_s": time.monotonic() - began})
        try:
            for temperature in TEMPERATURES:
                for top_k in (0, 64, VOCABULARY):
                    mean, largest = _worst(engine, sequences, logits / temperature, top_k, temperature)
                    what = f"{name}_K{top_k}_T{temperature}"
                    context.note({f"{what}_mean": mean, f"{what}_max": largest})
                    allowed = MOST[dtype]
                    wrong = f"{what}: {mean:.2e} off on average, {largest:.2e} at most"
                    require(mean < allowed[0] and largest < allowed[1], wrong)
        finally:
            engine.close()


def _worst(engine: Any, sequences: Any, logits: Any, top_k: int, temperature: float) -> tuple[float, float]:
    """Mean and largest difference to ``logits`` [S, L, V], already divided, without the rows that are left out."""
    from gkd.inference.requests import ScoreRequest

    kept = VOCABULARY - LEFT_OUT
    exact = logits[..., :kept].log_softmax(-1).numpy()
    for key, ids in enumerate(sequences):
        engine.add(key, ScoreRequest(ids, ((PROMPT, len(ids)),), top_k, temperature, kept))
    targets: dict[int, Any] = {}
    while engine.has_unfinished_requests():
        targets |= dict(engine.step())
    differences = []
    for key, ids in enumerate(sequences):
        target, exact_row = targets[key], exact[key, PROMPT - 1 : -1]
        differences.append(np.abs(target.token_logprobs - exact_row[np.arange(LENGTH - PROMPT), ids[PROMPT:]]).ravel())
        require(target.ids.shape == (LENGTH - PROMPT, min(top_k, kept)), f"{target.ids.shape} for K={top_k}")
        if top_k:
            require(target.ids.max() < kept, "an id that the student does not have")
            require(bool((np.diff(target.logprobs, axis=1) <= 1e-6).all()), "not in falling order")
            differences.append(np.abs(target.logprobs - np.take_along_axis(exact_row, target.ids, axis=1)).ravel())
        if top_k >= kept:
            require(all(len(np.unique(row)) == kept for row in target.ids), "an id twice")
            total = np.exp(target.logprobs.astype(np.float64)).sum(1)
            require(bool(np.allclose(total, 1, atol=1e-3)), f"probabilities sum to {total.min()} to {total.max()}")
    every = np.concatenate(differences)
    require(bool(np.isfinite(every).all()), "numbers that are not finite")
    return float(every.mean()), float(every.max())


def _logits(path: Path, sequences: Any) -> Any:
    """What transformers computes from the same weights on the CPU, in float32 and nothing less."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model.eval()(torch.from_numpy(sequences).long()).logits.float()


def _make(path: Path, device: str) -> None:
    """A Llama with groups of heads; weights that bfloat16 can say, so that both engines have the same."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small = device == "cpu"
    width, layers, heads = (128, 2, 4) if small else (1024, 4, 16)
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "vocab_size": VOCABULARY}
    model = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=2 * LENGTH, eos_token_id=1))
    with torch.no_grad():
        model.lm_head.weight.mul_(4)  # away from a uniform distribution
    model.bfloat16().save_pretrained(path)
