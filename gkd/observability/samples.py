"""samples.jsonl: a few prompts and responses of every step, for people to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gkd.cluster.fetch import fetch_samples
from gkd.observability.metrics import JsonLines
from gkd.types import ScoredSample, TrainingSample

FETCH_TIMEOUT_S = 60.0


class SampleLog:
    """Writes the first ``n`` samples of each step; ``decode`` turns response tokens into text."""

    def __init__(self, file: JsonLines, n: int, decode: Callable[[list[int]], str]) -> None:
        self.file, self.n, self.decode = file, n, decode

    def write(self, step: int, samples: Sequence[TrainingSample]) -> None:
        """Fetch and write samples of a step."""
        first = sorted(samples, key=lambda sample: (sample.prompt_id, sample.index))[: self.n]
        for sample, scored in zip(first, fetch_samples(first, FETCH_TIMEOUT_S), strict=True):
            self.file.write({"step": step, **self._row(sample, scored)})

    def _row(self, training: TrainingSample, scored: ScoredSample) -> dict[str, Any]:
        sample = scored.sample
        row: dict[str, Any] = {
            "prompt": sample.request.prompt.text,
            "response": self.decode(sample.sampled_ids.tolist()),
            "answer": sample.request.prompt.answer,
            "finish_reason": sample.finish_reason,
            "version": training.version,
        }
        if training.rewards:
            row["rewards"] = training.rewards
        if not sample.request.own_answer:
            row["logprob_mean"] = float(sample.sampled_logprobs.mean())
        if scored.teacher is not None:
            row["teacher_logprob_mean"] = float(scored.teacher.token_logprobs.mean())
        return row
