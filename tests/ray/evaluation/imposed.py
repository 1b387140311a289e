"""A rollout worker around an engine whose every answer takes as many passes as every other, each a fixed time."""

from __future__ import annotations

import time

import numpy as np

from gkd.config import Config
from gkd.data.model_info import ModelInfo
from gkd.inference.engine import EngineSpec, InferenceEngine
from gkd.rollout import pipeline
from gkd.rollout import worker as rollout_worker
from gkd.types import Sample, SampleRequest

PASSES, PASS_S = 60, 0.02


class ImposedEngine(InferenceEngine[SampleRequest, Sample]):
    """Continuous batching: every request is answered after :data:`PASSES` passes of :data:`PASS_S` seconds."""

    can_sample = True

    def __init__(self, spec: EngineSpec) -> None:
        self.left: dict[int, int] = {}
        self.requests: dict[int, SampleRequest] = {}

    def add(self, key: int, request: SampleRequest) -> None:
        self.requests[key], self.left[key] = request, PASSES

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[tuple[int, Sample]]:
        time.sleep(PASS_S)
        self.forward_passes += 1
        self.left = {key: left - 1 for key, left in self.left.items()}
        ids, logprobs = np.ones(2, np.int32), np.zeros(2, np.float32)
        done = [key for key, left in self.left.items() if left == 0]
        for key in done:
            del self.left[key]
        return [(k, Sample.single_turn(self.requests.pop(k), ids, logprobs, self.version, "stop")) for k in done]


class ImposedRollout(rollout_worker.RolloutWorker):
    """The real worker, without a tokenizer."""

    def __init__(self, config: Config, rank: int) -> None:
        pipeline.load_tokenizer = lambda *_: None
        super().__init__(config, EngineSpec.for_rollout(config, "", ModelInfo(64, None, [], 1), 64, rank, "cpu"))
