"""Seconds of a step with imposed times, over those of its longest stage alone: streaming and staleness, in turn.

The real loop, the real handing out of prompts and the real accumulation of chunks, on real Ray workers; an engine that
takes lognormal times for its responses, a scorer and an actor that sleep. So that two cores are enough.

    python tests/benchmarks/overlap.py [--steps 12]
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from gkd.actor.group import ActorGroup
from gkd.algorithms.aggregation import Totals
from gkd.cluster.group import Group, gather
from gkd.cluster.reserve import RemoteWorker
from gkd.config import Config, load
from gkd.data.model_info import ModelInfo
from gkd.data.stream import PromptStream
from gkd.driver.checkpoint import State
from gkd.driver.saving import Checkpoints
from gkd.driver.trainer import RunLog, train
from gkd.inference.engine import EngineSpec, InferenceEngine
from gkd.observability.metrics import JsonLines
from gkd.observability.timeline import Timeline
from gkd.rollout import pipeline
from gkd.rollout import worker as rollout_worker
from gkd.rollout.group import RolloutGroup
from gkd.types import Prompt, Sample, SampleRequest, Scoring, TrainingSample
from tests.weights.reports import reports

SAMPLES, SLOTS, SIGMA, CHUNKS = 64, 32, 0.5, 8
MEAN_TOKENS = 100


@dataclass(frozen=True)
class Times:
    """Seconds that a step's sampling, scoring and updating take by themselves, roughly."""

    sample: float
    score: float
    update: float


BOUND = {"rollout": Times(1.0, 0.1, 0.5), "actor": Times(0.5, 0.1, 1.0), "teacher": Times(0.5, 1.0, 0.5)}


class SleepingEngine(InferenceEngine[SampleRequest, Sample]):
    """Has each response ready after its own time, lognormal and the same for one seed."""

    can_sample = True

    def __init__(self, spec: EngineSpec) -> None:
        self.second_a_token = 0.0
        self.running: list[tuple[float, int, SampleRequest, int]] = []

    def add(self, key: int, request: SampleRequest) -> None:
        drawn = np.random.default_rng(request.seed).lognormal(-(SIGMA**2) / 2, SIGMA)
        n = max(1, min(400, round(MEAN_TOKENS * drawn)))
        heapq.heappush(self.running, (time.monotonic() + n * self.second_a_token, key, request, n))

    def busy(self) -> bool:
        return bool(self.running)

    def step(self) -> list[tuple[int, Sample]]:
        time.sleep(0.005)
        self.forward_passes += 1
        done = []
        while self.running and self.running[0][0] <= time.monotonic():
            _, key, request, n = heapq.heappop(self.running)
            arrays = np.ones(n, np.int32), np.zeros(n, np.float32)
            done.append((key, Sample.single_turn(request, *arrays, self.version, "stop")))
        return done


class Rollout(rollout_worker.RolloutWorker):
    """The real worker, whose samples are scored one after the other."""

    def __init__(self, config: Config, rank: int) -> None:
        pipeline.load_tokenizer = lambda *_: None
        super().__init__(config, EngineSpec.for_rollout(config, "", ModelInfo(1, 1, [], 1), 1, rank, "cpu"))
        deliver, self.second_a_sample, self.free = self.pipeline.submit, 0.0, 0.0

        def submit(sample: Sample) -> None:
            sample = replace(sample, request=replace(sample.request, scoring=Scoring()))  # by nobody but this sleep
            self.free = max(self.free, time.monotonic()) + self.second_a_sample
            threading.Timer(self.free - time.monotonic(), deliver, [sample]).start()

        self.pipeline.submit = submit  # type: ignore[method-assign]

    def impose(self, times: Times) -> None:
        self.engine.second_a_token = times.sample / (MEAN_TOKENS * SAMPLES / SLOTS)
        self.second_a_sample = times.score / SAMPLES

    def load(self, version: int) -> None:
        self._between_steps(self._become_idle, "load")
        self.engine.version = version


