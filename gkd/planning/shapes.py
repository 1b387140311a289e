"""The shape of a language model: every weight it has, and what one token costs on its way through.

Shapes come from a model's config.json, or from the published ones of usual models by size (gkd.planning.sizes).
Weights are listed as transformers names and lays them out, so that counts agree to the last number; a model of an
unknown type is counted as a decoder like Llama, its weights as its files have them (gkd.planning.stored), and ``note``
names it. Building the model by transformers on torch's meta device would need no formulas, but took 5 to 8 s on two
cores, 1.6 to 2.8 s of them to import torch and 3.2 to 6.1 s to import transformers; a whole plan takes 0.9 s, and works
where neither is installed. tests/planning/test_shapes.py compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from gkd.data.model_info import EXPERTS, longrope_positions
from gkd.planning.states import LARGEST, NO_STATES, States, layer_kinds, read_states
from gkd.planning.windows import NO_WINDOWS, Windows, read_windows

Norm = Literal["rms", "gemma", "layer"]
Mlp = Literal["gated", "gelu_new", "gelu"]
LOGIT_CHANGES = {"final_logit_softcapping", "lm_head_multiplier", "logit_scale", "logits_scaling"}


@dataclass(frozen=True, slots=True)
class Weight:
    """Describes a tensor of ``rows`` (its first axis, which FSDP2 shards) times ``cols`` numbers.

    ``linear``: whether it is the matrix of a linear layer, which an adapter can be put beside. ``share``: the part of
    it that one token is multiplied with, below 1 for experts.
    """

    name: str
    rows: int
    cols: int = 1
    linear: bool = False
    share: float = 1.0

    @property
    def size(self) -> int:
        """Count its numbers."""
        return self.rows * self.cols

    def shard_size(self, world: int) -> int:
        """Count its numbers on the rank that has most, of ``world`` ranks that hold whole rows."""
        return -(-self.rows // world) * self.cols


@dataclass(frozen=True, slots=True)
class Experts:
    """Describes a mixture of experts: how many there are, how many process a token, and how wide each is."""

    count: int
    per_token: int
    width: int


@dataclass(frozen=True, slots=True)
class Layers:
    """Describes ``count`` decoder layers that are alike. ``experts`` is None where the feed-forward part is dense."""

    count: int
    weights: tuple[Weight, ...]
    width: int
    experts: Experts | None = None

    @property
    def size(self) -> int:
        """Count the numbers in one of them."""
        return sum(w.size for w in self.weights)


@dataclass(frozen=True)
class ModelShape:
    """Describes a decoder: its weights, and the widths that activations and the key-value cache follow from.

    ``root`` holds what is in no layer: embeddings, final norm and, unless tied, the head. ``norms`` is the number of
    norms in a layer, ``qk_norm`` whether queries and keys have one too, ``positions`` the longest sequence (None: no
    limit). ``plain_head``: whether logits are left as the head gives them. ``note`` states what was assumed about it,
    ``is_exact`` whether all the same its weights are counted as they are.
    ``latent``: numbers of a token that a layer with latent attention caches instead of keys and values, else 0.
    """

    kind: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    layers: tuple[Layers, ...]
    root: tuple[Weight, ...]
    norm: Norm = "rms"
    norms: int = 2
    qk_norm: bool = False
    mlp: Mlp = "gated"
    positions: int | None = None
    note: str = ""
    is_exact: bool = True
    plain_head: bool = True
    windows: Windows = NO_WINDOWS
    states: States = NO_STATES
    latent: int = 0

    @cached_property
    def n_layers(self) -> int:
        """Count the decoder layers."""
        return sum(kind.count for kind in self.layers)

    @cached_property
    def is_dense(self) -> bool:
        """Whether every token is multiplied with all weights of every layer."""
        return not any(kind.experts for kind in self.layers)

    @cached_property
    def n_root(self) -> int:
        """Count the parameters in no layer."""
        return sum(w.size for w in self.root)

    @cached_property
    def n_parameters(self) -> int:
        """Count all parameters, tied ones once."""
        return self.n_root + sum(kind.count * kind.size for kind in self.layers)

    @cached_property
    def largest_layer(self) -> int:
        """Count the parameters of the largest layer."""
        return max(kind.size for kind in self.layers)

    @cached_property
    def largest_matrix(self) -> int:
        """Count the numbers of the largest tensor of a layer."""
        return max(w.size for kind in self.layers for w in kind.weights)

    @cached_property
    def widest_mlp(self) -> int:
        """Count the activations inside the widest feed-forward part."""
        return max(kind.width for kind in self.layers)

    @cached_property
    def n_active(self) -> float:
        """Count the parameters of the layers' matrices that one token is multiplied with; the head is not included."""
        return sum(kind.count * w.size * w.share for kind in self.layers for w in kind.weights if w.cols > 1)

    @cached_property
    def n_attending(self) -> int:
        """Count the layers that attend to all tokens before."""
        return max(0, self.n_layers - self.windows.n_layers - self.states.n_without_attention)

    def mean_context(self, context: float) -> float:
        """Return how many of ``context`` tokens before it a token attends to, in the mean of all layers."""
        windowed = self.windows.n_layers * min(context, self.windows.tokens)
        return (self.n_attending * context + windowed) / self.n_layers

    @property
    def head(self) -> int:
        """Count the parameters of the head, tied or not."""
        return self.hidden * self.vocabulary

    def shard_size(self, world: int) -> int:
        """Count the parameters on the rank that has most of them, of ``world``."""
        if world not in self._shard_sizes:
            layers = sum(kind.count * sum(w.shard_size(world) for w in kind.weights) for kind in self.layers)
            self._shard_sizes[world] = layers + sum(w.shard_size(world) for w in self.root)
        return self._shard_sizes[world]

    @cached_property
    def _shard_sizes(self) -> dict[int, int]:
        return {}


