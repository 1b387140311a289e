"""A process that computes rewards, several at a time of an async function, and is replaced when it hangs or dies.

Each has a pipe of its own: whatever happens to one, in the middle of whatever, the others do not notice.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import multiprocessing
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from gkd.config import Reward
from gkd.config.base import LONGEST_S
from gkd.errors import describe_error, describe_raised
from gkd.rewards.adapters import resolve
from gkd.rewards.completion import DOES_NOT_APPLY, Completion, RewardCallable

START_TIMEOUT_S = 300
"""Time a new process has to import the functions: a user's may import torch, on a busy machine."""

GRACE_S = 2.0
"""Time beyond ``reward.timeout_s`` after which a process whose async function blocks it is ended."""

_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from multiprocessing.connection import Connection
from gkd.rewards.process import serve
serve(Connection(int(sys.argv[2])))
"""
"""What the process runs: the modules of this one are found there as well."""

Timed: TypeAlias = tuple[float | None, float]
"""A reward, None of a function that does not apply to the sample, and how long it took, seconds."""


CompletionGroup: TypeAlias = Sequence[Completion]
"""What a function is called with at a time: all samples of a prompt, or one sample."""
_RewardRequest: TypeAlias = tuple[int, str, CompletionGroup, float]
"""A number, the name of a function, what it is called with, and its time limit, seconds."""


class RewardError(Exception):
    """A function gave no reward: what it raised and where, that it hung, or that its process died."""


class RewardProcess:
    """Evaluates the functions of ``settings`` that no group of workers gives, in a process of its own.

    Its temporary files are in one of its own in ``temporary``, None for the usual directory of such.
    """

    def __init__(self, settings: Reward, temporary: str | None = None) -> None:
        self._settings, self._temporary = settings, temporary
        self._ending = False
        self._due: dict[int, tuple[float, float]] = {}  # of what it computes: until when (time.monotonic), its limit
        self._start()

    def send(self, number: int, name: str, group: CompletionGroup, timeout_s: float) -> None:
        """Have one function rate a completion, or those that it rates together; :meth:`receive` gives it by ``number``.

        An async function rates any number of groups at the same time, any other one. ``timeout_s``: of each completion.
        Raises RewardError where there is no process that could.
        """
        if self._ending:
            raise RewardError("CancelledError: the rewards are no longer computed")
        if not self._due and not self._is_ready():  # ended while it had nothing to do, which costs nobody anything
            self._restart()
            if not self._is_ready():
                raise RewardError(f"ChildProcessError: the process of the rewards does not start: {self._end()}")
        limit_s = timeout_s * len(group)
        with suppress(OSError):  # it has ended, or reads nothing, which is found when it is to answer
            self._connection.send((number, name, group, limit_s))
        self._due[number] = time.monotonic() + limit_s + GRACE_S * self._settings.is_async(name), limit_s

    def receive(self, wait_s: float) -> tuple[int, list[Timed | str]] | None:
        """Return the number of a group and its rewards, with how long they took, or what its function raised.

        None where nothing has come within ``wait_s``. Raises RewardError, which is of all groups under way, when one
        needs longer than it may, or ends the process.
        """
        due, limit_s = min(self._due.values())
        try:
            answer = self._read(max(0.0, min(wait_s, due - time.monotonic())))
        except (EOFError, OSError):
            end = self._end()
            self._restart()
            raise RewardError(f"ChildProcessError: the process that computed it {end}") from None
        if answer is None:
            if time.monotonic() < due:
                return None
            self._restart()
            raise RewardError(_describe_delay(limit_s))
        number, values = answer
        del self._due[number]
        return number, [value if isinstance(value, str) else (value[0], value[1]) for value in values]

    def end(self) -> None:
        """End the process for good, whatever it is doing; from any thread. An evaluation under way fails."""
        self._ending = True
        self._process.kill()

    def close(self) -> None:
        """Give back what is left of a process that was ended."""
        self._process.kill()
        self._process.wait()
        self._connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self) -> None:
        self._connection, child_end = multiprocessing.Pipe()
        # A process that is stopped reads nothing, and a long completion would be waited for here.
        with socket.socket(fileno=os.dup(self._connection.fileno())) as pipe:
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", START_TIMEOUT_S, 0))
        # It goes with the process, however that ends; where that ends with its parent, with ``temporary``.
        self._directory = tempfile.mkdtemp(prefix="gkd-rewards-", dir=self._temporary)
        # multiprocessing would have it run the main module first: a user's script from Python, once more.
        path = [entry for entry in sys.path if isinstance(entry, str)]  # others, such as a Path, Python leaves out, too
        arguments = [sys.executable, "-c", _PROGRAM, json.dumps(path), str(child_end.fileno())]
        with child_end:  # closed here, so that reading ends when the process does; which another thread may end
            self._process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, pass_fds=[child_end.fileno()])
        with suppress(OSError):  # it has ended, which is found when it is to answer
            self._connection.send((self._settings.model_dump(), self._directory))
        self._greeted = False

    def _restart(self) -> None:
        self._due.clear()
        self.close()
        self._start()
        if self._ending:
            self._process.kill()

    def _is_ready(self) -> bool:
        """Return whether the process takes a completion now. Raises RewardError when it cannot import its functions."""
        if self._process.poll() is not None:
            return False
        if self._greeted:
            return True
        try:
            failure = self._read(START_TIMEOUT_S)
        except (EOFError, OSError):
            return False
        if failure:
            raise RewardError(failure)
        self._greeted = failure == ""
        return self._greeted

    def _read(self, timeout_s: float) -> Any:
        """Return what the process sends next, None for nothing in time. Raises EOFError or OSError when it ends."""
        if not self._connection.poll(min(timeout_s, LONGEST_S)):  # of many completions
            return None
        return json.loads(self._connection.recv_bytes())

    def _end(self) -> str:
        """Return how the process ended."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "stopped answering"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def serve(connection: Connection) -> None:
    """Evaluate what comes until the other side is gone.

    First come the settings, and the directory of its temporary files, which goes then.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends this process itself
    settings, tempfile.tempdir = connection.recv()
    try:
        _evaluate_all(connection, settings)
    finally:
        shutil.rmtree(tempfile.tempdir, ignore_errors=True)


def _evaluate_all(connection: Connection, settings: dict[str, object]) -> None:
    """Evaluate what comes. Sends "" once ready, then the number of each group with its Timed or texts of errors."""
    functions: dict[str, RewardCallable] = {}
    try:
        reward = Reward.model_validate(settings)
        of_groups = reward.group_functions()
        functions |= {name: resolve(name, reward) for name in reward.functions_scored_by(None)}
    except BaseException as error:
        connection.send_bytes(json.dumps(describe_raised(error)).encode())
        return
    connection.send_bytes(b'""')
    answer = partial(_send_answers, connection, os.getpid())
    request: _RewardRequest | None = None
    with asyncio.Runner() as runner:  # one loop, so that a function may keep a connection
        while True:
            try:
                number, name, group, _ = request = request or connection.recv()
            except (EOFError, OSError):
                return
            if reward.is_async(name):
                request = runner.run(_evaluate_as_they_come(functions, of_groups, reward, connection, request, answer))
            else:  # outside of the loop, as the function may run one of its own
                answer(number, _evaluate(functions[name], group, name in of_groups, runner.run))
                request = None


def _send_answers(connection: Connection, process: int, number: int, answers: list[Timed | str]) -> None:
    _require_process(process)
    with suppress(OSError):  # nobody is left to read it, which is found where the next request is to come
        connection.send_bytes(json.dumps([number, answers]).encode())


def _require_process(process: int) -> None:
    """End a copy that a function has made of this process, whose answers nobody awaits."""
    if os.getpid() != process:
        os._exit(0)


def _evaluate(
    function: RewardCallable, group: CompletionGroup, whole: bool, run: Callable[[Any], Any]
) -> list[Timed | str]:
    """Return what a function gives ``group``, which is a single completion unless it rates the ``whole``.

    ``run`` awaits what it gives where that has to be, as of a function that a decorator hides to be async.
    """
    started = time.monotonic()
    try:
        result = function(group if whole else group[0])
        if inspect.iscoroutine(result):
            result = run(result)
        return _time_rewards(result, len(group), whole, started)
    except BaseException as error:  # a user's function may raise anything, SystemExit included
        return [describe_raised(error)] * len(group)


async def _evaluate_as_they_come(
    functions: Mapping[str, RewardCallable],
    of_groups: Collection[str],
    reward: Reward,
    connection: Connection,
    first: _RewardRequest,
    answer: Callable[[int, list[Timed | str]], None],
) -> _RewardRequest | None:
    """Evaluate async functions for what comes, each with a time limit, until none is under way.

    Each is answered as soon as it is known: one that takes long keeps no other one from its place. Returns a request
    for another function where one has come meanwhile, as it may once the last one is answered.
    """
    loop, process = asyncio.get_running_loop(), os.getpid()
    tasks: set[asyncio.Task[None]] = set()
    others: list[_RewardRequest] = []

    async def evaluate(number: int, name: str, group: CompletionGroup, timeout_s: float) -> None:
        answer(number, await _evaluate_async(functions[name], group, timeout_s, name in of_groups))

    def read() -> None:
        _require_process(process)
        try:
            request = connection.recv()
        except (EOFError, OSError):
            loop.remove_reader(connection.fileno())
            for task in tasks:
                task.cancel()
            return
        if reward.is_async(request[1]):
            tasks.add(loop.create_task(evaluate(*request)))
        else:
            loop.remove_reader(connection.fileno())
            others.append(request)

    loop.add_reader(connection.fileno(), read)
    try:
        tasks.add(loop.create_task(evaluate(*first)))
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            tasks -= done
            for task in done:
                task.result()
    finally:
        loop.remove_reader(connection.fileno())
    return others[0] if others else None


async def _evaluate_async(
    function: RewardCallable, group: CompletionGroup, timeout_s: float, whole: bool = False
) -> list[Timed | str]:
    """Evaluate an async function with a time limit; as :func:`_evaluate`."""
    started = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s) as limit:
            result = await function(group if whole else group[0])  # type: ignore[misc]
        return _time_rewards(result, len(group), whole, started)
    except BaseException as error:
        return [_describe_delay(timeout_s, error) if limit.expired() else describe_raised(error)] * len(group)


def _time_rewards(result: Any, n: int, whole: bool, started: float) -> list[Timed | str]:
    """Return each of the rewards that a function gave ``n`` completions, or why it is none, and the seconds since.

    Raises ValueError where there are not as many.
    """
    values, seconds = list(result) if whole else [result], time.monotonic() - started
    if len(values) != n:
        raise ValueError(f"{len(values)} rewards for {n} completions")
    rewards: list[Timed | str] = []
    for value in values:
        try:
            if value is None:
                raise ValueError("the reward is None")
            reward = None if value is DOES_NOT_APPLY else require_finite(float(value))
            rewards.append((reward, seconds))
        except (TypeError, ValueError) as error:
            rewards.append(describe_error(error))
    return rewards


def _describe_delay(timeout_s: float, error: BaseException | None = None) -> str:
    """Return that there was no reward in time, with what the function that was cancelled notes of it."""
    notes = getattr(error and error.__cause__, "__notes__", [])
    return "; ".join([f"TimeoutError: no reward within {timeout_s:g} s (reward.timeout_s)", *notes])


def require_finite(value: float) -> float:
    """Return ``value``. Raises ValueError where it is not a finite number."""
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}")
    return value