class Actor:
    """Sleeps for every token."""

    def impose(self, times: Times) -> None:
        self.second_a_token = times.update / (SAMPLES * (MEAN_TOKENS + 1))

    def accumulate(self, samples: Sequence[TrainingSample], *_: Any) -> float:
        seconds = sum(sample.n_tokens for sample in samples) * self.second_a_token
        time.sleep(seconds)
        return seconds

    def apply(self, totals: Totals, step: int) -> dict[str, float]:
        return {"actor/loss": 0.0}

    def update(self, samples: Sequence[TrainingSample], *_: Any) -> dict[str, float]:
        self.accumulate(samples)
        return self.apply(Totals(), 0)


def group_of(name: str, target: str, *arguments: Any) -> Group:
    group = Group(name, (RemoteWorker.options(num_cpus=0).remote(),), tuple(reports(name, f"GPU-{name}")))
    gather([group.submit_build(target, [arguments])], 120)
    return group


def run(rollout_group: Group, actor_group: Group, config: Config, times: Times) -> list[dict[str, float]]:
    """Rows of metrics.jsonl."""
    rollout, actor = RolloutGroup(rollout_group, config), ActorGroup(actor_group, config, "", lambda: actor_group)
    rollout_group.control("impose", times, timeout_s=30)
    actor_group.call("impose", times, timeout_s=30)
    parts: Any = SimpleNamespace(
        prompts=PromptStream([Prompt(i, np.array([i], np.int32), "") for i in range(SAMPLES)], 0),
        rollout=rollout, actor=actor, vocab_size=50, n_gpus=2, report=list,
        validation=SimpleNamespace(run=dict), val_sets=SimpleNamespace(run=lambda step: {}, sets=[]),
        sync=SimpleNamespace(push=lambda: rollout.tell("load", actor.version, timeout_s=60, what="loading")),
    )  # fmt: skip
    quiet: Any = SimpleNamespace(write=lambda *_: None, step=lambda *_: None)
    with tempfile.TemporaryDirectory() as path:
        file = Path(path, "metrics.jsonl")
        with JsonLines(file) as metrics:
            checkpoints = Checkpoints(config, Path(path), time.monotonic(), {})
            timeline = Timeline(Path(path, "timeline.json"), 0)
            train(config, parts, RunLog(metrics, quiet, quiet, checkpoints, timeline), State())
        return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    base = load(
        {
            "rollout": {"engine": "tests.benchmarks.overlap:SleepingEngine", "max_num_seqs": SLOTS},
            "trainer": {"total_steps": steps, "batch_size": SAMPLES, "save_minutes": None, "val_every": 10_000},
            "actor": {"max_tokens_per_micro_batch": SAMPLES * (MEAN_TOKENS + 1) // CHUNKS},
        }
    )
    actor = group_of("actor", "tests.benchmarks.overlap:Actor")
    print(f"{'bound by':10} {'streaming':10} {'staleness':>10} {'s/step':>8} {'over its longest stage':>24}")
    for bound, times in BOUND.items():
        for streaming, staleness in ((False, 0), (True, 0), (False, 1), (True, 1), (True, 2)):
            schedule = base.schedule.model_copy(update={"streaming": streaming, "max_staleness": staleness})
            config = base.model_copy(update={"schedule": schedule})
            rollout = group_of("rollout", "tests.benchmarks.overlap:Rollout", config, 0)
            rows = run(rollout, actor, config, times)[2:-2]
            step = statistics.median(row["timing_s/step"] for row in rows)
            if not streaming and not staleness:  # where nothing overlaps but scoring
                longest = max(
                    *(statistics.median(row[f"timing_s/{stage}"] for row in rows) for stage in ("generate", "update")),
                    times.score,
                )
            print(f"{bound:10} {streaming!s:10} {staleness:10} {step:8.2f} {step / longest:24.2f}", flush=True)
            ray.kill(rollout.workers[0])
    ray.shutdown()


if __name__ == "__main__":
    main()
