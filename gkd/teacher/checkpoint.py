"""What a model directory says of the model, without loading it."""

from __future__ import annotations

from dataclasses import dataclass

from gkd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``vocabulary``: rows of logits, padding included. ``eos_ids``: tokens that end a response."""

    vocabulary: int
    eos_ids: list[int]

    @staticmethod
    def read(path: str) -> Checkpoint:
        """Read the configuration in ``path``, a directory or the name of a locally cached model.

        Raises ConfigError when there is none. (data.tokenizer.check_causal_lm looks closer.)
        """
        from transformers import AutoConfig, GenerationConfig

        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"teacher.model.path={path}: no model can be read there ({reason[:200]})") from None
        text = config.get_text_config()
        try:
            eos = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
        except OSError:  # there is no generation_config.json
            eos = None
        eos = text.eos_token_id if eos is None else eos
        return Checkpoint(text.vocab_size, [eos] if isinstance(eos, int) else list(eos or []))
