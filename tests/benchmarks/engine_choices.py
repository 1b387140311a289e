"""What an engine's choices are worth: an engine as it samples and scores here, and with one of them undone, in turn.

    python tests/benchmarks/engine_choices.py [--hidden 512] [--layers 4] [--vocabulary 8192] [--rounds 7]

Makes a Llama with random weights, and engines that sample and score from it, vLLM's but in the last two. In each round,
in turn:

- *finished outputs alone*: 64 responses of 128 tokens, of which vLLM hands on what is finished, and of every step;
- *samples of a prompt in one engine*: 8 samples of each of 8 prompts of 500 tokens, and one of each of 64, which an
  engine gets when the samples of a prompt go to different ones; 8 tokens each;
- *rows as tensors*: the top 64 of 32 sequences of 64 and 128 tokens, as tensors, and taken apart into lists by vLLM;
- *the prompt's cache*: the same K of 8 samples of each of 4 prompts of 500 and 64 tokens, which read what the first has
  left in the cache, and each by itself;
- *prompts once, by torch*: the same by the torch engine, which computes a prompt once for the samples of a pass;
- *torch in place of vLLM*: the same, and 2 samples of each of 16 prompts of 100 and 300 tokens.

Prints medians over the rounds, and of what a round took with the choice, as a part of what it took without, the median
and the range. A round before is not counted. Other choices have programs of their own: ``hand_out.py``, ``loss.py``,
``compile.py``, ``weights.py``, ``step.py``, ``memory.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from gkd.cluster.workers.environment import environment
from gkd.config import Rollout, Teacher
from gkd.config.device import Device, Dtype, installed_device
from gkd.data.model_info import ModelInfo
from gkd.inference.engine import EngineSpec, InferenceEngine
from gkd.inference.requests import ScoreRequest
from gkd.inference.torch_scorer import TorchScorer
from gkd.types import Int32, Prompt, SampleRequest, Sampling
from tests.benchmarks.teacher_scoring import make_model

SEQUENCES, PROMPT, RESPONSE, TOP_K = 64, 500, 64, 64
LENGTH = PROMPT + 128
SHORT_PROMPT, LONG_RESPONSE = 100, 300
Engine = InferenceEngine[Any, Any]


class Random:
    """Token sequences that no cache has seen."""

    def __init__(self, vocabulary: int) -> None:
        self._numbers, self._vocabulary = np.random.default_rng(0), vocabulary

    def ids(self, length: int) -> Int32:
        """Return ``length`` token ids."""
        return self._numbers.integers(1, self._vocabulary, length).astype(np.int32)


def make_engines(path: str, device: Device) -> tuple[Engine, Engine, Engine]:
    """Return an engine that samples and two that score, vLLM's and torch's, all on the model in ``path``."""
    dtype: Dtype = "float32" if device == "cpu" else "bfloat16"
    model = ModelInfo.read(path, "model")
    rollout = Rollout(max_num_seqs=SEQUENCES, gpu_memory_utilization=0.3)
    teacher = Teacher(
        engine="vllm",
        max_num_seqs=SEQUENCES,
        max_top_k=TOP_K,
        max_model_len=LENGTH,
        gpu_memory_utilization=0.3,
    )
    return (
        rollout.engine_class(EngineSpec("rollout", path, model, rollout, device, dtype, LENGTH)),
        teacher.engine_class(EngineSpec("teacher", path, model, teacher, device, dtype)),
        TorchScorer(EngineSpec("teacher", path, model, teacher, device, dtype)),
    )


def run(engine: Engine, requests: list[Any]) -> float:
    """Return the seconds that ``engine`` takes for ``requests``."""
    began = time.perf_counter()
    for key, request in enumerate(requests):
        engine.add(key, request)
    n_answers = 0
    while engine.has_unfinished_requests():
        n_answers += len(list(engine.step()))
    assert n_answers == len(requests)
    return time.perf_counter() - began


def sample_requests(prompts: list[Int32], n: int, max_tokens: int) -> list[SampleRequest]:
    """Return ``n`` samples of each of ``prompts``."""
    sampling = Sampling(max_tokens)
    return [
        SampleRequest(Prompt(number, ids, ""), index, number * n + index, sampling)
        for number, ids in enumerate(prompts)
        for index in range(n)
    ]


def score_requests(prompts: list[Int32], n: int, response: int, random: Random) -> list[ScoreRequest]:
    """Return ``n`` responses to each of ``prompts`` that are to be scored."""
    return [
        ScoreRequest(np.concatenate([ids, random.ids(response)]), ((len(ids), len(ids) + response),), TOP_K)
        for ids in prompts
        for _ in range(n)
    ]


@contextlib.contextmanager
def every_output() -> Iterator[None]:
    """Have vLLM hand on what each request has after each step, as by default."""
    from vllm import sampling_params

    from gkd.inference.vllm_sampler import _make_params

    kinds = SimpleNamespace(FINAL_ONLY=sampling_params.RequestOutputKind.CUMULATIVE)
    _make_params.cache_clear()
    with patch.object(sampling_params, "RequestOutputKind", kinds):
        yield
    _make_params.cache_clear()


@contextlib.contextmanager
def lists() -> Iterator[None]:
    """Have vLLM take rows apart, which then nobody puts together: the time without the choice is longer than shown."""
    from gkd.inference import vllm_scorer

    with (
        patch.object(vllm_scorer.VLLMScorer, "_tap", lambda *_: None),
        patch.object(vllm_scorer, "lacks_rows", lambda *_: False),
        patch.object(vllm_scorer, "_target", lambda *_: None),
    ):
        yield


@contextlib.contextmanager
def whole_prompts(scorer: Engine) -> Iterator[None]:
    """Have the torch engine compute every prompt for each of its samples."""
    with patch.object(scorer, "_shares_prompts", False):
        yield


@contextlib.contextmanager
def no_cache() -> Iterator[None]:
    """Have every scored request read its whole prompt."""
    from gkd.inference import vllm_scorer

    with patch.object(vllm_scorer, "CACHED_PART", 2.0):
        yield


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"hidden": 512, "layers": 4, "vocabulary": 8192, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    options.length = LENGTH
    device = installed_device()
    os.environ.update(environment(device, [], os.cpu_count()))
    random = Random(options.vocabulary)

    def prompts(n: int, length: int = PROMPT) -> list[Int32]:
        return [random.ids(length) for _ in range(n)]

    with tempfile.TemporaryDirectory() as path:
        make_model(path, options)
        sampler, scorer, torch_scorer = make_engines(path, device)
        rows: dict[str, tuple[Callable[[], float], Callable[[], float], Any]] = {
            "finished outputs alone": (
                *(lambda: run(sampler, sample_requests(prompts(SEQUENCES, 8), 1, 128)),) * 2,
                every_output,
            ),
            "samples of a prompt in one engine": (
                lambda: run(sampler, sample_requests(prompts(SEQUENCES // 8), 8, 8)),
                lambda: run(sampler, sample_requests(prompts(SEQUENCES), 1, 8)),
                contextlib.nullcontext,
            ),
            "rows as tensors": (
                *(lambda: run(scorer, score_requests(prompts(32, 64), 1, 128, random)),) * 2,
                lists,
            ),
            "the prompt's cache": (
                *(lambda: run(scorer, score_requests(prompts(4), 8, RESPONSE, random)),) * 2,
                no_cache,
            ),
            "prompts once, by torch": (
                *(lambda: run(torch_scorer, score_requests(prompts(4), 8, RESPONSE, random)),) * 2,
                lambda: whole_prompts(torch_scorer),
            ),
            "torch in place of vLLM": (
                lambda: run(torch_scorer, score_requests(prompts(4), 8, RESPONSE, random)),
                lambda: run(scorer, score_requests(prompts(4), 8, RESPONSE, random)),
                contextlib.nullcontext,
            ),
            "the same, of long responses": (
                lambda: run(torch_scorer, score_requests(prompts(16, SHORT_PROMPT), 2, LONG_RESPONSE, random)),
                lambda: run(scorer, score_requests(prompts(16, SHORT_PROMPT), 2, LONG_RESPONSE, random)),
                contextlib.nullcontext,
            ),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
        for round_ in range(-1, options.rounds):
            for name, (with_it, without_it, undone) in rows.items():
                first = with_it() if round_ % 2 else None
                with undone():
                    without = without_it()
                pair = (with_it() if first is None else first, without)
                if round_ >= 0:
                    times[name].append(pair)
        sampler.close()
        scorer.close()
    print(f"{options.layers} layers of {options.hidden}, vocabulary {options.vocabulary}, on {device}; seconds")
    for name, pairs in times.items():
        with_s, without_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        parts = sorted(a / b for a, b in pairs)
        print(
            f"  {name:36}{with_s:8.3f} with, {without_s:8.3f} without: {statistics.median(parts):.2f} "
            f"({parts[0]:.2f} to {parts[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
