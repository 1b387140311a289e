"""Servers of the table engine, in this process and in others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from gkd.errors import RunFailed
from gkd.inference.requests import ScoreRequest
from gkd.scoring import wire
from gkd.scoring.address import Key, secure_client
from gkd.scoring.client import ScoringClient
from gkd.scoring.server import ScoringServer
from tests.scoring.table import KEY, POISON, VOCABULARY, TableEngine, expected

ROOT = Path(__file__).parents[2]


def a_score(
    seed: int = 0, top_k: int = 4, n_prompt: int = 5, n_response: int = 7, temperature: float = 1.0
) -> ScoreRequest:
    """A request that the table engine answers."""
    ids = np.random.default_rng(seed).integers(0, min(POISON, VOCABULARY), n_prompt + n_response).astype(np.int32)
    return ScoreRequest(ids, ((n_prompt, len(ids)),), top_k, temperature)


@dataclass
class Running:
    """A server on a thread of this process."""

    server: ScoringServer
    engine: Any
    stop: threading.Event
    thread: threading.Thread
    failure: list[BaseException]

    @property
    def port(self) -> int:
        return int(self.server.address.rsplit(":", 1)[1])

    def end(self) -> None:
        self.stop.set()
        if isinstance(self.engine, TableEngine):
            self.engine.hurry.set()  # nobody waits for what it works on
        self.thread.join(60)
        assert not self.thread.is_alive()


Serve = Callable[..., Running]
Connect = Callable[..., ScoringClient]


def all_right(futures: list[Any], timeout_s: float = 60.0) -> bool:
    """Whether the answers to ``a_score(0)``, ``a_score(1)``, ... are the table's."""
    return all(np.array_equal(f.result(timeout_s).ids, expected(a_score(i)).ids) for i, f in enumerate(futures))


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers in this process: ``serve(engine, port, host, key, tokenizer_hash)``."""
    started: list[Running] = []

    def start(
        engine: Any = None,
        port: int = 0,
        host: str = "127.0.0.1",
        key: Key = KEY,
        tokenizer_hash: str = "hash",
        **settings: Any,
    ) -> Running:
        engine = engine or TableEngine()
        server, stop = ScoringServer(engine, tokenizer_hash, host, port, key, **settings), threading.Event()
        failure: list[BaseException] = []

        def run() -> None:
            try:
                server.serve(stop)
            except RunFailed as error:
                failure.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        started.append(Running(server, engine, stop, thread, failure))
        return started[-1]

    yield start
    for running in started:
        running.end()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes clients that are closed at the end, which try three times."""
    clients: list[ScoringClient] = []

    def make(*addresses: str, tokenizer_hash: str = "hash", **settings: Any) -> ScoringClient:
        settings = {"key": KEY, "request_timeout_s": 20.0, "heartbeat_s": 0.5, "max_attempts": 3} | settings
        clients.append(ScoringClient(addresses, tokenizer_hash, **settings))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


class Process:
    """A server of the table engine in another process."""

    def __init__(self, port: int = 0, delay_s: float = 0.0, max_length: int = 100, **client_limits: float) -> None:
        arguments = [
            str(port),
            str(delay_s),
            str(max_length),
            json.dumps(client_limits),
            KEY.public.decode(),
            KEY.secret.decode(),
        ]
        command = [sys.executable, "-m", "tests.scoring.table", *arguments]
        self.popen = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout is not None
        self.address = self.popen.stdout.readline().strip()
        self.port = int(self.address.rsplit(":", 1)[1])

    def signal(self, number: int) -> None:
        os.kill(self.popen.pid, number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.popen.wait(60)
        self.popen.stdout.close()


Spawn = Callable[..., Process]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts :class:`Process`; what is left at the end is killed."""
    processes: list[Process] = []

    def start(*args: Any, **settings: Any) -> Process:
        processes.append(Process(*args, **settings))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


def greet(dealer: Any) -> None:
    """Have a bare socket greet the server it is connected to, which takes no requests before."""
    dealer.send(wire.encode(wire.Hello(wire.PROTOCOL)))
    assert isinstance(wire.decode(dealer.recv())[0], wire.Welcome)


@pytest.fixture
def dealer() -> Iterator[Callable[..., Any]]:
    """Makes bare sockets with the key, to do what no client would."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def make(address: str, key: Key = KEY, **options: int) -> Any:
        made = context.socket(zmq.DEALER)
        made.linger, made.rcvtimeo, made.sndtimeo = 0, 60_000, 60_000
        for name, value in options.items():
            setattr(made, name, value)
        secure_client(made, key)
        made.connect(address)
        return made

    yield make
    context.destroy(linger=0)
