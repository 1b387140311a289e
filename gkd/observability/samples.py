"""samples.jsonl: a few prompts and responses of every step, for people to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gkd.cluster.fetch import fetch_samples, places_of
from gkd.observability.metrics import JsonLines
from gkd.types import Record, Scored

FETCH_TIMEOUT_S = 60.0


class SampleLog:
    """Writes the first ``n`` samples of each step; ``decode`` turns response tokens into text."""

    def __init__(self, file: JsonLines, n: int, decode: Callable[[list[int]], str]) -> None:
        self.file, self.n, self.decode = file, n, decode

    def write(self, step: int, records: Sequence[Record]) -> None:
        """Fetch and write samples of a step."""
        first = sorted(records, key=lambda r: (r.prompt_id, r.index))[: self.n]
        for record, scored in zip(first, fetch_samples(places_of(first), FETCH_TIMEOUT_S), strict=True):
            self.file.write({"step": step, **self._row(record, scored)})

    def _row(self, record: Record, scored: Scored) -> dict[str, Any]:
        sample = scored.sample
        row: dict[str, Any] = {
            "prompt": sample.request.prompt.text,
            "response": self.decode(sample.response_ids.tolist()),
            "answer": sample.request.prompt.answer,
            "finish_reason": sample.finish_reason,
            "version": sample.version,
        }
        if record.rewards:
            row["rewards"] = record.rewards
        if not sample.request.own_answer:
            row["logprob_mean"] = float(sample.logprobs.mean())
        if scored.target is not None:
            row["teacher_logprob_mean"] = float(scored.target.token_logprobs.mean())
        return row
