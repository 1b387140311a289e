"""How a program ends: in order on SIGTERM, SIGHUP and Ctrl-C, whatever Ray does to the handlers, and in bounded time.

Calls that may never return have a deadline (:func:`run_within`, :func:`end_unless_done`), and :func:`leave` ends the
process also where one has not. Nor does it have to take down what libraries have made (:func:`skip_teardown`).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from gkd.errors import SignalExit

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a program."""
TOGETHER_S = 1.0
"""Signals that come this close together mean one thing: a terminal and a launcher both send one."""

UV = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
"""Variable, and constant of Ray's, by which it looks whether it was started by ``uv run``."""

log = logging.getLogger("gkd")

_stuck: list[str] = []
"""Calls that did not return in time."""
_received: list[tuple[int, float]] = []
"""Numbers of the signals that were acted on, and when (``time.monotonic``)."""
_codes: list[int] = []
"""The exit code, once it is settled."""


def exit_on_signals() -> None:
    """Turn SIGTERM, SIGHUP, SIGINT into SignalExit (143, 129, 130), so that what is open is closed. Main thread only.

    One that comes later than :data:`TOGETHER_S` after the first ends what the first has begun to close.
    """
    _received.clear()
    handle_ending_signals(_stop)


@contextlib.contextmanager
def exit_on_unhandled_signals() -> Iterator[None]:
    """Do as :func:`exit_on_signals` while another's program is in the block: for the signals that it does not handle.

    Those would end it at once. In a thread that is not the main one nothing is changed.
    """
    unhandled = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    if not unhandled or threading.current_thread() is not threading.main_thread():
        yield
        return
    _received.clear()
    for number in unhandled:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number in unhandled:
            signal.signal(number, signal.SIG_DFL)


def _stop(number: int, _: FrameType | None) -> None:
    now = time.monotonic()
    if _received and now - _received[-1][1] < TOGETHER_S:
        return
    _received.append((number, now))
    raise SignalExit(number)


def handle_ending_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Call ``handler`` for each of :data:`ENDING`. SIGHUP stays ignored where it is, as under nohup."""
    for number in ENDING:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


@contextlib.contextmanager
def keep_exit_code() -> Iterator[None]:
    """Leave with 128 + the signal's number also where the signal came during a call into Ray, which makes it 0 or 1."""
    try:
        yield
    except SystemExit:
        if (end := received_signal()) is not None:
            raise end from None
        raise


def received_signal() -> SignalExit | None:
    """Return the end that the first signal asked for, which may have come while something was cleaned up."""
    return SignalExit(_received[0][0]) if _received else None


@contextlib.contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Have SIGTERM come to the program's own handler while ``ray.init`` runs, and after it.

    Ray puts a handler of its own in place, which exits with code 15, and while it connects one in C, which prints a
    stack and aborts: a SIGTERM that comes to this thread then waits until the program's own is back. Nothing is started
    meanwhile, so that no process inherits that. One that comes to another thread is handed on by Ray's, which sets an
    alarm first that aborts three seconds later.
    """
    program_handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or program_handler is signal.SIG_DFL:
        yield  # Ray's own at least exits in order
        return
    from ray._private import utils, worker  # there is no public way

    connect = worker.connect

    def connect_undisturbed(*args: Any, **kwargs: Any) -> Any:
        mask, alarm = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}), signal.getitimer(signal.ITIMER_REAL)
        try:
            return connect(*args, **kwargs)
        finally:
            signal.signal(signal.SIGTERM, program_handler)
            signal.setitimer(signal.ITIMER_REAL, *alarm)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    own_handler = replace_attributes(utils, set_sigterm_handler=lambda handler: None)
    with replace_attributes(worker, connect=connect_undisturbed), own_handler:
        yield


def init_ray(**arguments: Any) -> None:
    """Call ``ray.init``, quietly; signals come to the program's own handlers meanwhile and after it.

    What Ray reports of its cluster while it is connected, such as a node that left, is logged in a line each.
    Where it was started by ``uv run``, Ray would start workers so as well, without what is installed in this
    environment, and copy the current directory to them, up to 512 MB, with a run's checkpoints. It does where the
    variable is set that asks for it.
    """
    import ray
    from ray._private import ray_constants, worker

    by_uv = UV in os.environ and ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV
    with replace_attributes(ray_constants, **{UV: by_uv}), keep_sigterm_handler():
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **arguments)
    logged = set[str]()

    def log_report(data: dict[str, Any], ignore_prefix: bool) -> None:
        for text in data["lines"]:
            # Behind it are guesses at the cause and, of a node manager that was killed, its log.
            line = re.split(r"\n| This can happen when| Possible reasons", text.lstrip())[0].rstrip()
            if line not in logged:
                logged.add(line)
                log.warning("Ray: %s", line)

    worker.print_to_stdstream = log_report


@contextlib.contextmanager
def replace_attributes(owner: Any, **attributes: Any) -> Iterator[None]:
    """Have a module or class of Ray's do otherwise within the block, for what it has no settings for."""
    originals = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def shield_children_from_hangups() -> Iterator[None]:
    """Have what is started meanwhile, and all that it starts, live on when the terminal closes, so that a run can save.

    A closing terminal sends SIGHUP to the whole group of processes. This one's comes after the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def ignore_signals() -> Iterator[None]:
    """Let a clean-up of bounded length finish, also when Ctrl-C is pressed again; :func:`received_signal` has it."""
    with _note_signals(lambda number: _received.append((number, time.monotonic()))):
        yield


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Act on signals that come within the block after it, for a block that starts a process with a ``preexec_fn``.

    Python itself forks for that and calls what libraries have registered for it, such as what holds their locks. An
    exception that a signal raises there is discarded, and the lock stays held.
    """
    came: list[int] = []
    try:
        with _note_signals(came.append):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


