"""samples.jsonl: a few prompts and responses of every step, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gkd.algorithms.training_samples import rewards_of
from gkd.cluster.workers.group import fetch_samples
from gkd.config import Config
from gkd.observability.metrics import JsonLines, keep_finite
from gkd.observability.tracking import Trackers
from gkd.types import ScoredSample, TrainingSample

FETCH_TIMEOUT_S = 60.0
TOP = 5
"""The teacher's likeliest tokens that are kept of each position."""
DIGITS = 4
"""Decimal places of log-probabilities."""


class SampleLog:
    """Writes ``trainer.n_logged_samples`` of each step, those of the first prompts, group by group.

    ``rewards`` are those of the functions, and ``reward`` is what is learned from, as in ``reward/mean``.
    ``versions`` are those of the weights that sampled a response, stretch by stretch, each with its number of tokens,
    ``version`` is the oldest.
    The first ``trainer.n_logged_tokens`` response tokens have their log-probabilities in a row's ``tokens``:
    ``text`` [T], ``student`` [T], the sampler's, under the distribution that was sampled from; ``teacher`` [T] and
    ``top`` [T, 5] of token and log-probability, at ``algorithm.loss.temperature``. What was not scored is left out.
    """

    def __init__(self, file: JsonLines, config: Config, tokenizer: Any, trackers: Trackers | None = None) -> None:
        self.config, self.trackers, trainer = config, trackers, config.trainer
        self.file, self.n, self.n_tokens = file, trainer.n_logged_samples, trainer.n_logged_tokens
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def write(self, step: int, samples: Sequence[TrainingSample]) -> None:
        """Fetch and write samples of a step."""
        first = sorted(samples, key=lambda sample: (sample.prompt_id, sample.key))[: self.n]
        fetched = fetch_samples(first, FETCH_TIMEOUT_S)
        rows = [{"step": step, **self._row(sample, scored)} for sample, scored in zip(first, fetched, strict=True)]
        for row in rows:
            self.file.keep(row)
        if self.trackers is not None:
            self.trackers.log_samples(step, rows)

    def _row(self, training: TrainingSample, scored: ScoredSample) -> dict[str, Any]:
        sample = scored.sample
        row: dict[str, Any] = {
            "prompt": sample.request.prompt.text,
            "response": self.tokenizer.decode(sample.sampled_ids.tolist(), skip_special_tokens=True),
            "answer": sample.request.prompt.answer,
            "finish_reason": sample.finish_reason,
            "version": training.version,
            "versions": [(span.version, span.stop - span.start) for span in training.versions],
            "prompt_id": training.prompt_id,
            "index": training.index,
            "length": training.n_sampled,
        }
        if training.rewards:
            row["rewards"] = training.rewards
            row |= keep_finite({"reward": rewards_of(self.config, [training])[0]})
        means: dict[str, float] = {}
        if not sample.request.from_dataset:
            means["logprob_mean"] = float(sample.sampled_logprobs.mean())
        if scored.teacher is not None:
            means["teacher_logprob_mean"] = float(scored.teacher.token_logprobs.mean())
        row |= keep_finite(means)
        if self.n_tokens:
            row["tokens"] = self._tokens(scored)
        return row

    def _tokens(self, scored: ScoredSample) -> dict[str, Any]:
        """Return the columns of the first tokens, in the order in which they were sampled."""
        sample, teacher = scored.sample, scored.teacher
        tokens: dict[str, Any] = {"text": self._text(sample.sampled_ids[: self.n_tokens].tolist())}
        if not sample.request.from_dataset:
            tokens["student"] = _round(sample.sampled_logprobs[: self.n_tokens])
        if teacher is not None:
            tokens["teacher"] = _round(teacher.token_logprobs[: self.n_tokens])
            if teacher.ids.shape[1]:
                ids, likely = (part[: self.n_tokens, :TOP] for part in (teacher.ids, teacher.logprobs))
                rows = zip(ids.tolist(), likely, strict=True)
                tokens["top"] = [list(zip(self._text(row), _round(p), strict=True)) for row, p in rows]
        return tokens

    def _text(self, ids: Sequence[int]) -> list[str]:
        """Return what each token stands for; a part of a character is shown as the replacement character."""
        for token in set(ids) - self._texts.keys():
            piece = self.tokenizer.convert_ids_to_tokens(token)
            # SentencePiece's decoder drops the space before a word that it is given alone.
            space = " " if isinstance(piece, str) and piece.startswith("▁") else ""
            self._texts[token] = space + self.tokenizer.decode([token]).removeprefix(space or "\0")
        return [self._texts[token] for token in ids]


def _round(logprobs: np.ndarray[Any, Any]) -> list[float | None]:
    """Return log-probabilities for a file; null where one is no finite number (a token of probability 0)."""
    return [round(float(value), DIGITS) if np.isfinite(value) else None for value in logprobs]
