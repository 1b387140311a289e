"""What a model directory states of the model, without loading it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gkd.errors import ConfigError, one_line

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configurations call the number of a layer's experts."""

PIECES, PIECE_BYTES = 64, 4096
"""What is read of a file of weights to know it again: so many pieces of so many bytes, all of a file up to 256 KiB."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A causal language model as its configuration describes it.

    ``vocabulary``: rows of logits, padding included. ``positions``: the longest sequence in tokens, None for no limit.
    ``eos_ids``: tokens that end a response, of the model, its generation settings and its tokenizer together, without
    those that have no row, such as the end token that transformers gives every tokenizer of Qwen2's class.
    ``n_tokens``: ids the tokenizer has, 0 without one; rows from there on are padding. ``stateful``: some layers keep
    a state beside or instead of keys and values. ``rope_positions``: the longest sequence beside which another token
    leaves LongRoPE the frequencies of short ones, None with other encodings of positions.
    """

    vocabulary: int
    positions: int | None
    eos_ids: list[int]
    n_tokens: int
    stateful: bool = False
    rope_positions: int | None = None

    @property
    def n_unsampled(self) -> int:
        """Rows of logits that are never sampled, as they have no token."""
        return max(0, self.vocabulary - self.n_tokens) if self.n_tokens else 0

    @staticmethod
    def read(path: str, setting: str, tokenizer: Any = None) -> ModelInfo:
        """Read the configuration in ``path``, a directory or the name of a locally cached model.

        ``tokenizer`` is the model's, where there is one. Raises ConfigError, naming ``setting``, when there is no
        model. (:func:`gkd.data.tokenizer.check_causal_lm` looks closer.)
        """
        from transformers import AutoConfig, GenerationConfig

        name = f"{setting}={path}"
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            text = config.get_text_config()
            ends = [getattr(source, "eos_token_id", None) for source in (config, text)]  # composite ones may lack it
            n_rows = text.vocab_size
        except Exception as error:  # transformers raises whatever it meets in the file
            raise ConfigError(f"{name}: no model can be read there ({one_line(error)})") from None
        try:
            generation = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
        except OSError:  # there is no generation_config.json
            generation = None
        except Exception as error:  # transformers raises whatever it meets in it
            raise ConfigError(f"{name}: its generation_config.json cannot be read: {one_line(error)}") from None
        ends += [generation, getattr(tokenizer, "eos_token_id", None)]
        n_tokens = 0 if tokenizer is None else max(tokenizer.get_vocab().values()) + 1
        vocabulary = _count(n_rows, f"{name}: vocab_size")
        eos = {i for end in ends for i in _ids(end, f"{name}: eos_token_id") if i < vocabulary}
        positions = getattr(text, "max_position_embeddings", None)
        if positions is not None:
            positions = _count(positions, f"{name}: max_position_embeddings")
        rope = longrope_positions(text.to_dict())
        return ModelInfo(vocabulary, positions, sorted(eos), n_tokens, _is_stateful(text), rope)


def _ids(value: Any, what: str) -> list[int]:
    """Return ids of a setting that has one, several or none. Raises ConfigError, naming ``what``, for other things."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise ConfigError(f"{what} is {value!r}; a token's number, or a list of numbers, is expected")
    return [i for i in ids if i >= 0]  # below 0 is written for none


def _count(value: Any, what: str) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{what} is {value!r}; a number above 0 is expected")
    return value


def _is_stateful(text: Any) -> bool:
    """Return whether there are layers with a memory of earlier tokens other than attention's keys and values."""
    stateless = {"moe", "mlp"}
    kinds = set(getattr(text, "layer_types", None) or ()) - stateless
    return any(not kind.endswith("attention") or kind == "linear_attention" for kind in kinds)


def longrope_positions(config: Mapping[str, Any]) -> int | None:
    """Return the length that ModelInfo has of LongRoPE, of all kinds of layers the shortest.

    ``config``: the entries of a config.json, as this version of transformers or an earlier one writes it.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return None
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, Mapping))]
    name = "original_max_position_embeddings"
    long = [kind for kind in kinds if (kind.get("rope_type") or kind.get("type")) == "longrope"]
    ends = [config.get(name) or kind.get(name) for kind in long]  # as transformers has it
    return min((end - 1 for end in ends if isinstance(end, int) and end > 1), default=None)


def has_experts(config: Any) -> bool:
    """Return whether a model's feed-forward parts are mixtures of experts."""
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in EXPERTS)


def fingerprint_weights(directory: str) -> str:
    """Return 16 hexadecimal digits that a model's weights are known by, wherever the directory is.

    Of a large file its length and pieces that lie evenly over it are read: of 70 billion parameters in 30 files 8 MB.
    Weights that were trained further differ in these, as training changes some numbers of nearly every piece.
    """
    digest = hashlib.sha256()
    with ThreadPoolExecutor(8) as threads:
        for part in threads.map(_digest_pieces, sorted(Path(directory).glob("*.safetensors"))):
            digest.update(part)
    return digest.hexdigest()[:16]


def _digest_pieces(file: Path) -> bytes:
    size = file.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8))
    with file.open("rb", buffering=0) as opened:
        for piece in range(PIECES):
            opened.seek(size * piece // PIECES)
            digest.update(opened.read(PIECE_BYTES))
    return digest.digest()