@contextlib.contextmanager
def _note_signals(note: Callable[[int], object]) -> Iterator[None]:
    """Call ``note`` for each signal in the block, in place of what is there for it; one that is ignored stays so.

    In a thread that is not the main one nothing is changed.
    """
    with contextlib.ExitStack() as handlers:  # which puts all back, also where a signal comes between two
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):
                    handlers.callback(signal.signal, number, before)
                    signal.signal(number, lambda number, _: note(number))
        yield


def run_within(timeout_s: float, activity: str, call: Callable[[], object]) -> bool:
    """Run ``call`` in a thread of its own for at most ``timeout_s`` seconds; returns whether it came to its end.

    Raises what it raises. One that does not return is named in a warning and left behind: :func:`leave` ends the
    process without it.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=activity, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        abandon(activity)
        log.warning("%s: not done after %g s; the program ends without it", activity, timeout_s)
        return False
    if raised:
        raise raised[0]
    return True


@contextlib.contextmanager
def end_unless_done(timeout_s: float, activity: str) -> Iterator[None]:
    """End the program, with one line and code 1, where the block takes longer than ``timeout_s`` seconds.

    For calls that only the main thread can make: where one hangs in C, no signal is acted on either.
    """

    def end() -> None:
        print(f"failed: {activity}: not done after {timeout_s:g} s", file=sys.stderr)
        _end_now(1)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def abandon(activity: str) -> None:
    """Have :func:`leave` end the process at once: ``activity`` has not been done and cannot be."""
    _stuck.append(activity)


def skip_teardown() -> None:
    """Have :func:`leave` end the process when all that is registered for its end is done.

    Python would go on to take down every object that libraries have made, for seconds. To be called before they are
    imported: what is registered first is done last.
    """
    atexit.register(_end)


def _end() -> None:
    if _codes:
        logging.shutdown()
        _flush_files()
        _end_now(_codes[-1])


def _flush_files() -> None:
    """Write what a tracker or a task of the user's own has given to files that it has not closed."""
    gc.unfreeze()
    for candidate in gc.get_objects():
        if issubclass(type(candidate), io.IOBase):
            with contextlib.suppress(OSError, ValueError):
                candidate.flush()


def _end_now(code: int) -> NoReturn:
    for stream in filter(None, (sys.stdout, sys.stderr)):  # one that was closed from the start is None
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def leave(code: int) -> NoReturn:
    """End the program with ``code``, at once where a call is stuck: what Python does at its end could wait for it."""
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)  # the code is settled
    if not _stuck:
        _codes.append(code)
        sys.exit(code)
    _end_now(code)


class ServerStop:
    """Turns signals into the end of the server: at once while it loads, in good order once it serves."""

    def __init__(self) -> None:
        self.event, self.serving, self.code = threading.Event(), False, 0
        handle_ending_signals(self._on_signal)
        self._report = sys.unraisablehook
        sys.unraisablehook = self._report_unraisable

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.code = 130 if number == signal.SIGINT else 0
        self.event.set()
        if not self.serving:
            raise SystemExit(self.code)

    @contextlib.contextmanager
    def keep_exit_code(self) -> Iterator[None]:
        """Leave with the signal's code also where a library that loads a model makes another error of it."""
        try:
            yield
        except BaseException:
            if self.event.is_set() and not self.serving:
                raise SystemExit(self.code) from None
            raise

    def _report_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Leave out a SystemExit that finds a finalizer: it is lost there, and the end comes after the model's."""
        if not (self.event.is_set() and unraisable.exc_type is SystemExit):
            self._report(unraisable)
