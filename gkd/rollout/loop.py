"""The one thread that does everything with an engine: its steps, and between them what other threads want."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from gkd.cluster.workers.activity import HERE
from gkd.cluster.workers.failure import WorkerHung
from gkd.errors import RunFailed, one_line
from gkd.inference.engine import InferenceEngine
from gkd.types import Sample, SampleRequest

IDLE_POLL_S = 0.5
CallResult = TypeVar("CallResult")


class EngineLoop:
    """Runs the engine of rollout ``rank`` on the thread that calls :meth:`serve`; any thread may call the rest."""

    def __init__(self, engine: InferenceEngine[SampleRequest, Sample], rank: int, timeout_s: float) -> None:
        self._engine, self._rank, self._timeout_s = engine, rank, timeout_s
        self._commands: queue.Queue[Callable[[], None]] = queue.Queue()
        self._lock = threading.Lock()
        self._called: dict[Future[Any], str] = {}  # activities that are waited for
        self._ended: BaseException | None = None

    def __len__(self) -> int:
        return self._commands.qsize()

    def submit(self, command: Callable[[], None]) -> None:
        """Have ``command`` run between two steps. What it raises ends the loop."""
        self._commands.put(command)

    def call(self, run: Callable[[], CallResult], activity: str, timeout_s: float | None = None) -> CallResult:
        """Have ``run`` called between two steps; returns what it returns, raises what it raises.

        Raises WorkerHung where the thread does not come to ``activity`` within ``timeout_s``, None for
        ``weights.timeout_s``, and what is made of the loop's end where it ends before.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        future: Future[CallResult] = Future()
        with self._lock:
            if self._ended is not None:
                raise self._failure_of(activity, self._ended)
            self._called[future] = activity

        def command() -> None:
            try:
                future.set_result(run())
            except BaseException as error:
                future.set_exception(self._cause_of(error))

        self._commands.put(command)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise WorkerHung(
                f"rollout rank {self._rank} did not {activity} within {timeout_s:g} s (weights.timeout_s)"
            ) from None
        finally:
            with self._lock:
                self._called.pop(future, None)

    def _failure_of(self, activity: str, end: BaseException) -> BaseException:
        if isinstance(end, WorkerHung):
            return end
        return RunFailed(f"rollout rank {self._rank} cannot {activity}: its engine ended with {one_line(end)}")

    def serve(self, step: Callable[[], None], busy: Callable[[], bool]) -> None:
        """Do ``step`` after ``step`` while the engine is ``busy``, and what was submitted before each of them.

        Ends with what a step or a command raises; WorkerHung where a process of the engine's has died.
        """
        try:
            while True:
                works = busy()
                HERE.switch("sample" if works else None, self._engine.version if works else None)
                try:
                    command = self._commands.get(block=not works, timeout=None if works else IDLE_POLL_S)
                except queue.Empty:
                    command = step
                command()
        except BaseException as error:
            cause = self._cause_of(error)
            with self._lock:
                self._ended, called = cause, dict(self._called)
            for future, activity in called.items():  # this thread, which will not come to them
                if not future.done():
                    future.set_exception(self._failure_of(activity, cause))
            if cause is error:
                raise
            raise cause from error

    def _cause_of(self, error: BaseException) -> BaseException:
        """Return why the engine failed with ``error``: that one, unless a process of the engine's has died."""
        if isinstance(error, Exception) and self._engine.has_lost_process():
            return WorkerHung(f"rollout rank {self._rank} lost a process of its engine: {one_line(error)}")
        return error
