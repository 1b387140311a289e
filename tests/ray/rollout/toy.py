"""A rollout worker around an engine that samples nothing, and stops in the middle where it is told to."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np

from gkd.config import Config
from gkd.data.model_info import ModelInfo
from gkd.inference.engine import EngineSpec, Finished
from gkd.rollout import worker as rollout_worker
from gkd.types import Request


class ToyEngine:
    """Needs 20 passes of 50 ms for all that it has, and hangs for good in the next one once ``stuck``."""

    def __init__(self) -> None:
        self.forward_passes, self.stuck = 0, False
        self.jobs: dict[int, Request] = {}
        self.left = 0

    def add(self, key: int, request: Request) -> None:
        self.jobs[key] = request
        self.left = 20

    def busy(self) -> bool:
        return bool(self.jobs)

    def step(self) -> list[Finished]:
        if self.stuck:
            threading.Event().wait()
        time.sleep(0.05)
        self.forward_passes += 1
        self.left -= 1
        if self.left:
            return []
        done = [Finished(key, np.ones(2, np.int32), np.zeros(2, np.float32), "stop") for key in self.jobs]
        self.jobs.clear()
        return done


class ToyRollout(rollout_worker.RolloutWorker):
    """The real worker around a :class:`ToyEngine`."""

    def __init__(self, config: Config, rank: int) -> None:
        rollout_worker._engine = lambda *_: ToyEngine()
        rollout_worker.load_tokenizer = lambda *_: None
        super().__init__(config, EngineSpec("", ModelInfo(1, 1, [], 1), 1, rank, "cpu"))
        self.sends_half = False

    def pid(self) -> int:
        return os.getpid()

    def get_stuck(self) -> None:
        self.engine.stuck = True

    def memory(self) -> dict[str, float]:
        return {"process_gb": 1.0 + self.rank}

    def records(self) -> Any:
        """Have the process stop where samples have been sent and their records have not, if wanted."""
        for item in super().records():
            if self.sends_half and hasattr(item[0], "key"):
                os.kill(os.getpid(), signal.SIGSTOP)
                threading.Event().wait()  # other threads may get the signal first
            yield item

    def send_half(self) -> None:
        self.sends_half = True