@dataclass(frozen=True, slots=True)
class Family:
    """Lists in what a family differs from Llama. ``bias`` names the projections that always have one.

    ``defaults``: numbers that a config.json may leave out.
    """

    norm: Norm = "rms"
    norms: int = 2
    qk_norm: bool = False
    bias: tuple[str, ...] = ()
    tied: bool = False
    head_dim: int | None = None
    fused: bool = False
    defaults: Mapping[str, int] = field(default_factory=dict)


GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208}
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
    "gemma3_text": Family(norm="gemma", norms=4, qk_norm=True, tied=True, head_dim=256, defaults=GEMMA3),
    "phi3": Family(fused=True),
}
COUNTS = {
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
    "decoder_sparse_step", "n_embd", "n_inner", "n_layer", "n_head", "n_positions",
}  # fmt: skip
MAY_BE_0 = {
    *EXPERTS, "num_experts_per_tok", "shared_expert_intermediate_size", "n_shared_experts", "first_k_dense_replace",
    "kv_lora_rank", "qk_rope_head_dim",
}  # fmt: skip
OTHER_PARTS = {"vision_config", "audio_config"}
OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "num_attention_groups"),
    "intermediate_size": ("ffn_dim", "ffn_hidden_size", "block_ff_dim", "n_inner"),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "num_experts_per_tok": ("num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"),
}
"""What types that are not known call these numbers."""


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a config.json describes.

    Raises KeyError with the name of a number that is missing, ValueError for one that is none.
    """
    whole = _require_counts(config)
    config = _require_counts(whole.get("text_config") or whole)
    kind = str(config.get("model_type", "llama"))
    if kind == "gpt2":
        return _gpt2(config)
    notes = [] if kind in FAMILIES else [f"model_type {kind} is not known: counted as a decoder like Llama"]
    notes += ["only the language model is counted"] * (not whole.keys().isdisjoint(OTHER_PARTS))
    family = FAMILIES.get(kind)
    defaults = _read_other_names(config) if family is None else family.defaults
    try:
        return _decoder({**defaults, **config}, kind, family or Family(), "; ".join(notes))
    except KeyError as error:
        if kind in FAMILIES:
            raise
        raise ValueError(f"model_type {kind} is not known, and it has no {error.args[0]} as Llama has") from None


def _read_other_names(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers that a config.json has by other names; as many layers as it lists kinds of.

    Raises ValueError for one that is none.
    """
    numbers = {"num_hidden_layers": len(kinds)} if (kinds := layer_kinds(config)) else dict[str, int]()
    for name, others in OTHER_NAMES.items():
        alias = next((other for other in others if other in config), None)
        if alias is not None and name not in config:
            numbers[name] = _require_count(config, alias)
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        numbers["num_key_value_heads"] = 1
    return numbers


def _require_counts(config: Any) -> Mapping[str, Any]:
    """Return the entries of a config.json that are not null, which states of a window alone that there is none.

    Raises ValueError for a count that is none.
    """
    if not isinstance(config, Mapping):
        raise ValueError("it does not describe a model")
    entries = {name: value for name, value in config.items() if value is not None or name == "sliding_window"}
    for name in entries.keys() & (COUNTS | MAY_BE_0):
        _require_count(entries, name)
    return entries


def _require_count(config: Mapping[str, Any], name: str) -> int:
    value = config[name]
    if type(value) is not int or not (name not in MAY_BE_0) <= value < LARGEST:
        raise ValueError(f"{name} is {str(value)[:40]}")
    return value


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
        kind, hidden, heads, kv_heads, head_dim, vocabulary, tied, _layers(config, family, common, n_layers),
        tuple(root), family.norm, family.norms, family.qk_norm, note=note, is_exact=not note,
        plain_head=LOGIT_CHANGES.isdisjoint(config),
        positions=min(filter(None, (config.get("max_position_embeddings"), longrope_positions(config))), default=None),
        windows=read_windows(config, kind, n_layers), states=read_states(config, kind, n_layers),
        latent=config["kv_lora_rank"] + config.get("qk_rope_head_dim", 0) if config.get("kv_lora_rank") else 0,
    )  # fmt: skip


