"""Usual models by size, for planning before one is chosen."""

from __future__ import annotations

from dataclasses import replace

from gkd.planning.families import shape_of
from gkd.planning.shape import ModelShape

# Published shapes: hidden, feed-forward, layers, heads, key-value heads, head size, vocabulary, tied, type.
KNOWN: dict[str, tuple[int, int, int, int, int, int, int, bool, str]] = {
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


def shape_of_size(size: str) -> ModelShape:
    """The published dense model nearest to ``size`` (``1.5b``, ``350m``); its ``note`` says which."""
    wanted = float(size[:-1]) * (1e9 if size[-1] in "bB" else 1e6)
    # By the name's own number: a "7b" has 7.6 billion parameters.
    named = {name: float(name.rsplit("-", 1)[1][:-1]) * 1e9 for name in KNOWN}
    name = min(named, key=lambda n: abs(named[n] / wanted - 1))
    shape = _shape(name)
    return replace(shape, note=f"{size} is taken to be {name}, {shape.n_parameters / 1e9:.2f} billion parameters")


def _shape(name: str) -> ModelShape:
    hidden, width, layers, heads, kv_heads, head_dim, vocabulary, tied, kind = KNOWN[name]
    return shape_of(
        {
            "model_type": kind,
            "hidden_size": hidden,
            "intermediate_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": vocabulary,
            "tie_word_embeddings": tied,
        }
    )
