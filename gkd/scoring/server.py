"""A scorer's server: takes requests into the engine as they arrive, sends every answer as it is finished."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any

from gkd.cluster.workers.activity import HERE
from gkd.data.rendering import Rendering
from gkd.errors import RunFailed, describe_error, one_line
from gkd.inference.engine import InferenceEngine
from gkd.inference.requests import ErrorCode, RequestRejected
from gkd.scoring import wire
from gkd.scoring.address import Key
from gkd.scoring.clients import QueuedRequest
from gkd.scoring.connections import ClientLimits
from gkd.scoring.frontend import Frontend

IDLE_POLL_S = 0.05
GAP_S, GATHER_S = 0.002, 0.01
"""An idle engine begins with all requests that come within ``GAP_S`` of each other, and after ``GATHER_S`` at most."""


class ScoringServer:
    """Serves ``engine`` on ``bind_ip``; port 0 is a free one, chosen by the bind itself.

    Handshakes and heartbeats are answered from construction on, requests while :meth:`serve` runs; its end ends both.
    Whoever has ``key`` is served, within ``client_limits``; ``rendering`` and ``weights`` are part of the handshake
    (:class:`Frontend`). Raises ConfigError where the address cannot be bound.
    """

    def __init__(
        self,
        engine: InferenceEngine[Any, Any],
        tokenizer_hash: str,
        bind_ip: str,
        port: int,
        key: Key,
        *,
        client_limits: ClientLimits = ClientLimits(),  # noqa: B008 (it cannot change)
        rendering: Rendering | None = None,
        weights: str = "",
    ) -> None:
        self._engine = engine
        self._n_steps = 0
        self._frontend = Frontend(
            engine.limits, tokenizer_hash, bind_ip, port, key, client_limits, rendering, weights, self._count_steps
        )
        self._jobs: dict[int, QueuedRequest] = {}
        self._keys = count()
        self._asleep = self._ended = False
        self._commands: queue.Queue[tuple[Future[None], Callable[[], None], bool]] = queue.Queue()

    @property
    def address(self) -> str:
        """``tcp://host:port`` to connect to."""
        return self._frontend.address

    @property
    def counts(self) -> dict[str, int]:
        """How many requests were answered ("answered") and how many were not, by the code of the error."""
        return dict(self._frontend.counts)

    def progress(self) -> tuple[int, int]:
        """Return steps of the engine so far, and requests that it works on. From any thread."""
        return self._count_steps(), len(self._jobs)

    def _count_steps(self) -> int:
        """Count the engine's steps, and the passes within one, such as those of each token of a long text."""
        return self._n_steps + self._engine.forward_passes

    def serve(self, stop: threading.Event) -> None:
        """Answer requests on the calling thread until ``stop`` is set, then close; what is unfinished is rejected.

        Raises RunFailed when the engine fails, after an answer to every client that waits.
        """
        code: ErrorCode = "stopping"
        message = "the server is stopping"
        try:
            while not stop.is_set():
                self._work()
        except Exception as error:
            code, message = "engine", f"the engine failed: {describe_error(error)}"
            if isinstance(error, RunFailed):
                raise
            raise RunFailed(f"the scoring engine at {self.address} failed: {describe_error(error)}") from error
        finally:
            self._ended = True
            self._refuse_commands()
            for job in self._jobs.values():
                self._frontend.reject(job, code, message)
            self._jobs.clear()
            self._frontend.close(code, message)

    def sleep(self, timeout_s: float) -> None:
        """Have the engine, from another thread, leave its GPU to others once it is idle. Requests wait meanwhile.

        Raises RunFailed past the deadline.
        """
        self._run_when_idle(self._engine.sleep, True, "go to sleep", timeout_s)

    def wake(self, timeout_s: float) -> None:
        """Have the engine, from another thread, be as before. Raises RunFailed past the deadline."""
        self._run_when_idle(self._engine.wake, False, "wake up", timeout_s)

    def _take(self) -> list[QueuedRequest]:
        """Take what is queued and fits; where the engine is idle, wait for it, and a moment for what comes with it."""
        room = self._engine.limits.capacity - len(self._jobs)
        if self._jobs:
            return self._frontend.take(room, 0)
        jobs = self._frontend.take(room, IDLE_POLL_S)
        more, end = jobs, time.monotonic() + GATHER_S
        while more and len(jobs) < room and time.monotonic() < end:
            time.sleep(GAP_S)
            more = self._frontend.take(room - len(jobs), 0)
            jobs = [*jobs, *more]
        return jobs

    def _run_when_idle(self, act: Callable[[], None], asleep: bool, activity: str, timeout_s: float) -> None:
        future: Future[None] = Future()
        self._commands.put((future, act, asleep))
        if self._ended:  # it has refused what came before it ended, and nobody else comes for this one
            self._refuse_commands()
        try:
            future.result(timeout_s)
        except TimeoutError:
            engine = f"the engine at {self.address}"
            raise RunFailed(f"{engine} did not {activity} within {timeout_s:g} s (weights.timeout_s)") from None

    def _refuse_commands(self) -> None:
        with suppress(queue.Empty):
            while True:
                future, _, _ = self._commands.get_nowait()
                future.set_exception(RunFailed(f"the engine at {self.address} has ended"))

    def _command(self) -> bool:
        """Run another thread's command, if there is one; while asleep nothing else can come, so it is waited for."""
        try:
            future, act, asleep = self._commands.get(block=self._asleep, timeout=IDLE_POLL_S)
        except queue.Empty:
            return False
        try:
            act()
            self._asleep = asleep
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)
        return True

    def _note_activity(self) -> None:
        HERE.switch(*(("score", 0) if self._jobs else (None, None)))  # its weights stay those that it was loaded with

    def _work(self) -> None:
        self._note_activity()
        if not self._jobs and (self._command() or self._asleep):
            return
        for job in self._take():
            key = next(self._keys)
            self._jobs[key] = job
            try:
                self._engine.add(key, job.request)
            except ValueError as error:
                self._frontend.reject(self._jobs.pop(key), "bad_request", one_line(error))
        self._note_activity()
        if not self._jobs:
            return
        replies: list[tuple[QueuedRequest, bytes]] = []
        for key, answer in self._engine.step():
            job = self._jobs.pop(key)
            if isinstance(answer, RequestRejected):
                self._frontend.reject(job, answer.code, answer.message)
            else:
                self._frontend.counts["answered"] += 1
                replies.append((job, wire.encode_answer(job.id, answer)))
        self._n_steps += 1
        if replies:
            self._frontend.reply(replies)