def _attention(config: Mapping[str, Any], family: Family, hidden: int, queries: int, keys: int) -> list[Weight]:
    if family.fused:
        return [
            Weight("self_attn.qkv_proj", queries + 2 * keys, hidden, linear=True),
            Weight("self_attn.o_proj", hidden, queries, linear=True),
        ]
    rows = {"q": queries, "k": keys, "v": keys, "o": hidden}
    biased = set(family.bias) | (set(rows) if config.get("attention_bias") else set())
    weights = []
    for name, n in rows.items():
        weights.append(Weight(f"self_attn.{name}_proj", n, queries if name == "o" else hidden, linear=True))
        if name in biased:
            weights.append(Weight(f"self_attn.{name}_proj.bias", n))
    return weights


def _layers(config: Mapping[str, Any], family: Family, common: list[Weight], n_layers: int) -> tuple[Layers, ...]:
    """List the dense layers and, where the model has any, those with experts."""
    n_experts = next((config[name] for name in EXPERTS if config.get(name)), 0)
    if not n_experts:
        width = config["intermediate_size"]
        return (Layers(n_layers, (*common, *_mlp(config, family, config["hidden_size"], width)), width),)
    step, dense_only = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not (isinstance(dense_only, list) and all(type(layer) is int for layer in dense_only)):
        raise ValueError(f"mlp_only_layers is {str(dense_only)[:40]}")
    first = config.get("first_k_dense_replace", 0)
    sparse = sum(i >= first and i not in dense_only and (i + 1) % step == 0 for i in range(n_layers))
    if not config["num_experts_per_tok"]:
        raise ValueError("num_experts_per_tok is 0")
    experts = Experts(
        n_experts, config["num_experts_per_tok"], config.get("moe_intermediate_size") or config["intermediate_size"]
    )
    layers = []
    if sparse:
        layers = [Layers(sparse, (*common, *_experts(config, experts)), experts.per_token * experts.width, experts)]
    if sparse < n_layers:
        width = config["intermediate_size"]
        mlp = _mlp(config, family, config["hidden_size"], width)
        layers.append(Layers(n_layers - sparse, (*common, *mlp), width))
    return tuple(layers)


def _mlp(config: Mapping[str, Any], family: Family, hidden: int, width: int, prefix: str = "mlp") -> list[Weight]:
    up = (("gate_up_proj", 2 * width),) if family.fused else (("gate_proj", width), ("up_proj", width))
    weights = []
    for name, rows in (*up, ("down_proj", hidden)):
        cols = width if name == "down_proj" else hidden
        weights.append(Weight(f"{prefix}.{name}", rows, cols, linear=True))
        if config.get("mlp_bias"):
            weights.append(Weight(f"{prefix}.{name}.bias", rows))
    return weights


def _experts(config: Mapping[str, Any], experts: Experts) -> list[Weight]:
    """List the router, the experts, and the expert that processes every token, where there is one."""
    hidden, share = config["hidden_size"], experts.per_token / experts.count
    weights = [
        Weight("mlp.gate", experts.count, hidden),
        Weight("mlp.experts.gate_up_proj", experts.count, 2 * experts.width * hidden, share=share),
        Weight("mlp.experts.down_proj", experts.count, experts.width * hidden, share=share),
    ]
    shared = config.get("n_shared_experts", 0) * experts.width
    if width := config.get("shared_expert_intermediate_size") or shared:
        weights += _mlp({}, Family(), hidden, width, "mlp.shared_expert")
        weights.append(Weight("mlp.shared_expert_gate", 1, hidden, linear=True))
    return weights


def _gpt2(config: Mapping[str, Any]) -> ModelShape:
    """Describe GPT-2: learned positions, layer norms and biases everywhere, matrices stored the other way round."""
    hidden, heads, n_layers = config["n_embd"], config["n_head"], config["n_layer"]
    width, vocabulary = config.get("n_inner") or 4 * hidden, config["vocab_size"]
    matrices = {"attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden)}
    matrices |= {"mlp.c_fc": (hidden, width), "mlp.c_proj": (width, hidden)}
    weights = [Weight(name, rows, cols, linear=True) for name, (rows, cols) in matrices.items()]
    weights += [Weight(f"{name}.bias", cols) for name, (_, cols) in matrices.items()]
    weights += [Weight(name, hidden) for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias")]
    tied, n_positions = bool(config.get("tie_word_embeddings", True)), config["n_positions"]
    root = [Weight("wte", vocabulary, hidden), Weight("wpe", n_positions, hidden)]
    root += [Weight("ln_f.weight", hidden), Weight("ln_f.bias", hidden)]
    root += [] if tied else [Weight("lm_head", vocabulary, hidden)]
    mlp: Mlp = "gelu_new" if config.get("activation_function", "gelu_new") == "gelu_new" else "gelu"
    return ModelShape(
        "gpt2", hidden, heads, heads, hidden // heads, vocabulary, tied, (Layers(n_layers, tuple(weights), width),),
        tuple(root), norm="layer", mlp=mlp, positions=n_positions,
    )  # fmt: skip
