"""From a model's config.json to its shape, without transformers.

Weights are listed as transformers names and lays them out, so that counts agree to the last number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gkd.config import user_path
from gkd.errors import ConfigError
from gkd.planning.shape import Experts, Layers, Mlp, ModelShape, Norm, Weight


@dataclass(frozen=True, slots=True)
class Family:
    """In what a family differs from Llama. ``bias`` names the projections that always have one."""

    norm: Norm = "rms"
    norms: int = 2
    qk_norm: bool = False
    bias: tuple[str, ...] = ()
    tied: bool = False
    head_dim: int | None = None
    fused: bool = False
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Numbers that a config.json may leave out."""


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
COUNTS = {
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "num_experts_per_tok",
    "decoder_sparse_step", "n_embd", "n_inner", "n_layer", "n_head", "n_positions",
}  # fmt: skip
MAY_BE_0 = {*EXPERTS, "shared_expert_intermediate_size", "n_shared_experts", "first_k_dense_replace"}
OTHER_PARTS = {"vision_config", "audio_config"}
LARGEST = 1 << 40  # far beyond any model


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "qwen2": Family(bias=("q", "k", "v")),
    "qwen2_moe": Family(bias=("q", "k", "v")),
    "qwen3": Family(qk_norm=True, head_dim=128),
    "qwen3_moe": Family(qk_norm=True),
    "gemma": Family(norm="gemma", tied=True, head_dim=256),
    "gemma2": Family(norm="gemma", norms=4, tied=True, head_dim=256),
    "gemma3_text": Family(
        norm="gemma",
        norms=4,
        qk_norm=True,
        tied=True,
        head_dim=256,
        defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
    ),
    "phi3": Family(fused=True),
}


