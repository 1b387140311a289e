"""Requests to engines that score or rate, and what such an engine can answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from gkd.config.sampling import MAX_TEMPERATURE, MIN_TEMPERATURE
from gkd.errors import RunFailed
from gkd.types import Int32, Spans, Target

ErrorCode = Literal[
    "bad_request", "too_long", "out_of_vocabulary", "k_too_large", "expired", "engine", "busy", "stopping",
    "not_greeted",
]  # fmt: skip
SAMPLE_CODES: frozenset[ErrorCode] = frozenset({"bad_request", "too_long", "out_of_vocabulary", "k_too_large"})
"""Codes that concern the sample; another replica would answer the same."""


class ScorerUnavailable(RunFailed):
    """No replica of a scorer answered a request in the time and the number of attempts it had."""


class ScorerRejected(RunFailed):
    """A ``scorer``, by name, cannot answer a request, whichever replica it goes to; ``code`` states why."""

    def __init__(self, code: ErrorCode, message: str, scorer: str) -> None:
        super().__init__(code, message, scorer)
        self.code, self.message, self.scorer = code, message, scorer

    def __str__(self) -> str:
        return f"the {self.scorer} rejected a sample ({self.code}): {self.message}"


class RequestRejected(Exception):
    """On the server's side: a request that is answered with an error."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Request the log-probabilities of the tokens of ``token_ids`` [L] at the N positions in ``spans``.

    Each is that of the token at its position, after all before it. ``top_k``: how many of the most likely tokens at
    each position come with them; 0 is none, any number past the vocabulary all. All are of
    softmax(logits / ``temperature``).
    ``vocabulary``: ids from there on are left out and the rest normalised, so that a student with fewer (padded) rows
    than the scorer never gets an id that it does not have; None: the scorer's own vocabulary.
    """

    token_ids: Int32
    spans: Spans
    top_k: int
    temperature: float = 1.0
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        if self.top_k < 0 or not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"top_k={self.top_k} and temperature={self.temperature}: expected 0 or more, and a number from "
                f"{MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
            )

    @property
    def n_positions(self) -> int:
        """N, positions that are scored."""
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Request the greedy continuation of ``prompt_ids`` [P]: at most ``max_tokens``, its end token included."""

    prompt_ids: Int32
    max_tokens: int


@dataclass(frozen=True, slots=True)
class RateRequest:
    """Request a reward model's reward of ``token_ids`` [L]: a prompt with its response, in that model's tokens."""

    token_ids: Int32


Request: TypeAlias = ScoreRequest | GenerateRequest | RateRequest
ScorerAnswer: TypeAlias = Target | Int32 | float
"""To a ScoreRequest, a GenerateRequest, a RateRequest."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an engine's answers: ``vocabulary`` rows of logits, the largest K, the longest sequence in tokens.

    ``scorer`` names it, as in :class:`gkd.inference.engine.EngineSpec`; ``model`` is what it loaded.
    ``capacity`` is the number of requests it works on at the same time. ``rates``: a reward model, which answers
    :class:`RateRequest` and nothing else.
    """

    scorer: str
    model: str
    vocabulary: int
    max_top_k: int
    max_length: int
    capacity: int
    rates: bool = False

    def width(self, request: ScoreRequest) -> int:
        """Return K of the reply."""
        return min(request.top_k, self.rows(request))

    def rows(self, request: ScoreRequest) -> int:
        """Return tokens that ``request`` leaves possible."""
        return min(self.vocabulary, request.vocabulary or self.vocabulary)

    def check(self, request: Request) -> None:
        """Raise :class:`RequestRejected` unless this engine can answer ``request``."""
        if isinstance(request, RateRequest) != self.rates:
            raise RequestRejected("bad_request", f"{self.model} is {'a' if self.rates else 'no'} reward model")
        if isinstance(request, ScoreRequest):
            self._check_score(request)
            return
        if isinstance(request, RateRequest):
            if not len(request.token_ids):
                raise RequestRejected("bad_request", "there is nothing to rate")
            self._check_length(len(request.token_ids), "prompt and response have")
            self._check_ids(request.token_ids, self.vocabulary)
            return
        if not len(request.prompt_ids):
            raise RequestRejected("bad_request", "the prompt is empty")
        self._check_length(len(request.prompt_ids) + request.max_tokens, "prompt and wanted response have")
        self._check_ids(request.prompt_ids, self.vocabulary)

    def _check_score(self, request: ScoreRequest) -> None:
        self._check_spans(request.spans, len(request.token_ids))
        self._check_length(len(request.token_ids), "prompt and response have")
        if (k := self.width(request)) > self.max_top_k:
            setting = f"{self.scorer.partition(':')[0]}.max_top_k"
            raise RequestRejected("k_too_large", f"K={k}, and this model gives at most {self.max_top_k} ({setting})")
        self._check_ids(request.token_ids, self.rows(request))

    @staticmethod
    def _check_spans(spans: Spans, length: int) -> None:
        if not spans:
            raise RequestRejected("bad_request", "no position is to be scored")
        end = 0
        for start, stop in spans:
            # The first token has nothing before it that predicts it; spans that touch would be one.
            if not end < start < stop <= length:
                raise RequestRejected(
                    "bad_request",
                    f"positions {start} to {stop} of {length} tokens after {end}: spans have at least one position, "
                    "begin after the first token, and stand in order and apart",
                )
            end = stop

    def _check_length(self, length: int, what: str) -> None:
        if length > self.max_length:
            raise RequestRejected("too_long", f"{what} {length} tokens, and this model takes at most {self.max_length}")

    @staticmethod
    def _check_ids(ids: Int32, rows: int) -> None:
        outside = (ids < 0) | (ids >= rows)
        if outside.any():
            at = int(np.argmax(outside))
            raise RequestRejected("out_of_vocabulary", f"token {ids[at]} at position {at}: the vocabulary has {rows}")
