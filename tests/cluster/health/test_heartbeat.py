"""When an engine counts as one that hangs. Its worker's answers and the time are made up."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gkd.cluster.health import heartbeat
from gkd.cluster.health.heartbeat import Heartbeat


class Worker:
    """Answers at once with its passes and what is unfinished."""

    progress = (5, 1)

    def __len__(self) -> int:
        return 1

    def select(self, engines: list[int]) -> Worker:
        return self

    def submit_control(self, method: str) -> Any:
        return SimpleNamespace(refs=(method,))


@pytest.fixture
def beat(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Heartbeat, list[float], Worker]]:
    """The watch of one engine with 10 s, the time, and the engine's worker."""
    now, worker = [100.0], Worker()
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now[0]))
    answers = SimpleNamespace(wait=lambda refs, timeout: (refs, []), get=lambda ref, timeout: worker.progress)
    monkeypatch.setattr(heartbeat, "ray", answers)
    watched: Any = worker
    yield Heartbeat(watched, timeout_s=10.0), now, worker


def test_silence_of_an_earlier_step_counts_no_more_once_an_engine_had_nothing_to_do(
    beat: tuple[Heartbeat, list[float], Worker],
) -> None:
    """Others are looked at meanwhile, as where later steps are sampled ahead."""
    watch, now, worker = beat

    def look(busy: list[int]) -> list[int]:
        now[0] += 1.0
        return watch.find_hanging(busy)

    while watch.measure_silence_s(0) < 10.0:  # a step that takes nearly too long
        assert look([0]) == []
    worker.progress = (6, 0)
    assert look([]) == []
    worker.progress = (6, 1)
    hanging = [look([0]) for _ in range(30)]  # it is given work, and hangs
    assert hanging.index([0]) > 9


def test_an_engine_whose_samples_are_all_with_scorers_does_not_hang(
    beat: tuple[Heartbeat, list[float], Worker],
) -> None:
    watch, now, worker = beat
    worker.progress = (6, 0)  # and stays so
    for _ in range(40):
        now[0] += 1.0
        assert watch.find_hanging([0]) == []


def test_no_engine_hangs_because_the_driver_was_kept_from_looking(beat: tuple[Heartbeat, list[float], Worker]) -> None:
    watch, now, _ = beat
    for _ in range(6):  # in which it has answered, and answers the same again
        now[0] += 1.0
        assert watch.find_hanging([0]) == []
    now[0] += 600.0  # as of a machine that was suspended
    assert watch.find_hanging([0]) == [] and watch.measure_silence_s(0) < 10.0
