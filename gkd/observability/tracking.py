"""The trackers of a run, started and called in bounded time, and metrics.jsonl, which they are beside."""

from __future__ import annotations

import importlib.util
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from gkd.cluster.session.shutdown import abandon
from gkd.config import Config
from gkd.config.endpoint import hide_secrets_within
from gkd.config.groups import TRACKERS
from gkd.errors import ConfigError, describe_raised
from gkd.observability.events import Events, note
from gkd.observability.metrics import JsonLines
from gkd.observability.progress import changes
from gkd.observability.trackers.tracker import FINISH_S, TrackedRun, Tracker

log = logging.getLogger("gkd")

OnStep = Callable[[int, Mapping[str, float]], object]
"""Takes a step and its metrics."""

CALL_S = 60.0
"""Time that a tracker has to take the metrics of a step; one that is late takes the further ones when it can."""
MOST_LATE = 1000
"""Calls that wait for a tracker that is late; further ones are left out."""


class Trackers:
    """The trackers of a run whose first new step is ``first_step``; entered, they take metrics.

    Raises ConfigError when one does not start, unless they are not ``required``: a run that goes on, or begins again,
    does so without it, with a warning.
    """

    def __init__(self, config: Config, output: Path, first_step: int, required: bool = True) -> None:
        self.run, self.required = TrackedRun(config, output, first_step), required
        self._started: dict[str, _Started] = {}
        self._failed: set[str] = set()
        self._open = ExitStack()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the metrics of a step to all of them. What one raises is a warning, once: the run goes on.

        One that has not returned within :data:`CALL_S` once is never waited for again: it takes what it can, in order.
        """
        self._call_each(step, lambda tracker: tracker.log(step, metrics))

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Hand samples of the first step, and of those with a validation, to the trackers that take any; as log."""
        trainer = self.run.config.trainer
        if step in (1, trainer.total_steps) or step % trainer.val_every == 0:  # the last step is validated as well
            samples = [{name: value for name, value in row.items() if name != "tokens"} for row in rows]
            self._call_each(step, lambda tracker: getattr(tracker, "log_samples", lambda *_: None)(step, samples))

    def _call_each(self, step: int, call: Callable[[Tracker], object]) -> None:
        for name, started in self._started.items():
            self._settle(name, started)
            if len(started.late) >= MOST_LATE:
                started.n_left_out += 1
                continue
            future = started.caller.submit(partial(call, started.tracker))
            started.late.append((step, future))
            if not started.is_slow and not wait([future], CALL_S).done:
                log.warning(
                    "trainer.trackers: %s did not take step %d within %g s; it gets the further ones when it has, and "
                    "nothing waits for it", name, step, CALL_S,
                )  # fmt: skip
                started.is_slow = started.is_behind = True
            self._settle(name, started)

    def _settle(self, name: str, started: _Started) -> None:
        """Look at what the calls of a tracker that are done came to."""
        while started.late and started.late[0][1].done():
            step, future = started.late.popleft()
            error = future.exception()  # a user's class, or a server, may raise anything
            if error is not None and name not in self._failed:
                self._failed.add(name)
                log.warning("trainer.trackers: %s did not take step %d: %s", name, step, _describe(error))
        if started.is_behind and not started.late:
            log.info("trainer.trackers: %s has taken what it was late with%s", name, started.describe_left_out())
            started.is_behind, started.n_left_out = False, 0

    def _close(self, name: str, kind: type[BaseException] | None, *_: object) -> None:
        """Close a tracker when the run leaves it, by an error of this ``kind`` or by none. What it raises is a warning.

        One that is late has :data:`CALL_S` to take what it was given.
        """
        started = self._started[name]
        wait([future for _, future in started.late], CALL_S)
        self._settle(name, started)
        if started.late:
            abandon(name)
            left = started.describe_left_out()
            log.warning("trainer.trackers: %s has not taken step %d and later%s", name, started.late[0][0], left)
            return
        if started.n_left_out:
            log.warning("trainer.trackers: %s was too slow%s", name, started.describe_left_out())
        try:
            started.caller.call(lambda: started.tracker.close(failed=kind is not None), FINISH_S + 60)
        except TakesTooLong:
            log.warning("trainer.trackers: %s was not closed within %g s", name, FINISH_S + 60)
        except Exception as error:  # a user's class, or a server, may raise anything
            log.warning("trainer.trackers: %s was not closed: %s", name, _describe(error))
        started.caller.end()

    def __enter__(self) -> Self:
        with ExitStack() as started:  # which closes the first where the next one fails
            for name in self.run.config.trainer.trackers:
                caller = _Caller(name)
                try:
                    tracker = self._start(name, caller)
                except ConfigError as error:
                    if self.required:
                        raise
                    log.warning("%s; the run goes on without it", error)
                    continue
                self._started[name] = _Started(tracker, caller)
                started.push(partial(self._close, name))
            self._open = started.pop_all()
        return self

    def _start(self, name: str, caller: _Caller) -> Tracker:
        try:
            tracker: Tracker = caller.call(partial(self.run.config.trainer.build_named, name, self.run), FINISH_S)
        except ConfigError:
            caller.end()
            raise
        except TakesTooLong:
            raise ConfigError(f"trainer.trackers: {name} did not start within {FINISH_S:g} s") from None
        except Exception as error:  # a user's class may raise anything
            raise ConfigError(f"trainer.trackers: {name} did not start: {_describe(error)}") from error
        return tracker

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


