"""What a worker's process does, and since when; the driver fetches it with the worker's memory.

A process has one activity at a time, or none. It is noted at changes alone, so that it costs nothing within an engine's
or the actor's loops.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

KEPT = 10_000
"""Spans that a process holds when nobody fetches them."""


class ActivitySpan(NamedTuple):
    """One activity. ``start`` and ``end`` are seconds since 1970 by the clock of the worker's node."""

    name: str
    start: float
    end: float
    version: int | None = None
    """Of the weights it was done with, where that is known."""


def find_gaps(busy: Iterable[tuple[float, float]], begin: float, until: float) -> Iterator[tuple[float, float]]:
    """Yield start and end of every time from ``begin`` to ``until`` in which nothing of ``busy``, in order, was."""
    idle_since = begin
    for start, end in busy:
        if end <= idle_since or start >= until:
            continue
        if start > idle_since:
            yield idle_since, start
        idle_since = min(end, until)
    if until > idle_since:
        yield idle_since, until


class Activity:
    """Notes what this process does. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: deque[ActivitySpan] = deque(maxlen=KEPT)
        self._name: str | None = None
        self._version: int | None = None
        self._since = 0.0

    def switch(self, name: str | None, version: int | None = None) -> tuple[str | None, int | None]:
        """Do ``name`` from now on, None for nothing, with weights ``version``; returns both as they were before."""
        before = self._name, self._version
        if (name, version) == before:  # no lock: only the thread that works switches
            return before
        with self._lock:
            now = time.time()
            self._finish(now)
            self._name, self._version, self._since = name, version, now
        return before

    def take(self) -> tuple[float, list[ActivitySpan]]:
        """Return this process' clock and the spans since the last call; what goes on is cut in two."""
        with self._lock:
            now = time.time()
            self._finish(now)
            self._since = now
            spans = list(self._spans)
            self._spans.clear()
        return now, spans

    def _finish(self, now: float) -> None:
        if self._name is not None and now > self._since:
            self._spans.append(ActivitySpan(self._name, self._since, now, self._version))


HERE = Activity()
"""Of this process."""


def record_activity(
    name: str, version: Callable[..., int | None] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function count as the activity ``name`` of the process while it runs.

    ``version`` returns that of the weights from the function's own arguments.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            before = HERE.switch(name, None if version is None else version(*args, **kwargs))
            try:
                return function(*args, **kwargs)
            finally:
                HERE.switch(*before)

        return run

    return decorate


def report_here(further: Sequence[Mapping[str, float]] = ()) -> dict[str, Any]:
    """Return ``memory``, ``clock`` and ``spans`` of this process.

    ``memory`` is :func:`memory_here`, with what ``further`` processes of the worker measured: the sum on the host, and
    the largest of everything else, which each has on its own GPU.
    """
    clock, spans = HERE.take()
    memory = memory_here()
    for process_memory in further:
        memory |= {
            name: memory[name] + value if name == "process_gb" else max(value, memory.get(name, value))
            for name, value in process_memory.items()
        }
    return {"memory": memory, "clock": clock, "spans": [tuple(span) for span in spans]}


def memory_here() -> dict[str, float]:
    """Return memory/GROUP/* of this process.

    process_gb, resident on the host; allocated_gb, reserved_gb and peak_gb of torch on a GPU, how often its allocator
    had to start over (alloc_retries) or gave up (ooms). The GPU's are left out where none is used, as on a CPU and
    where an engine computes in further processes.
    """
    import psutil

    gb = 1e9
    memory = {"process_gb": psutil.Process().memory_info().rss / gb}
    torch = sys.modules.get("torch")  # importing it takes more than a second, in which a process does little else
    if torch is None or not torch.cuda.is_initialized():
        return memory
    counts = torch.cuda.memory_stats()
    return memory | {
        "allocated_gb": torch.cuda.memory_allocated() / gb,
        "reserved_gb": torch.cuda.memory_reserved() / gb,
        "peak_gb": torch.cuda.max_memory_allocated() / gb,
        "alloc_retries": float(counts.get("num_alloc_retries", 0)),
        "ooms": float(counts.get("num_ooms", 0)),
    }
