"""A tiny model with a tokenizer, and one vLLM engine for all tests of this folder."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gkd.config import Teacher

VLLM_VOCABULARY, VLLM_LENGTH, CHUNK = 96, 128, 64


@pytest.fixture(scope="package", autouse=True)
def _imported() -> Iterator[None]:
    """Import vLLM, and keep it out of garbage collections: an engine asks for a dozen while it starts and ends."""
    from gkd.cluster.workers.environment import environment
    from gkd.config.device import installed_device

    on_cpu = installed_device() == "cpu"
    if on_cpu:
        os.environ.update(environment("cpu", []))
    import torch
    import vllm  # noqa: F401
    from vllm.model_executor.models import registry

    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        if on_cpu:  # vLLM looks at a new class of models in another process, without CUDA here; that imports it anew
            patch.setattr(registry, "_run_in_subprocess", lambda look: look())
            # An engine puts a function that does nothing in its place, which tests that come later would feel.
            patch.setattr(torch, "set_num_threads", torch.set_num_threads)
        yield


@pytest.fixture(scope="package")
def model(tiny_llama: Path) -> Path:
    """The tiny Llama with a tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(95)} | {"</s>": 95}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tiny_llama)
    return tiny_llama


@pytest.fixture(scope="package")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 96 tokens and 128 positions."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VLLM_VOCABULARY,
        max_position_embeddings=VLLM_LENGTH,
        eos_token_id=2,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("tiny_llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="package")
def vllm_engine(tiny_llama: Path) -> Iterator[Any]:
    """One vLLM engine; prompts longer than 64 tokens are prefilled in chunks, and cached in blocks of 32.

    It is gone before other tests make process groups of their own.
    """
    from gkd.cluster.workers.environment import environment
    from gkd.data.model_info import ModelInfo
    from gkd.inference import vllm_scorer
    from gkd.inference.engine import EngineSpec

    os.environ.update(environment("cpu", []))
    settings = Teacher(max_model_len=VLLM_LENGTH, max_num_seqs=16, max_top_k=VLLM_VOCABULARY)
    model = ModelInfo.read(str(tiny_llama), "teacher.model.path")
    usual = vllm_scorer.engine_arguments
    with pytest.MonkeyPatch.context() as patch:  # on a CPU they are of 128, all that this model has
        patch.setattr(vllm_scorer, "engine_arguments", lambda *a, **more: {**usual(*a, **more), "block_size": 32})
        engine = vllm_scorer.VLLMScorer(
            EngineSpec("teacher", str(tiny_llama), model, settings, "cpu", "float32", max_num_batched_tokens=CHUNK)
        )
    yield engine
    engine.close()
