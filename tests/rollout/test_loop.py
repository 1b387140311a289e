"""The thread of an engine: whoever waits for it hears of its end at once."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from gkd.cluster.workers.failure import WorkerHung
from gkd.errors import RunFailed
from gkd.rollout.loop import EngineLoop


class Engine:
    """Has lost a process, or not."""

    version = 0

    def __init__(self, lost: bool) -> None:
        self.lost = lost

    def has_lost_process(self) -> bool:
        return self.lost


@pytest.mark.parametrize(("lost", "kind"), [(False, RunFailed), (True, WorkerHung)])
def test_a_call_that_waits_as_the_loop_ends_is_answered(lost: bool, kind: type[Exception]) -> None:
    engine: Any = Engine(lost)
    loop, steps, failures = EngineLoop(engine, 3, 600.0), threading.Event(), list[BaseException]()

    def step() -> None:
        steps.wait(60)
        raise ValueError("step 7")

    def serve() -> None:
        with pytest.raises((ValueError, WorkerHung)):
            loop.serve(step, lambda: True)

    def call() -> None:
        try:
            loop.call(lambda: None, "pause")
        except Exception as error:
            failures.append(error)

    serving, calling = threading.Thread(target=serve), threading.Thread(target=call)
    serving.start()
    time.sleep(0.05)
    calling.start()
    while not len(loop):
        time.sleep(0.01)
    steps.set()
    for thread in (calling, serving):
        thread.join(60)
        assert not thread.is_alive()
    call()  # afterwards as well
    assert [type(failure) for failure in failures] == [kind, kind]
    assert all("7" in str(failure) for failure in failures)
