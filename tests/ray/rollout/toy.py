"""A rollout worker around an engine that samples nothing, and stops in the middle where it is told to."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np

from gkd.config import Config
from gkd.config.device import Device
from gkd.data.model_info import ModelInfo
from gkd.inference.engine import EngineSpec, InferenceEngine
from gkd.rollout import output_queue, pipeline
from gkd.rollout import worker as rollout_worker
from gkd.types import Sample, SampleRequest


class ToyEngine(InferenceEngine[SampleRequest, Sample]):
    """Needs 20 passes of 50 ms for all that it has; once ``stuck`` it hangs for good in the next one, and fails there
    where it has lost a process.
    """

    can_sample = True

    def __init__(self, spec: EngineSpec) -> None:
        self.stuck = self.loses_process = False
        self.requests: dict[int, SampleRequest] = {}
        self.left = 0

    def add(self, key: int, request: SampleRequest) -> None:
        self.requests[key] = request
        self.left = 20

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[tuple[int, Sample]]:
        if self.loses_process:
            raise RuntimeError("Executor failed.")
        if self.stuck:
            threading.Event().wait()
        time.sleep(0.05)
        self.forward_passes += 1
        self.left -= 1
        if self.left:
            return []
        ids, logprobs = np.ones(2, np.int32), np.zeros(2, np.float32)
        done = [
            (key, Sample.single_turn(request, ids, logprobs, self.version, "stop"))
            for key, request in self.requests.items()
        ]
        self.requests.clear()
        return done

    def has_lost_process(self) -> bool:
        return self.loses_process


class ToyRollout(rollout_worker.RolloutWorker):
    """The real worker, whose configuration names :class:`ToyEngine`."""

    def __init__(self, config: Config, rank: int, device: Device = "cpu") -> None:
        pipeline.load_tokenizer = lambda *_: None
        super().__init__(config, EngineSpec.for_rollout(config, "", ModelInfo(1, 1, [], 1), 1, rank, device))
        self.sends_half = False

    def pid(self) -> int:
        return os.getpid()

    def load(self, version: int) -> None:
        self.loop.call(lambda: self.sampler.release(version), "load")

    def send_at_most(self, n: int) -> None:
        output_queue.MOST_BATCHES = n

    def get_stuck(self) -> None:
        self.engine.stuck = True

    def lose_process(self) -> None:
        self.engine.loses_process = True

    def report(self) -> dict[str, Any]:
        return {"memory": {"process_gb": 1.0 + self.rank}, "clock": 0.0, "spans": []}

    def stream_samples(self) -> Any:
        """Have the process stop where arrays have been sent and their numbers have not, if it is to."""
        for item in super().stream_samples():
            if self.sends_half and item and hasattr(item[0], "key"):  # no arrays come where nothing is scored yet
                os.kill(os.getpid(), signal.SIGSTOP)
                threading.Event().wait()  # other threads may get the signal first
            yield item

    def send_half(self) -> None:
        self.sends_half = True


class ToyScorer:
    """What a watch sees of a replica that always has work, and does it."""

    def __init__(self, *_: Any) -> None:
        self._began = time.monotonic()

    def pid(self) -> int:
        return os.getpid()

    def serve(self) -> None:
        threading.Event().wait()

    def progress(self) -> tuple[int, int]:
        return int(10 * (time.monotonic() - self._began)), 1
