"""Tiny random models and samples for the actor's tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from gkd.types import Prompt, Sample, SampleRequest, Sampling, ScoredSample, Target, TrainingSample
from tests.samples import training_sample

VOCAB = 40
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
GPT2_SHAPE = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64, "bos_token_id": 0,
    "eos_token_id": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8
}  # fmt: skip
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen2 tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "mistral sliding window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)),
    # Positions are learned, so that it feels where a sequence begins.
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SHAPE)),
    # With layers that are given rows: for soft caps, for sinks beside a window, and for a state beside attention.
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, sliding_window=4, query_pre_attn_scalar=8)),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SHAPE, sliding_window=4, num_local_experts=4, num_experts_per_tok=2, rope_parameters=_ROPE)
    ),
    "qwen3_5": lambda: Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(**SHAPE, **_LINEAR, layer_types=["linear_attention", "full_attention"])
    ),
}
IN_ROWS = ("gemma2", "gpt_oss", "qwen3_5")


def make(family: str, seed: int = 0) -> PreTrainedModel:
    """A model of a family with weights large enough that its predictions are far from uniform."""
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.fill_(-2)  # a state that lasts
            else:
                parameter.mul_(3)
    return model.float()


def scored(n: int, k: int = VOCAB, seed: int = 0, lengths: tuple[int, int] = (1, 12)) -> list[ScoredSample]:
    """Samples of different lengths (the responses' from one of ``lengths`` to below the other), k targets a token."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(n):
        p, r = int(rng.integers(1, 9)), int(rng.integers(*lengths))
        logits = rng.normal(size=(r, VOCAB)).astype(np.float32)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        ids = np.argsort(-logprobs, -1)[:, :k].astype(np.int32)
        response = rng.integers(2, VOCAB, r).astype(np.int32)
        rest = np.exp(logprobs)
        np.put_along_axis(rest, ids, 0.0, 1)
        target = Target(
            np.take_along_axis(logprobs, response[:, None], 1)[:, 0],
            ids,
            np.take_along_axis(logprobs, ids, 1),
            tail_logprobs=np.log(rest.sum(1)) if k < VOCAB else None,
        )
        prompt = Prompt(i, rng.integers(2, VOCAB, p).astype(np.int32), "")
        sampler = -rng.random(r).astype(np.float32)
        request = SampleRequest(prompt, 0, i, Sampling(12))
        samples.append(ScoredSample(Sample.single_turn(request, response, sampler, 0, "stop"), target))
    return samples


def group(n: int, n_prompt: int, k: int = VOCAB, seed: int = 0) -> list[ScoredSample]:
    """Samples of one prompt, k targets a token."""
    rng = np.random.default_rng(seed)
    prompt = Prompt(100 + seed, rng.integers(2, VOCAB, n_prompt).astype(np.int32), "")
    samples = []
    for i, one in enumerate(scored(n, k, seed=seed + 1)):
        sample = one.sample
        request = replace(sample.request, prompt=prompt, index=i)
        again = Sample.single_turn(request, sample.sampled_ids, sample.sampled_logprobs, 0, "stop")
        samples.append(replace(one, sample=again))
    return samples


def on_driver(ref: object, slot: int, scored: ScoredSample, advantage: float = 0.0) -> TrainingSample:
    """What the driver has of a sample that lies in an object store."""
    n = len(scored.sample.sampled_ids)
    prompt = scored.sample.request.prompt
    return training_sample(
        prompt_id=prompt.id, n_prompt=len(prompt.token_ids), n=n, ref=ref, slot=slot, advantage=advantage
    )