@dataclass
class _Started:
    """A tracker, what calls it, and the steps of the calls that are not done.

    ``is_slow``: one has taken longer than :data:`CALL_S`; ``is_behind``: what was given since is not all taken.
    """

    tracker: Tracker
    caller: _Caller
    late: deque[tuple[int, Future[Any]]] = field(default_factory=deque)
    is_slow: bool = False
    is_behind: bool = False
    n_left_out: int = 0

    def describe_left_out(self) -> str:
        return f"; {self.n_left_out} calls, more than {MOST_LATE} that waited, were left out" if self.n_left_out else ""


def _describe(error: BaseException) -> str:
    """Describe an error of a tracker, as of a server that does not answer, without what may be secret of its URL."""
    return hide_secrets_within(describe_raised(error))


class TakesTooLong(Exception):
    """A call of a tracker has not returned in time; a TimeoutError is the tracker's own, as of its server."""


class _Caller:
    """Makes all calls of one tracker, in one thread: a server that does not answer holds nothing else up."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"tracker {name}", daemon=True).start()

    def call(self, function: Callable[[], Any], timeout_s: float) -> Any:
        """Return what ``function`` returns. Raises what it raises, and TakesTooLong where it takes longer."""
        future = self.submit(function)
        if not wait([future], timeout_s).done:
            abandon(self.name)
            raise TakesTooLong
        return future.result()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Have ``function`` called when all before it have returned; returns what will have its result."""
        future: Future[Any] = Future()
        self._calls.put((function, future))
        return future

    def end(self) -> None:
        """End the thread, after the calls that it has."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            function, future = call
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # such as SystemExit, which would end the run
                future.set_exception(RuntimeError(describe_raised(error)))


class MetricsLog(JsonLines):
    """metrics.jsonl, and trackers beside it; ``events`` learns which step is under way, and of validations.

    ``on_step`` is called last; what it raises is not caught.
    """

    def __init__(
        self, path: Path, trackers: Trackers, events: Events | None = None, on_step: OnStep | None = None
    ) -> None:
        super().__init__(path)
        self.trackers, self.events, self.on_step = trackers, events, on_step

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one step's metrics."""
        self.keep(row)
        if validated := {name: value for name, value in row.items() if name.startswith("val/")}:
            note("validation", changes(validated), step=row["step"], metrics=validated)
        if self.events is not None:
            self.events.step = row["step"] + 1
        metrics = {name: value for name, value in row.items() if name != "step"}
        self.trackers.log(row["step"], metrics)
        if self.on_step is not None:
            self.on_step(row["step"], metrics)


def require_trackers(config: Config) -> None:
    """Raise ConfigError unless the packages of all trackers are installed."""
    for name in config.trainer.trackers:
        package = getattr(TRACKERS.load(name), "package", None)
        if package is not None and importlib.util.find_spec(package) is None:
            extra = f": pip install 'gkd[{name}]'" if name in TRACKERS.entries else ""
            raise ConfigError(f"trainer.trackers: {name} needs the package {package}{extra}")


def require_logins(config: Config) -> None:
    """Raise ConfigError where a tracker lacks what its server asks for."""
    for name in config.trainer.trackers:
        getattr(TRACKERS.load(name), "require_login", lambda: None)()
