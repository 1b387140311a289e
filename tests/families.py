"""Tiny random models of many families, as small as vLLM's attention on a CPU allows (head size 32)."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

N_TOKENS = 90
"""Ids of prompts; of 96 rows."""
EOS = 1
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "eos_token_id": EOS,
    "bos_token_id": 0,
    "pad_token_id": 2,
}
_HEAD = {"head_dim": 32}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_NO_GROUPS = {"num_key_value_heads": 2}
# Sizes of the real models: vLLM's kernels on a CPU are built for no other.
_LATENT = {
    "num_key_value_heads": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_moe": ("Qwen2Moe", _EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3": ("Qwen3", _HEAD),
    "qwen3_moe": ("Qwen3Moe", _EXPERTS | _HEAD | {"norm_topk_prob": True}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOss",
        _HEAD | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 8},
    ),
    "deepseek_v2": ("DeepseekV2", _LATENT | {"q_lora_rank": 32, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3", _LATENT | {"q_lora_rank": 32, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
    "gemma": ("Gemma", _HEAD),
    "gemma2": ("Gemma2", _HEAD | {"query_pre_attn_scalar": 32, "sliding_window": 8}),
    "gemma3": ("Gemma3", _HEAD | {"query_pre_attn_scalar": 32, "sliding_window": 8}),
    # Layers of two head sizes, embeddings of their own, and the last ones share keys and values.
    "gemma4": (
        "Gemma4",
        _HEAD | {"global_head_dim": 64, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 8,
                 "layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 5.0,
                 "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96},
    ),
    "llama4": (
        "Llama4",
        _HEAD | {"intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1,
                 "interleave_moe_layer_step": 2, "attention_chunk_size": 128, "no_rope_layer_interval": 2},
    ),
    "doge": ("Doge", {"keep_window_size": 4}),
    "phi": ("Phi", _NO_GROUPS),
    "phi3": ("Phi3", {}),
    "phimoe": ("Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "olmo": ("Olmo", {}),
    "olmo2": ("Olmo2", {}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}),
    "granite": ("Granite", {"logits_scaling": 4.0, "attention_multiplier": 0.1, "residual_multiplier": 0.5}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 4.0}),
    "nemotron": ("Nemotron", _HEAD),
    "starcoder2": ("Starcoder2", {}),
    "stablelm": ("StableLm", {}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128}),
    "gpt_neox": ("GPTNeoX", _NO_GROUPS),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "falcon": ("Falcon", {"new_decoder_architecture": False, "multi_query": True, "alibi": False}),
    "glm": ("Glm", _HEAD),
    "glm4": ("Glm4", _HEAD),
    "glm4_moe": ("Glm4Moe", _HEAD | {k: _LATENT[k] for k in ("moe_intermediate_size", "n_routed_experts",
        "num_experts_per_tok", "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace")}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    # vLLM's windows of this family are larger by one than those of transformers; no sequence here gets as far.
    "cohere2": ("Cohere2", {"logit_scale": 0.25, "sliding_window": 127}),
    "smollm3": ("SmolLM3", {}),
    "exaone4": ("Exaone4", {"sliding_window": 8, "sliding_window_pattern": 2}),
    "helium": ("Helium", _HEAD),
    "seed_oss": ("SeedOss", _HEAD),
    "ernie4_5": ("Ernie4_5", _HEAD),
    "ernie4_5_moe": ("Ernie4_5_Moe", _HEAD | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}),
    "hunyuan": ("HunYuanDenseV1", _HEAD),
    "hunyuan_moe": ("HunYuanMoEV1", _HEAD | {"num_experts": 4, "moe_topk": 2}),
    "arcee": ("Arcee", {}),
    "apertus": ("Apertus", {}),
    "minimax_m2": ("MiniMaxM2", _HEAD | {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 16,
        "scoring_func": "sigmoid", "use_routing_bias": True}),
    "hyperclovax": ("HyperCLOVAX", {"logits_scaling": 0.25}),
    # With a state beside or instead of attention.
    "mamba": ("Mamba", {"intermediate_size": 128, "state_size": 16, "expand": 2}),
    "mamba2": (
        "Mamba2",
        {"intermediate_size": 128, "state_size": 16, "expand": 2, "num_heads": 4, "head_dim": 32, "n_groups": 1},
    ),
    "falcon_h1": (
        "FalconH1",
        _HEAD | {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1,
                 "lm_head_multiplier": 0.25, "embedding_multiplier": 2.0},
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "conv_dim": 64,
        "block_dim": 64, "block_ff_dim": 96}),
    "qwen3_5": (
        "Qwen3_5",
        _HEAD | {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 32,
                 "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 2},
    ),
    "qwen3_next": (
        "Qwen3Next",
        _HEAD | _EXPERTS | {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 32,
                 "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
                 "shared_expert_intermediate_size": 32},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {"layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2, "mamba_n_heads": 4,
         "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "shared_intermediate_size": 32,
         "logits_scaling": 4.0},
    ),
}  # fmt: skip

STATEFUL = ("mamba", "mamba2", "falcon_h1", "lfm2", "qwen3_5", "qwen3_next", "granitemoehybrid")
"""Those with a state beside or instead of attention."""

_RECURRENT = ("A_log", "conv1d.weight", "conv.conv.weight")


def make(family: str, seed: int, apart: bool = False) -> PreTrainedModel:
    """A model in float32, whose weights are strong enough for predictions that are far from uniform.

    ``apart``: of a class of its own, that stays as it is when vLLM changes that of transformers to run the model by it.
    """
    torch.manual_seed(seed)
    name, config = FAMILIES[family][0], config_of(family)
    config._attn_implementation = "eager"  # the one that every family has, soft caps and sinks included
    cls = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    model: PreTrainedModel = (_apart(cls) if apart else cls)(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and not name.endswith(_RECURRENT):
                parameter.mul_(5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def config_of(family: str) -> Any:
    """The configuration of a family's model."""
    name, values = FAMILIES[family]
    kind = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    return kind(**SHAPE | values)


def _apart(cls: type) -> Any:
    name = f"{cls.__module__}_apart"
    if name not in sys.modules:
        file = sys.modules[cls.__module__].__file__
        assert file is not None
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return getattr(sys.modules[name], cls.__name__)
