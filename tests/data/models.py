"""Tiny tokenizers and models for tests of the data room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
WORDS = ("<unk>", "<eos>", "<user>", "<system>", "<assistant>", "a", "b", "c", "d")


def word_tokenizer(words: tuple[str, ...] = WORDS, eos: str = "<eos>", template: str | None = None) -> Any:
    """One token a word; ids in the order of ``words``."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token=eos, chat_template=template)


def save_model(directory: Path, vocab_size: int = len(WORDS), tokenizer: Any = None) -> Path:
    """A one-layer causal language model with its tokenizer."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    (tokenizer or word_tokenizer()).save_pretrained(directory)
    return directory


def save_reward_model(directory: Path) -> tuple[Any, Any]:
    """Save a small model that rates texts of digits, with words of its own; returns it and its tokenizer."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tokenizer = word_tokenizer(words=("<unk>", "<eos>", "=", *map(str, range(10))))
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForSequenceClassification(LlamaConfig(**shape, vocab_size=13, num_labels=1)).eval()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model, tokenizer
