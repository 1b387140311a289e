"""One client for all replicas of a model that scores, from any thread, without ever waiting on a socket."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from itertools import count
from typing import overload

from gkd.errors import ConfigError
from gkd.inference.requests import (
    GenerateRequest,
    RateRequest,
    Request,
    ScoreRequest,
    ScorerUnavailable,
)
from gkd.scoring import wire
from gkd.scoring.address import Key, host_of
from gkd.scoring.attempts import NO_ANSWER
from gkd.scoring.dispatch import Dispatcher, RetryPolicy
from gkd.scoring.replica import PendingRequest
from gkd.scoring.wire import PROTOCOL, Welcome
from gkd.types import Int32, Target

log = logging.getLogger("gkd")
AT_ONCE_S = 1.0  # in which a server that is there answers a greeting
MOST_TOKENS, MOST_IDS = 1 << 20, 1 << 20  # in an answer, where the client has no bound of its largest request


class ScoringClient(Dispatcher):
    """Sends every request to the replica with the fewest, and to another one when it does not answer.

    - ``addresses``: each ``tcp://host:port``; :meth:`connect` does not wait for servers at ``absent`` ones, which are
      being started.
    - ``tokenizer_hash``: the student's.
    - ``top_k``: the largest K of its requests, any number past the vocabulary for all.
    - ``max_length``: the longest prompt and response together, in tokens.
    - ``vocabulary``: the student's rows of logits, put into every request that names none.
    - ``n_clients``: how many use the same servers at the same time, each its share of what they can hold.
    - ``key``: that of the servers.
    - ``scorer``: the model's name in messages, with that of its section before a colon, if any.

    The times are those of config.Teacher. Raises ConfigError for an address that is none.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        tokenizer_hash: str,
        top_k: int = 0,
        *,
        key: Key,
        vocabulary: int | None = None,
        max_length: int | None = None,
        n_clients: int = 1,
        request_timeout_s: float = 120.0,
        max_attempts: int = 3,
        heartbeat_s: float = 1.2,
        scorer: str = "teacher",
        absent: Sequence[str] = (),
    ) -> None:
        if not addresses:
            raise ConfigError(f"no address of a {scorer} is known")
        for address in addresses:
            host_of(address)
        self._tokenizer_hash, self._top_k = tokenizer_hash, top_k
        self._max_length, self._vocabulary = max_length, vocabulary
        self._ids, self._absent = count(), frozenset(absent)
        self._known: tuple[str, str] | None = None  # where weights were named first, and what they are known by
        retry_policy = RetryPolicy(request_timeout_s, max_attempts, heartbeat_s, scorer)
        largest = wire.largest_reply(max_length or MOST_TOKENS, min(top_k, vocabulary or MOST_IDS))
        super().__init__(list(dict.fromkeys(addresses)), key, retry_policy, n_clients, largest)

    def connect(self, timeout_s: float | None = None) -> dict[str, Welcome]:
        """Wait until every replica that is there has answered a greeting; returns the welcome of each, by address.

        A line states which it waits for, where they do not answer at once, and what is known to keep them. Raises
        ConfigError when one does not fit the student, ScorerUnavailable when one has not answered within ``timeout_s``
        (None: request_timeout_s).
        """
        scorer = self._retry_policy.scorer
        timeout_s = self._retry_policy.request_timeout_s if timeout_s is None else timeout_s
        end, stated = time.monotonic() + timeout_s, ""
        awaited = {name: future for name, future in self.welcomes.items() if name not in self._absent}
        while late := wait(
            awaited.values(), min(max(0.0, end - time.monotonic()), AT_ONCE_S), FIRST_EXCEPTION
        ).not_done:
            if any(future.exception() for future in awaited.values() if future.done()):
                break
            silent = [replica for replica in self.replicas if self.welcomes[replica.name] in late]
            faults = "; ".join(f"{replica.address} {replica.fault or NO_ANSWER}" for replica in silent)
            if faults != stated:
                log.info("waiting for the %s: %s", scorer, faults)
                stated = faults
            if time.monotonic() >= end:
                raise ScorerUnavailable(f"no answer from the {scorer} within {timeout_s:g} s: {faults}")
        return {address: future.result() for address, future in awaited.items()}

    @property
    def weights(self) -> str:
        """What the model's weights are known by, once a replica has answered; empty where servers do not state it."""
        return "" if self._known is None else self._known[1]

    @overload
    def submit(self, request: ScoreRequest, order: tuple[float, int] = ...) -> Future[Target]: ...
    @overload
    def submit(self, request: GenerateRequest, order: tuple[float, int] = ...) -> Future[Int32]: ...
    @overload
    def submit(self, request: RateRequest, order: tuple[float, int] = ...) -> Future[float]: ...
    def submit(
        self, request: Request, order: tuple[float, int] = (0, 0)
    ) -> Future[Target] | Future[Int32] | Future[float]:
        """Send a request; never blocks. The arrays of the answer cannot be written to.

        Of those that wait because the servers have enough, one of a lower ``order`` is sent first.

        The future fails with ScorerRejected when the model cannot answer this request (too long, a token it does
        not know, ...), with ScorerUnavailable when no replica answered, with ConfigError when a replica that has
        come (back) does not fit the student, and with RunFailed when the client was closed.
        """
        if isinstance(request, ScoreRequest) and request.vocabulary is None and self._vocabulary is not None:
            request = replace(request, vocabulary=self._vocabulary)
        pending = PendingRequest(next(self._ids), request, Future(), time.monotonic(), order)
        self.hand_in(pending)
        return pending.future

    def _check(self, address: str, welcome: Welcome) -> None:
        """Raise ConfigError, naming both sides, when the model at ``address`` does not fit the student."""
        scorer, section = self._retry_policy.scorer, self._retry_policy.section
        server = f"the {scorer} {welcome.model} at {address}"
        if welcome.protocol != PROTOCOL:
            raise ConfigError(
                f"{server} speaks protocol {welcome.protocol}, this side {PROTOCOL}: use one version of gkd"
            )
        if welcome.tokenizer_hash != self._tokenizer_hash:
            raise ConfigError(
                f"the tokenizers of student and {scorer} differ: the student's has hash "
                f"{self._tokenizer_hash[:16]}, that of {server} {welcome.tokenizer_hash[:16]}"
            )
        first, weights = self._known = self._known or (address, welcome.weights)
        if weights != welcome.weights:
            before = "before" if first == address else f"the one at {first}"
            raise ConfigError(f"{server} has other weights than {before}: a {scorer} is one model, in all its replicas")
        vocabulary = min(welcome.vocabulary, self._vocabulary or welcome.vocabulary)
        if (k := min(self._top_k, vocabulary)) > welcome.max_top_k:
            raise ConfigError(
                f"K={k} is needed (algorithm.loss.top_k, data.val_top_k), {server} gives at most {welcome.max_top_k} "
                f"({section}.max_top_k)"
            )
        if self._max_length is not None and self._max_length > welcome.max_length:
            raise ConfigError(
                f"prompt and response may have {self._max_length} tokens, {server} takes at most {welcome.max_length} "
                f"({section}.max_model_len)"
            )
