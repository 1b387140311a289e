"""What went wrong in a worker, in one line that names it."""

from __future__ import annotations

import logging
import re

import ray
from ray._private import worker as ray_worker
from ray.exceptions import ActorUnavailableError, ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

from gkd.errors import (
    ConfigError,
    OutOfMemory,
    RemoteError,
    RunFailed,
    StudentNotWritten,
    UpdateFailed,
    describe_error,
    describe_place,
    one_line,
)

log = logging.getLogger("gkd")


class WorkerDied(RunFailed):
    """A worker's process is gone. Where others can do its work, the run goes on."""


class WorkerHung(WorkerDied):
    """A worker does nothing and may never do so again: to be ended, and to be treated as one that died."""


class NodeLost(RunFailed):
    """The node is gone on which a worker was to be started again, and with it what is reserved there."""


def explain(error: Exception, who: str) -> ConfigError | RunFailed:
    """Return the error to raise for what ``ray.get`` raised about a worker.

    ``who`` names it, e.g. ``teacher rank 1 (pid 7 on 10.0.0.1)``.

    A ConfigError or RunFailed raised inside the worker comes out as that type with its own message.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, OutOfMemory):
        return OutOfMemory(str(cause), cause.budget)
    for kind in (ConfigError, UpdateFailed, StudentNotWritten, WorkerHung, WorkerDied, RunFailed):
        if isinstance(cause, kind):
            return kind(str(cause))
    if isinstance(error, RayTaskError):
        raised = str(cause) if isinstance(cause, RemoteError) else f"{_cause_name(cause)}: {one_line(cause)}"
        return RunFailed(f"{who} raised {raised}{describe_place(str(error))}")
    if gone := _loss(error):
        return WorkerDied(f"{who}{gone}")
    return RunFailed(f"{who} failed: {describe_error(error)}")


def log_unawaited_errors() -> None:
    """Have an error of a call that nobody waits for any more logged in one line, where Ray prints a traceback.

    That is in the worker's own log (:mod:`gkd.cluster.workers.worker`). Ranks that fail alike are one line.
    """
    logged = set[str]()

    def handle(error: Exception) -> None:
        text = one_line(explain(error, "a worker"))
        if text not in logged:
            logged.add(text)
            log.warning("a call that nobody waited for failed: %s", text)

    ray_worker._unhandled_error_handler = handle


def _cause_name(cause: BaseException) -> str:
    # Ray wraps a cause in a class of its own that also derives from the cause's class.
    for kind in type(cause).__mro__:
        if not issubclass(kind, ray.exceptions.RayError):
            return kind.__name__
    return type(cause).__name__


def _loss(error: Exception) -> str:
    """Return how a worker, or what it made, is gone, to be put behind its name; empty for any other error."""
    if isinstance(error, RayActorError):
        return f" died: {_death(error)}"
    if isinstance(error, OutOfMemoryError):
        return " died: Ray ended it because its node was short of memory"
    if isinstance(error, ObjectLostError):
        return f": lost with the node that held it ({type(error).__name__})"
    return ""


def _death(error: RayActorError) -> str:
    """Return the reason in Ray's report of a death, without its list of everything that might have been the cause."""
    text = one_line(error)
    if left := re.search(r"its node has died\..*?the actor's node was (.*)", text):
        return f"its node has left ({left[1]})"
    if isinstance(error, ActorUnavailableError) and (silent := re.search(r"([^:]+?) rpc_code", text)):
        return f"it does not answer, so its process or its node is gone ({silent[1].strip()})"
    detail = re.search(r"Worker exit detail: (.*?)(?: There are some| Some common causes|$)", text)
    if detail and "connection error code 2" in detail[1]:
        return "its process ended without a word: killed, out of memory, or crashed in native code"
    if detail:
        return detail[1]
    because = re.search(r"The actor is dead because (.*)", text)
    return because[1] if because else text