def read_shape(path: str, setting: str) -> ModelShape:
    """The shape of the model in ``path``, a directory or the name of a locally cached model.

    Raises ConfigError, naming ``setting``, where there is no config.json or a number is missing or wrong in it.
    """
    file = _config_file(path, setting)
    try:
        return shape_of(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{setting}={path}: config.json cannot be read: {error}") from None
    except KeyError as error:
        raise ConfigError(f"{setting}={path}: config.json has no {error.args[0]}") from None


def _config_file(path: str, setting: str) -> Path:
    directory = user_path(path)
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ConfigError(f"{setting}={path}: there is no config.json in it")
        return directory / "config.json"
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        cached = None
    if not isinstance(cached, str):
        raise ConfigError(f"{setting}={path}: no such directory, and no model of that name in the local cache")
    return Path(cached)


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a config.json describes.

    Raises KeyError with the name of a number that is missing, ValueError for one that is none.
    """
    whole = _checked(config)
    config = _checked(whole.get("text_config") or whole)
    kind = str(config.get("model_type", "llama"))
    if kind == "gpt2":
        return _gpt2(config)
    notes = [] if kind in FAMILIES else [f"model_type {kind} is not known: counted as a decoder like Llama"]
    notes += ["only the language model is counted"] * (not whole.keys().isdisjoint(OTHER_PARTS))
    family = FAMILIES.get(kind, Family())
    try:
        return _decoder({**family.defaults, **config}, kind, family, "; ".join(notes))
    except KeyError as error:
        if kind in FAMILIES:
            raise
        raise ValueError(f"model_type {kind} is not known, and it has no {error.args[0]} as Llama has") from None


def _checked(config: Any) -> Mapping[str, Any]:
    """What a config.json says, without what it leaves open (null)."""
    if not isinstance(config, Mapping):
        raise ValueError("it does not describe a model")
    told = {name: value for name, value in config.items() if value is not None}
    for name in told.keys() & (COUNTS | MAY_BE_0):
        value = told[name]
        if type(value) is not int or not (name not in MAY_BE_0) <= value < LARGEST:
            raise ValueError(f"{name} is {str(value)[:40]}")
    return told


def _decoder(config: Mapping[str, Any], kind: str, family: Family, note: str) -> ModelShape:
    hidden, heads, n_layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or family.head_dim or hidden // heads
    if not head_dim:
        raise ValueError(f"hidden_size {hidden} is less than num_attention_heads {heads}")
    vocabulary = config["vocab_size"]
    tied = bool(config.get("tie_word_embeddings", family.tied))
    norm_names = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward"]
    common = [
        *_attention(config, family, hidden, heads * head_dim, kv_heads * head_dim),
        *(Weight(name, hidden) for name in norm_names[: family.norms]),
        *([Weight("q_norm", head_dim), Weight("k_norm", head_dim)] if family.qk_norm else []),
    ]
    root = [Weight("embed_tokens", vocabulary, hidden), Weight("norm", hidden)]
    if not tied:
        root.append(Weight("lm_head", vocabulary, hidden))
    return ModelShape(
        kind=kind,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        tied=tied,
        layers=_layers(config, family, common, n_layers),
        root=tuple(root),
        norm=family.norm,
        norms=family.norms,
        qk_norm=family.qk_norm,
        positions=config.get("max_position_embeddings"),
        note=note,
    )


def _attention(config: Mapping[str, Any], family: Family, hidden: int, queries: int, keys: int) -> list[Weight]:
    if family.fused:
        return [
            Weight("self_attn.qkv_proj", queries + 2 * keys, hidden, linear=True),
            Weight("self_attn.o_proj", hidden, queries, linear=True),
        ]
    rows = {"q": queries, "k": keys, "v": keys, "o": hidden}
    biased = set(family.bias) | (set(rows) if config.get("attention_bias") else set())
    found = []
    for name, n in rows.items():
        found.append(Weight(f"self_attn.{name}_proj", n, queries if name == "o" else hidden, linear=True))
        if name in biased:
            found.append(Weight(f"self_attn.{name}_proj.bias", n))
    return found


def _layers(config: Mapping[str, Any], family: Family, common: list[Weight], n_layers: int) -> tuple[Layers, ...]:
    """Dense layers and, where the model has any, those with experts."""
    n_experts = next((config[name] for name in EXPERTS if config.get(name)), 0)
    if not n_experts:
        width = config["intermediate_size"]
        return (Layers(n_layers, (*common, *_mlp(config, family, config["hidden_size"], width)), width),)
    step, dense_only = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or ())
    first = config.get("first_k_dense_replace", 0)
    sparse = sum(i >= first and i not in dense_only and (i + 1) % step == 0 for i in range(n_layers))
    experts = Experts(
        n_experts, config["num_experts_per_tok"], config.get("moe_intermediate_size") or config["intermediate_size"]
    )
    found = []
    if sparse:
        found = [Layers(sparse, (*common, *_experts(config, experts)), experts.per_token * experts.width, experts)]
    if sparse < n_layers:
        width = config["intermediate_size"]
        mlp = _mlp(config, family, config["hidden_size"], width)
        found.append(Layers(n_layers - sparse, (*common, *mlp), width))
    return tuple(found)


def _mlp(config: Mapping[str, Any], family: Family, hidden: int, width: int, prefix: str = "mlp") -> list[Weight]:
    up = (("gate_up_proj", 2 * width),) if family.fused else (("gate_proj", width), ("up_proj", width))
    found = []
    for name, rows in (*up, ("down_proj", hidden)):
        cols = width if name == "down_proj" else hidden
        found.append(Weight(f"{prefix}.{name}", rows, cols, linear=True))
        if config.get("mlp_bias"):
            found.append(Weight(f"{prefix}.{name}.bias", rows))
    return found


def _experts(config: Mapping[str, Any], experts: Experts) -> list[Weight]:
    """Router, experts, and the expert that every token goes to, where there is one."""
    hidden, share = config["hidden_size"], experts.per_token / experts.count
    found = [
        Weight("mlp.gate", experts.count, hidden),
        Weight("mlp.experts.gate_up_proj", experts.count, 2 * experts.width * hidden, share=share),
        Weight("mlp.experts.down_proj", experts.count, experts.width * hidden, share=share),
    ]
    shared = config.get("n_shared_experts", 0) * experts.width
    if width := config.get("shared_expert_intermediate_size") or shared:
        found += _mlp({}, Family(), hidden, width, "mlp.shared_expert")
        found.append(Weight("mlp.shared_expert_gate", 1, hidden, linear=True))
    return found


def _gpt2(config: Mapping[str, Any]) -> ModelShape:
    """GPT-2: learned positions, layer norms and biases everywhere, matrices stored the other way round."""
    hidden, heads, n_layers = config["n_embd"], config["n_head"], config["n_layer"]
    width, vocabulary = config.get("n_inner") or 4 * hidden, config["vocab_size"]
    matrices = {"attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden)}
    matrices |= {"mlp.c_fc": (hidden, width), "mlp.c_proj": (width, hidden)}
    weights = [Weight(name, rows, cols, linear=True) for name, (rows, cols) in matrices.items()]
    weights += [Weight(f"{name}.bias", cols) for name, (_, cols) in matrices.items()]
    weights += [Weight(name, hidden) for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias")]
    tied = bool(config.get("tie_word_embeddings", True))
    root = [
        Weight("wte", vocabulary, hidden),
        Weight("wpe", config["n_positions"], hidden),
        Weight("ln_f.weight", hidden),
        Weight("ln_f.bias", hidden),
    ]
    mlp: Mlp = "gelu_new" if config.get("activation_function", "gelu_new") == "gelu_new" else "gelu"
    return ModelShape(
        kind="gpt2",
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocabulary=vocabulary,
        tied=tied,
        layers=(Layers(n_layers, tuple(weights), width),),
        root=tuple(root if tied else [*root, Weight("lm_head", vocabulary, hidden)]),
        norm="layer",
        mlp=mlp,
        positions=config["n_positions"],
    )
