"""Rating with a sequence classification model of one output, on transformers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from gkd.config.device import EngineLoad
from gkd.data.tokenizer import check_reward_model
from gkd.inference.decoding import pad
from gkd.inference.engine import EngineSpec, ModuleEngine
from gkd.inference.requests import RateRequest
from gkd.types import Int32


class Classifier(ModuleEngine[RateRequest, float]):
    """Answers requests to rate, ``settings.max_num_seqs`` at a time."""

    can_rate = True

    def __init__(self, spec: EngineSpec) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification

        dtype = getattr(torch, spec.dtype)
        model = AutoModelForSequenceClassification.from_pretrained(spec.model_path, dtype=dtype, local_files_only=True)
        model.config.get_text_config().use_cache = False  # of keys and values: nothing is generated
        self.model, self.device = model.to(spec.device).eval(), spec.device
        longest, positions = spec.settings.max_model_len, spec.model.positions
        self.limits = spec.limits(longest if positions is None else min(longest, positions), rates=True)
        self._waiting: deque[tuple[int, RateRequest]] = deque()

    @classmethod
    def check_model(cls, path: str, setting: str) -> str:
        """Return the directory of a model that classifies sequences, with one output. Raises ConfigError for others."""
        return check_reward_model(path, setting)

    @classmethod
    def memory(cls, load: EngineLoad) -> dict[str, float]:
        """Count a forward pass of as many sequences as run at a time; the head is left out, for one output instead."""
        n_parameters = load.n_parameters - (0 if load.tied else load.head)
        return {
            "weights": float(load.dtype_bytes * n_parameters),
            "activations": float(load.n_sequences * load.longest * load.pass_bytes),
        }

    def add(self, key: int, request: RateRequest) -> None:
        """Queue a request that passed ``limits.check``."""
        self._waiting.append((key, request))

    def has_unfinished_requests(self) -> bool:
        """Return whether requests are unfinished."""
        return bool(self._waiting)

    def step(self) -> Iterator[tuple[int, float]]:
        """Rate everything that waits in one forward pass."""
        batch = list(self._waiting)
        self._waiting.clear()
        values = self.rate([request.token_ids for _, request in batch])
        yield from zip((key for key, _ in batch), values, strict=True)

    def rate(self, sequences: list[Int32]) -> list[float]:
        """Return the model's output for each sequence of token ids [L]."""
        import torch

        padding = self._padding_id(sequences)
        if padding is None and len(sequences) > 1:
            return [value for sequence in sequences for value in self.rate([sequence])]
        ids, mask = pad(sequences, padding or 0, "right")
        # The model finds the last token of each row by the id that pads, so that must be nobody's last token.
        self.model.config.get_text_config().pad_token_id = self.model.config.pad_token_id = padding
        with torch.inference_mode():
            logits = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device)).logits
        values: list[float] = logits[:, 0].float().tolist()
        return values

    def _padding_id(self, sequences: list[Int32]) -> int | None:
        """Find the smallest id that occurs in no sequence; None when all do."""
        used = np.unique(np.concatenate(sequences))
        free = np.setdiff1d(np.arange(min(len(used) + 1, self.limits.vocabulary)), used)
        return int(free[0]) if len(free) else None
