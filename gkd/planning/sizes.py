"""Published shapes of usual dense models, by size: plans of models that are not there."""

from __future__ import annotations

from dataclasses import replace

from gkd.planning.shapes import ModelShape, shape_of

SIZE_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "tie_word_embeddings", "model_type",
)  # fmt: skip
SIZES: dict[str, tuple[int, int, int, int, int, int, int, bool, str]] = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 64, 151936, True, "qwen2"),
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, 128, 151936, True, "qwen3"),
    "Llama-3.2-1B": (2048, 8192, 16, 32, 8, 64, 128256, True, "llama"),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 128, 151936, True, "qwen2"),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 128, 151936, True, "qwen2"),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, 128, 151936, True, "qwen3"),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 128, 152064, False, "qwen2"),
    "Llama-3.1-8B": (4096, 14336, 32, 32, 8, 128, 128256, False, "llama"),
    "Qwen2.5-14B": (5120, 13824, 48, 40, 8, 128, 152064, False, "qwen2"),
    "Qwen2.5-32B": (5120, 27648, 64, 40, 8, 128, 152064, False, "qwen2"),
    "Llama-3.1-70B": (8192, 28672, 80, 64, 8, 128, 128256, False, "llama"),
    "Qwen2.5-72B": (8192, 29568, 80, 64, 8, 128, 152064, False, "qwen2"),
    "Llama-3.1-405B": (16384, 53248, 126, 128, 8, 128, 128256, False, "llama"),
}
"""Published shapes of dense models: :data:`SIZE_FIELDS` of their config.json."""


def shape_of_size(size: str) -> ModelShape:
    """Return the published dense model nearest to ``size`` (``1.5b``, ``350m``); its ``note`` states which that is."""
    n_wanted = float(size[:-1]) * (1e9 if size[-1] in "bB" else 1e6)
    # By the name's own number: a "7b" has 7.6 billion parameters.
    n_named = {name: float(name.rsplit("-", 1)[1][:-1]) * 1e9 for name in SIZES}
    name = min(n_named, key=lambda n: abs(n_named[n] / n_wanted - 1))
    shape = shape_of(dict(zip(SIZE_FIELDS, SIZES[name], strict=True)))
    return replace(shape, note=f"{size} is taken to be {name}, {shape.n_parameters / 1e9:.2f} billion parameters")
