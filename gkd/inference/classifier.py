"""An engine that rates: a sequence classification model with one output, on transformers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from gkd.config import RewardModel
from gkd.data.model_info import ModelInfo
from gkd.inference.vllm_engine import Device
from gkd.scoring.requests import Answer, Limits, Rate, Refused, Request
from gkd.types import Int32


class ClassifierEngine:
    """Answers requests to rate, ``settings.max_num_seqs`` at a time; an engine as in requests.Engine."""

    def __init__(self, path: str, settings: RewardModel, device: Device, dtype: torch.dtype) -> None:
        checkpoint = ModelInfo.read(path, "reward_model.model.path")
        model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, local_files_only=True)
        model.config.get_text_config().use_cache = False  # of keys and values: nothing is generated
        self.model, self.device = model.to(device).eval(), device
        longest = settings.max_model_len
        self.limits = Limits(
            model=path,
            vocabulary=checkpoint.vocabulary,
            max_top_k=0,
            max_length=longest if checkpoint.positions is None else min(longest, checkpoint.positions),
            capacity=settings.max_num_seqs,
            rates=True,
        )
        self._waiting: deque[tuple[int, Rate]] = deque()

    def add(self, key: int, request: Request) -> None:
        """Take on a request that passed ``limits.check``."""
        assert isinstance(request, Rate), "limits.check lets nothing else through"
        self._waiting.append((key, request))

    def busy(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self._waiting)

    def step(self) -> Iterator[tuple[int, Answer | Refused]]:
        """Rate everything that waits in one forward pass."""
        batch = list(self._waiting)
        self._waiting.clear()
        values = self.rate([request.token_ids for _, request in batch])
        yield from zip((key for key, _ in batch), values, strict=True)

    def sleep(self) -> None:
        """Move the model to the host."""
        self.model.to("cpu")
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move it back."""
        self.model.to(self.device)

    def close(self) -> None:
        """Nothing outlives this process."""

    @torch.inference_mode()
    def rate(self, sequences: list[Int32]) -> list[float]:
        """The model's output for each sequence of token ids [L]."""
        padding = self._unused(sequences)
        if padding is None and len(sequences) > 1:
            return [value for sequence in sequences for value in self.rate([sequence])]
        longest = max(map(len, sequences))
        ids = torch.full((len(sequences), longest), padding or 0)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.from_numpy(sequence.astype(np.int64))
            mask[row, : len(sequence)] = 1
        # The model finds the last token of each row by the id that pads, so that must be nobody's last token.
        self.model.config.get_text_config().pad_token_id = self.model.config.pad_token_id = padding
        logits = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device)).logits
        values: list[float] = logits[:, 0].float().tolist()
        return values

    def _unused(self, sequences: list[Int32]) -> int | None:
        """The smallest id that occurs in no sequence, None when all do."""
        used = np.unique(np.concatenate(sequences))
        free = np.setdiff1d(np.arange(min(len(used) + 1, self.limits.vocabulary)), used)
        return int(free[0]) if len(free) else None
