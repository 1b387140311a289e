"""The ways a program of this project ends early, and how each is shown to the user: in one line."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import math
import os
import re
import select
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import IO, NoReturn

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


class ConfigError(Exception):
    """The request cannot run: a setting, a file, a model, or more GPUs than there are. Exit code 2."""


class RunFailed(Exception):
    """Something died, timed out or was not what it had to be: states what, where and why. Exit code 1."""


class QuestionRefused(RunFailed):
    """A question that a model behind an endpoint does not take; it may answer others."""


class ControlLost(Exception):
    """Ray's control service is gone: the run saves what is whole and ends. Exit code 1.

    No RunFailed, which is caught where a run can go on.
    """


class StudentNotWritten(RunFailed):
    """The student could not be written as files, which changes nothing of it: the actor goes on."""


class UpdateFailed(RunFailed):
    """An update of the actor that failed before anything was changed: its weights are those before it."""


class OutOfMemory(UpdateFailed):
    """A batch that does not fit in micro-batches of as many tokens as they had.

    ``budget`` is what to try instead; None: one sequence alone is too much.
    """

    def __init__(self, message: str, budget: int | None = None) -> None:
        super().__init__(message)  # pickle gives it alone to what it makes anew, and the rest after that
        self.budget = budget


class RemoteError(Exception):
    """An error of another process, in one line as :func:`describe_error` returned it there."""


MAX_REASON = 600  # characters; some libraries put whole tables into a message


_VALIDATION = re.compile(
    r"\A(?P<n>\d+) validation errors? for .+\n"
    r"(?:(?P<place>\S.*)\n)?  (?:Value error, )?(?P<why>(?s:.+?)) \[type=\w+, input_"
)
"""The text of a pydantic ValidationError: what is validated, perhaps a field, what is wrong, what it was given."""


def clean(text: str) -> str:
    """Return a text in one line, without characters that would steer a terminal, such as those of colours."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def one_line(text: object) -> str:
    """Return a message in one line as :func:`clean` does, cut to a length that people read.

    Of the text of a pydantic ValidationError it is the first message, behind the name of its field, and how many more.
    """
    text = str(text)
    if (first := _VALIDATION.match(text)) is not None:
        n_more = int(first["n"]) - 1
        text = ": ".join(filter(None, first.group("place", "why"))) + f" (and {n_more} more)" * (n_more > 0)
    line = clean(text)
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]}..."


def describe_error(error: BaseException) -> str:
    """Return an error of any kind in one line: its class and its message.

    Of a signal it is that it stopped the program, of a pydantic ValidationError the message alone.
    """
    if isinstance(error, RemoteError):
        return one_line(error)
    if isinstance(error, SignalExit | KeyboardInterrupt):
        return f"stopped by {error.signal if isinstance(error, SignalExit) else 'Ctrl-C'}"
    if _VALIDATION.match(str(error)):
        return one_line(error)
    return f"{type(error).__name__}: {one_line(error)}".removesuffix(": ")


def describe_place(trace: str) -> str:
    """Return where in a user's own file a traceback's last line of such is, behind a space; empty where it has none."""
    installed = f"{Path(__file__).parent}/", f"{sysconfig.get_path('stdlib')}/"
    places = [
        f" ({file}, line {line})"
        for file, line in re.findall(r'File "(/.*?)", line (\d+)', trace)
        if not file.startswith(installed) and "-packages/" not in file
    ]
    return places[-1] if places else ""


def describe_raised(error: BaseException) -> str:
    """Return an error that may be of a user's own code in one line, with the place there."""
    return describe_error(error) + describe_place("".join(traceback.format_tb(error.__traceback__)))


class SignalExit(SystemExit):
    """A signal ended the program. Exit code 128 and the signal's number."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(self.exit_code)
        self.signal = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class Parser(argparse.ArgumentParser):
    """Raises ConfigError, in one line, for arguments that it does not have."""

    def error(self, message: str) -> NoReturn:
        """End the program, as argparse asks for."""
        raise ConfigError(f"{message} (see {self.prog} --help)")


def read_number(what: str, least: int = 0, most: float = math.inf) -> Callable[[str], int]:
    """Return a ``type`` for arguments: whole numbers from ``least`` to ``most``, which are called ``what``."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return int(text)

    return read


def catch_errors(call: Callable[[], int]) -> int:
    """Do ``call`` and return its exit code; an error becomes one line on standard error and a code.

    So does a package that this Python lacks, where ``call`` imports it and not the module around it, and what a file of
    the user's raises, wherever that is called.
    """
    try:
        code = call()
        print(end="", flush=True)  # what is still buffered may find a closed pipe
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        end = _end_of(error)
        if end is None:
            raise
        text, code = end
        _print_line("; ".join([text, *getattr(error, "__notes__", [])]))
    return code


def entry_point(main: Callable[[list[str]], int]) -> Callable[..., int]:
    """Have ``main`` be :func:`catch_errors`, and given the command line's arguments where it is called without any."""

    @wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        if isinstance(sys.stdout, io.TextIOWrapper):  # bars and texts are no reason to fail where it is not UTF-8
            sys.stdout.reconfigure(errors="replace")
        return catch_errors(lambda: main(sys.argv[1:] if arguments is None else list(arguments)))

    return run


@contextlib.contextmanager
def end_with_reader() -> Iterator[None]:
    """End the program without a word, by SIGPIPE as others do, once nobody reads what the block prints (``| head``).

    For programs that print and do nothing else.
    """
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
        print(end="", flush=True)
    finally:
        signal.signal(signal.SIGPIPE, before)


def end_with_parent(number: int) -> None:
    """Have this process get the signal ``number`` when the thread that started it ends, however that is."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


CLOSED = "failed: standard output was closed before the end: the program that read it has ended"


def _end_of(error: BaseException) -> tuple[str, int] | None:
    """Return the line and the exit code of an error; None for one that nobody has thought of."""
    end: tuple[str, int] | None = None
    match error:
        case SignalExit():
            end = f"stopped by {error.signal}", error.exit_code
        case ConfigError():
            end = f"error: {error}", 2
        case RunFailed() | ControlLost():
            end = f"failed: {error}", 1
        case ModuleNotFoundError() if (package := (error.name or "").partition(".")[0]) not in ("", "gkd"):
            do = "./launch/quickstart.sh installs what is needed into .venv; then use .venv/bin/python"
            end = f"error: {sys.executable} has no package {package}: {do}", 2
        case OSError() if _is_closed(sys.stdout):
            end = CLOSED, 1
        case OSError():  # a full disk, a directory that is gone
            where = f": {error.filename}" if error.filename else ""
            end = f"failed: {error.strerror or error}{where}", 1
        case SystemExit() if isinstance(error.__context__, BrokenPipeError):  # which rich makes of it
            end = CLOSED, 1
        case KeyboardInterrupt():
            end = "stopped by Ctrl-C", 130
        case Exception() | SystemExit() if describe_place("".join(traceback.format_tb(error.__traceback__))):
            end = f"failed: {describe_raised(error)}", 1
    return end


def _print_line(line: str) -> None:
    """Print a line on standard error, where somebody still reads that."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
    for stream in (sys.stdout, sys.stderr):
        _is_closed(stream)


def _is_closed(stream: IO[str] | None) -> bool:
    """Return whether nobody reads a stream any more; what is buffered for it then goes nowhere, at the program's end
    too.
    """
    try:
        if stream is None:  # closed before the program began
            return False
        descriptor, poll = stream.fileno(), select.poll()
    except (OSError, ValueError):  # none of the system's
        return False
    poll.register(descriptor, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
    return True
