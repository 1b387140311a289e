"""Limits of the clients of a server in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from gkd.scoring import wire
from tests.scoring.conftest import Connect, Process, a_score, greet
from tests.scoring.test_client_limits import MIB, answers, served_for


@pytest.fixture(scope="module")
def attacked() -> Iterator[Process]:
    """A server that gives each client 2 MiB for what it is sending, and 8 MiB for what it has not read."""
    process = Process(max_length=20_000, partial_bytes=2 * MIB, unread_bytes=8 * MIB)
    yield process
    process.kill()


def memory(process: Process, which: str = "VmHWM") -> int:
    """Bytes in memory, the most since the last call with "VmRSS"."""
    if which == "VmRSS":
        Path(f"/proc/{process.popen.pid}/clear_refs").write_text("5")
    lines = Path(f"/proc/{process.popen.pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(which))


@pytest.mark.parametrize(("n", "size"), [(40, 4 * MIB), (60_000, 4096), (3_000_000, 0)])
def test_a_message_of_many_frames_is_cut_off(
    attacked: Process, connect: Connect, dealer: Any, n: int, size: int
) -> None:
    """Frames that are too large, frames as large as a request, and frames of nothing."""
    client = connect(attacked.address, heartbeat_s=1.0, request_timeout_s=20.0)
    assert answers(client)
    before = memory(attacked, "VmRSS")
    attacker, frame = dealer(attacked.address), bytes(size)
    for _ in range(n - 1):
        attacker.send(frame, zmq.SNDMORE, copy=False)
    attacker.send(frame)
    served_for(client, 1.5)
    # Sent whole they are 170, 240 and 190 MiB: a frame of nothing is 64 bytes in memory. How much arrives between two
    # looks of the server depends on the machine.
    assert memory(attacked) - before < 80 * MIB


def test_a_client_that_never_reads_is_passed_over(attacked: Process, connect: Connect, dealer: Any) -> None:
    """Each asks for 40 answers of 5 MB."""
    client = connect(attacked.address, request_timeout_s=20.0)
    assert answers(client)
    before, large = memory(attacked, "VmRSS"), a_score(top_k=32, n_prompt=1, n_response=19_000)
    for _ in range(4):
        attacker = dealer(attacked.address, rcvhwm=1, rcvbuf=4096)
        greet(attacker)
        for id in range(40):
            attacker.send(wire.encode_request(id, 60.0, large))
    served_for(client, 2.0)
    assert memory(attacked) - before < 4 * 8 * MIB + 64 * MIB
