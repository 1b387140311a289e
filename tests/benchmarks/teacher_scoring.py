"""How fast a teacher scores, with vLLM and with torch, against vLLM's bare prefill.

    python tests/benchmarks/teacher_scoring.py [--hidden 512] [--layers 8] [--vocabulary 512] [--sequences 64]
                                               [--length 192] [--top-k 64] [--rounds 5]

Makes a Llama with random weights and measures, in turn, the wall time of

- *prefill*: vLLM reading all sequences, one token sampled, no log-probabilities: the floor of any scoring with vLLM;
- *vllm* and *torch*: the same sequences through ScoringClient, socket, ScoringServer and that engine, two thirds of
  each a response, until the last Target is in the client's hands.

Prints tokens per second (prompt and response, medians over the rounds, with the least and the most) and the engines'
shares of prefill. Sequences are new in every measurement. A round of each before is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from gkd.cluster.workers.environment import environment
from gkd.config import Teacher
from gkd.config.device import Device, Dtype, installed_device
from gkd.data.model_info import ModelInfo
from gkd.inference.engine import EngineSpec, InferenceEngine
from gkd.inference.requests import ScoreRequest
from gkd.scoring.address import Key
from gkd.scoring.client import ScoringClient
from gkd.scoring.server import ScoringServer


def make_model(path: str, options: argparse.Namespace) -> None:
    """A Llama of the chosen size, 64 wide heads, random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(1, options.hidden // 64)
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 4,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=options.vocabulary,
        max_position_embeddings=options.length + 1,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def make_engine(name: str, path: str, options: argparse.Namespace, device: Device) -> InferenceEngine[Any, Any]:
    """The engine ``name`` on the model in ``path``; both fit on one GPU."""
    settings = Teacher(
        engine=name,
        max_num_seqs=options.sequences,
        max_top_k=options.vocabulary,
        max_model_len=options.length,
        gpu_memory_utilization=0.4,
    )
    dtype: Dtype = "float32" if device == "cpu" else "bfloat16"
    engine: InferenceEngine[Any, Any] = settings.engine_class(
        EngineSpec("teacher", path, ModelInfo.read(path, "model"), settings, device, dtype)
    )
    return engine


@contextlib.contextmanager
def served(engine: InferenceEngine[Any, Any], options: argparse.Namespace) -> Iterator[ScoringClient]:
    """A client of a server of that engine."""
    key = Key.generate()
    server, stop = ScoringServer(engine, "benchmark", "127.0.0.1", 0, key), threading.Event()
    thread = threading.Thread(target=server.serve, args=(stop,))
    thread.start()
    client = ScoringClient([server.address], "benchmark", options.top_k, key=key, request_timeout_s=600.0)
    client.connect(10)
    try:
        yield client
    finally:
        client.close()
        stop.set()
        thread.join(10)
        engine.close()


def prefill_s(engine: Any, sequences: np.ndarray[Any, Any]) -> float:
    """Seconds vLLM takes to read the sequences [N, L]. The server must be idle: this is its engine."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    llm = engine.llm_engine
    parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    began = time.perf_counter()
    for i, ids in enumerate(sequences):
        llm.add_request(f"prefill-{i}", tokens_input(ids.tolist()), parameters)
    while llm.has_unfinished_requests():
        llm.step()
    return time.perf_counter() - began


def scoring_s(client: ScoringClient, sequences: np.ndarray[Any, Any], top_k: int) -> float:
    """Seconds from the first request to the last Target."""
    n_prompt = sequences.shape[1] // 3
    began = time.perf_counter()
    futures = [client.submit(ScoreRequest(ids, ((n_prompt, len(ids)),), top_k)) for ids in sequences]
    for future in futures:
        future.result()
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {
        "hidden": 512, "layers": 8, "vocabulary": 512, "sequences": 64, "length": 192, "top-k": 64, "rounds": 5
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    device = installed_device()
    os.environ.update(environment(device, [], os.cpu_count()))
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as path, contextlib.ExitStack() as stack:
        make_model(path, options)
        engines = {name: make_engine(name, path, options, device) for name in ("vllm", "torch")}
        clients = {name: stack.enter_context(served(engine, options)) for name, engine in engines.items()}
        times: dict[str, list[float]] = {"prefill": [], "vllm": [], "torch": []}
        tokens = options.sequences * options.length
        for round_ in range(-1, options.rounds):
            for name, seconds in times.items():
                ids = rng.integers(1, options.vocabulary, (options.sequences, options.length)).astype(np.int32)
                duration_s = (
                    prefill_s(engines["vllm"], ids)
                    if name == "prefill"
                    else scoring_s(clients[name], ids, options.top_k)
                )
                if round_ >= 0:
                    seconds.append(duration_s)
                    print(f"round {round_ + 1}: {name} {tokens / duration_s:,.0f} tokens/s", flush=True)
    print(
        f"{options.sequences} x {options.length} tokens, K={options.top_k}, {options.layers} layers of "
        f"{options.hidden}, vocabulary {options.vocabulary}, on {device}:"
    )
    for name, seconds in times.items():
        median, low, high = (tokens / f(seconds) for f in (statistics.median, max, min))
        share = statistics.median(f / s for f, s in zip(times["prefill"], seconds, strict=True))
        print(
            f"  {name:8} {median:9,.0f} tokens/s ({low:,.0f} to {high:,.0f}), {share:.2f} of prefill in the same round"
        )


if __name__ == "__main__":
    main()
