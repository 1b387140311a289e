"""Seconds of a step with imposed times, streaming and staleness in turn: beside the plan's simulation of the same.

The real loop, the real handing out of prompts and the real accumulation of chunks, on real Ray workers; an engine that
takes lognormal times for its responses, a scorer and an actor that sleep. So that two cores are enough. The simulation
(:mod:`gkd.planning.simulation.events`) is given the same times, and the measured push.

    python tests/benchmarks/overlap.py [--steps 24] [--bound rollout actor teacher] [--staleness 0 1 2 4] [--scale 1]
        [--streaming no yes] [--in-flight] [--engines 1] [--val-every 4]

A step's longest stage is the longest, on average, of sampling a batch (by an engine that has nothing else: as measured
at staleness 0 without streaming, in a run of its own where that is not among the rows), scoring it and learning
from it. ``drain``: seconds a step that the actor waited for engines to finish before new weights; ``between``: what is
left of a step without waiting, updating, draining and pushing. Several ``--engines`` have the places of one between
them; ``--together`` has all of them drained before weights come to any, as by a collective transfer. ``--val-every``
validates, on as many prompts as a step has; the last column, seconds of the whole run, beside that of a run without
says what that costs. ``--timelines DIR`` keeps each run's timeline.json there, for tests/benchmarks/draw_timeline.py.

Exits with 1 where a step of staleness above 0 takes over 1.05 of its longest stage, or the simulation is off by 5 %.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from gkd.actor.group import ActorGroup
from gkd.algorithms.aggregation import Totals
from gkd.cluster.workers.activity import record_activity, report_here
from gkd.cluster.workers.group import Group, gather
from gkd.cluster.workers.reports import WorkerReports
from gkd.cluster.workers.reserve import RemoteWorker
from gkd.config import Config, load
from gkd.data.model_info import ModelInfo
from gkd.data.stream import PromptStream
from gkd.driver.checkpoints.checkpoint import RunState
from gkd.driver.checkpoints.saving import Checkpoints
from gkd.driver.groups.weight_sync import WeightSync
from gkd.driver.loop.parts import RunLog
from gkd.driver.loop.train import train
from gkd.driver.validation.early_stop import EarlyStop
from gkd.driver.validation.held_out import Validation
from gkd.durable import DirectoryIdentity
from gkd.inference.engine import EngineSpec, InferenceEngine
from gkd.inference.requests import ScoreRequest
from gkd.observability.metrics import JsonLines
from gkd.observability.timeline import Timeline
from gkd.planning.simulation.events import WARM_UP, simulate
from gkd.planning.simulation.run import SamplingGroup, ScoringGroup, SimulatedRun, Step, TrainingGroup
from gkd.rollout import pipeline
from gkd.rollout import worker as rollout_worker
from gkd.rollout.group import RolloutGroup
from gkd.types import Prompt, Sample, SampleRequest, TrainingSample, seed_of
from gkd.weights.object_store import ObjectStore
from tests.weights.reports import reports

SAMPLES, SLOTS, SIGMA, CHUNKS = 64, 32, 0.5, 8
MEAN_TOKENS = 100
WITHOUT_OVERLAP = 4  # steps that are measured for the longest stage alone
STEPS = 24  # some wait for a straggler: of an actor at staleness 1 8 steps are 1.037 of it by simulation, 100 are 1.032


@dataclass(frozen=True)
class Times:
    """Seconds that a step's sampling, scoring and updating take by themselves, roughly."""

    sample: float
    score: float
    update: float


BOUND = {"rollout": Times(1.0, 0.1, 0.5), "actor": Times(0.5, 0.1, 1.0), "teacher": Times(0.5, 1.0, 0.5)}


def length_of(seed: int) -> int:
    """Return the tokens of a response."""
    drawn = np.random.default_rng(seed).lognormal(-(SIGMA**2) / 2, SIGMA)
    return max(1, min(400, round(MEAN_TOKENS * float(drawn))))


def lengths_of(config: Config, step: int) -> list[int]:
    """Return the tokens of a step's responses."""
    return [length_of(seed_of(config.trainer.seed, step, place, 0)) for place in range(SAMPLES)]


class SleepingEngine(InferenceEngine[SampleRequest, Sample]):
    """Has each response ready after its own time, lognormal and the same for one seed."""

    can_sample = in_flight = True

    def __init__(self, spec: EngineSpec) -> None:
        self.second_a_token = 0.0
        self.running: list[tuple[float, int, SampleRequest, int]] = []

    def add(self, key: int, request: SampleRequest) -> None:
        n = length_of(request.seed)
        heapq.heappush(self.running, (time.monotonic() + n * self.second_a_token, key, request, n))

    def has_unfinished_requests(self) -> bool:
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


class SleepingScorer:
    """Has each sample scored after its time, one after the other, of those that wait the one of the lowest order."""

    def __init__(self) -> None:
        self.second_a_token, self.free = 0.0, 0.0
        self.queue: queue.PriorityQueue[tuple[tuple[float, int], float, float, Future[Any]]] = queue.PriorityQueue()
        threading.Thread(target=self.score, daemon=True).start()

    def submit(self, score: ScoreRequest, order: tuple[float, int]) -> Future[Any]:
        scored = Future[Any]()
        self.queue.put((order, time.monotonic(), len(score.token_ids) * self.second_a_token, scored))
        return scored

    def score(self) -> None:
        while True:
            _, submitted, seconds, scored = self.queue.get()
            self.free = max(self.free, submitted) + seconds
            time.sleep(max(0.0, self.free - time.monotonic()))
            scored.set_result(None)


class Rollout(rollout_worker.RolloutWorker):
    """The real worker, whose scorer and engine sleep."""

    def __init__(self, config: Config, rank: int) -> None:
        pipeline.load_tokenizer = lambda *_: None  # type: ignore[attr-defined]
        super().__init__(config, EngineSpec.for_rollout(config, "", ModelInfo(1, 1, [], 1), 1, rank, "cpu"))
        self.config, self.scorer = config, SleepingScorer()
        clients: dict[str, Any] = self.pipeline._clients
        clients["teacher"] = self.scorer

    def impose(self, times: Times) -> None:
        engine: Any = self.engine
        engine.second_a_token = times.sample / (MEAN_TOKENS * SAMPLES / SLOTS)
        n_engines = self.config.rollout.n_engines  # each has a scorer
        self.scorer.second_a_token = n_engines * times.score / (SAMPLES * (MEAN_TOKENS + 1))

    def load(self, version: int) -> None:
        self.loop.call(lambda: self._load(version), "load")

    def _load(self, version: int) -> None:
        if not self.config.schedule.in_flight:
            self.sampler.hold(in_flight=False)
        self.sampler.release(version)


class Actor:
    """Sleeps for every token."""

    def __init__(self) -> None:
        self.trainer = self

    def impose(self, times: Times) -> None:
        self.second_a_token = times.update / (SAMPLES * (MEAN_TOKENS + 1))

    def report(self) -> dict[str, Any]:
        return report_here()

    @record_activity("update")
    def accumulate(self, samples: Sequence[TrainingSample], *_: Any) -> float:
        seconds = sum(sample.n_tokens for sample in samples) * self.second_a_token
        time.sleep(seconds)
        return seconds

    def accumulate_chunks(self, chunks: Sequence[tuple[Sequence[TrainingSample], Sequence[float]]], _: int) -> float:
        return sum(self.accumulate(samples) for samples, _ in chunks)

    def apply(self, totals: Totals, step: int) -> dict[str, float]:
        return {"actor/loss": 0.0}

    @record_activity("validate")
    def evaluate(self, samples: Sequence[TrainingSample], *_: Any) -> dict[str, float]:
        """A third of what learning from them takes: a forward pass."""
        time.sleep(sum(sample.n_tokens for sample in samples) * self.second_a_token / 3)
        return {"distill/reverse_kl": 0.0}

    def update(self, samples: Sequence[TrainingSample], *_: Any) -> dict[str, float]:
        self.accumulate(samples)
        return self.apply(Totals(), 0)


class Sync(WeightSync):
    """Pushes nothing but the version."""

    def __init__(self, actor: ActorGroup, rollout: RolloutGroup, config: Config) -> None:
        self.actor, self.rollout, self.config = actor, rollout, config
        self._transfer = config.weights.transfer_class

    def push(self, engines: Sequence[int] | None = None) -> None:
        loaded = self.rollout.call_engines(
            "load", self.actor.version, timeout_s=60, activity="loading", engines=engines
        )
        self.rollout.mark_updated(dict.fromkeys(loaded, self.actor.version))


class Collective(ObjectStore):
    """Has all engines take weights at the same time."""

    collective = True


def group_of(name: str, target: str, arguments: Sequence[tuple[Any, ...]]) -> Group:
    workers = tuple(RemoteWorker.options(num_cpus=0).remote() for _ in arguments)
    group = Group(name, workers, tuple(reports(name, *(f"GPU-{name}-{i}" for i in range(len(workers))))))
    gather([group.submit_build(target, arguments)], 120)
    return group


def run(
    rollout_group: Group, actor_group: Group, config: Config, times: Times, kept: Path | None
) -> list[dict[str, float]]:
    """Rows of metrics.jsonl; the timeline goes to ``kept``."""
    worker_reports, held_out = WorkerReports(), [Prompt(i, np.array([i], np.int32), "") for i in range(SAMPLES)]
    inputs: Any = SimpleNamespace(
        val=SimpleNamespace(prompts=held_out), tokenizer=None, model=SimpleNamespace(vocabulary=50)
    )
    teacher: Any = {"teacher": None}
    rollout, actor = RolloutGroup(rollout_group, config), ActorGroup(actor_group, config, "", lambda: actor_group)
    rollout_group.control("impose", times, timeout_s=30)
    actor_group.call("impose", times, timeout_s=30)
    parts: Any = SimpleNamespace(
        prompts=PromptStream([Prompt(i, np.array([i], np.int32), "") for i in range(SAMPLES)], 0),
        rollout=rollout, answers=None, actor=actor, model=ModelInfo(50, None, [], 50), n_gpus=2, device="cpu",
        report=lambda: worker_reports.read([actor_group, rollout_group]),
        validation=Validation(config, inputs, rollout, actor, teacher),
        val_sets=SimpleNamespace(request=lambda *_: [], measure=lambda *_: {}, select_due_sets=lambda *_: [], sets=[]),
        sync=Sync(actor, rollout, config),
    )  # fmt: skip
    quiet: Any = SimpleNamespace(write=lambda *_: None, step=lambda *_: None)
    with tempfile.TemporaryDirectory() as path:
        file = Path(path, "metrics.jsonl")
        with JsonLines(file) as metrics:
            checkpoints = Checkpoints(config, DirectoryIdentity.of(Path(path)), time.monotonic(), {})
            timeline = Timeline(kept or Path(path, "timeline.json"), config.trainer.n_timeline_steps)
            stop = EarlyStop(config.trainer.stop_early, file)
            train(config, parts, RunLog(metrics, quiet, quiet, checkpoints, timeline, None, stop), RunState())
            timeline.write()
        return [json.loads(line) for line in file.read_text().splitlines()]


def simulated(config: Config, times: Times, sync_s: float) -> Step:
    """Return what the plan expects of a step, with the very lengths that the run has."""

    token_s = times.sample / (MEAN_TOKENS * SAMPLES / SLOTS)
    n, slots = config.rollout.n_engines, config.rollout.slots
    chunk = config.actor.micro_batch_tokens if config.schedule.streaming else None
    run = SimulatedRun(
        SAMPLES, 1, 1.0, MEAN_TOKENS + 1, partial(lengths_of, config),
        SamplingGroup(n, slots, slots, lambda n: token_s),
        {"teacher": ScoringGroup(n, n * times.score / SAMPLES)}, TrainingGroup(times.update, 0.0, sync_s, chunk),
        config.schedule.max_staleness, config.schedule.in_flight, config.weights.transfer_class.collective,
    )  # fmt: skip
    first, last = measured(config)
    return simulate(run, last - first, first)


def measured(config: Config) -> tuple[int, int]:
    """Return the steps after which measuring begins and ends: once settled, while later ones are sampled ahead."""
    return settled(config.schedule.max_staleness), config.trainer.total_steps - 1 - config.schedule.max_staleness


def settled(max_staleness: int) -> int:
    """Return after how many steps the lead is used up that groups behind the engines have at first.

    It is as many batches as may be ahead, at most: all of them are drained before the first update, and whatever keeps
    engines or actor lets it grow again. Where drained engines take nearly as long as the slowest of these groups, a
    step uses up a tenth of a batch.
    """
    return WARM_UP + 10 * max_staleness


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="that are measured, once a run has settled")
    parser.add_argument("--bound", nargs="+", default=list(BOUND), choices=list(BOUND))
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--streaming", nargs="+", default=["no", "yes"], choices=["no", "yes"])
    parser.add_argument("--scale", type=float, default=1.0, help="of all imposed times; the longer, the less messages")
    parser.add_argument("--in-flight", action="store_true", help="weights load while samples are under way")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--together", action="store_true", help="all engines get weights at the same time")
    parser.add_argument("--val-every", type=int, default=10_000, help="at the end by default")
    parser.add_argument("--timelines", type=Path, help="directory")
    options = parser.parse_args()
    if options.timelines:
        options.timelines.mkdir(parents=True, exist_ok=True)
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    base = load(
        {
            "rollout": {
                "engine": "tests.benchmarks.overlap:SleepingEngine",
                "max_num_seqs": SLOTS // options.engines,
                "n_gpus_per_node": options.engines,
            },
            "weights": {"transfer": "tests.benchmarks.overlap:Collective" if options.together else "object_store"},
            "trainer": {
                "batch_size": SAMPLES,
                "save_minutes": None,
                "val_every": options.val_every,
            },
            "actor": {"max_tokens_per_micro_batch": SAMPLES * (MEAN_TOKENS + 1) // CHUNKS},
        }
    )
    actor = group_of("actor", "tests.benchmarks.overlap:Actor", [()])
    print(f"{'bound by':9} {'streaming':9} {'staleness':>9} {'s/step':>7} {'simulated':>9} {'ratio':>6} "
          f"{'longest stage':>13} {'s/step over it':>14} {'drain':>6} {'between':>7} {'whole run':>9}")  # fmt: skip
    held = True
    for bound in options.bound:
        times = Times(*(options.scale * seconds for seconds in astuple(BOUND[bound])))
        generate: float | None = None
        if 0 not in options.staleness or "no" not in options.streaming:
            alone = setting(base, 0, False, False, WITHOUT_OVERLAP)
            generate = mean(measured_rows(actor, alone, times)[0], "generate")
        for staleness, streams in itertools.product(sorted(options.staleness), options.streaming):
            streaming = streams == "yes"
            config = setting(base, staleness, streaming, options.in_flight and staleness > 0, options.steps)
            name = f"{bound}_{'streaming' if streaming else 'whole'}_{staleness}.json"
            kept = options.timelines / name if options.timelines else None
            rows, whole = measured_rows(actor, config, times, kept)
            if not streaming and not staleness:  # where nothing overlaps but scoring
                generate = mean(rows, "generate")
            assert generate is not None, "staleness 0 without streaming comes first"
            held &= print_row(bound, config, times, rows, whole, generate)
    ray.shutdown()
    if not held:
        raise SystemExit(1)


def setting(base: Config, staleness: int, streaming: bool, in_flight: bool, steps: int) -> Config:
    """Return the configuration of a run in which so many steps are measured."""
    schedule = {"streaming": streaming, "max_staleness": staleness, "in_flight": in_flight}
    total = settled(staleness) + steps + 1 + staleness
    return base.model_copy(
        update={
            "schedule": base.schedule.model_copy(update=schedule),
            "trainer": base.trainer.model_copy(update={"total_steps": total}),
        }
    )


def measured_rows(
    actor: Group, config: Config, times: Times, kept: Path | None = None
) -> tuple[list[dict[str, float]], float]:
    """Return the rows of the steps that are measured, and the seconds of the whole run."""
    engines = [(config, rank) for rank in range(config.rollout.n_engines)]
    rollout = group_of("rollout", "tests.benchmarks.overlap:Rollout", engines)
    began = time.monotonic()
    first, last = measured(config)
    rows = [row for row in run(rollout, actor, config, times, kept) if first < row["step"] <= last]
    for worker in rollout.workers:
        ray.kill(worker)
    return rows, time.monotonic() - began


def mean(rows: Sequence[dict[str, float]], name: str) -> float:
    """Return the mean of timing_s/NAME."""
    return statistics.fmean(row.get(f"timing_s/{name}", 0.0) for row in rows)


def print_row(
    bound: str, config: Config, times: Times, rows: Sequence[dict[str, float]], whole: float, generate: float
) -> bool:
    """Print one line of the table; returns whether its figures are within their bounds."""
    tokens = 1 + statistics.fmean(n for row in rows for n in lengths_of(config, int(row["step"])))
    longest = max(generate, max(times.score, times.update) * tokens / (MEAN_TOKENS + 1))
    step, drain = mean(rows, "step"), mean(rows, "drain")
    between = step - drain - sum(mean(rows, name) for name in ("wait", "update", "sync"))
    expected = simulated(config, times, statistics.median(row["timing_s/sync"] for row in rows)).seconds
    print(f"{bound:9} {config.schedule.streaming!s:9} {config.schedule.max_staleness:9} {step:7.2f} {expected:9.2f} "
          f"{expected / step:6.3f} {longest:13.2f} {step / longest:14.3f} {drain:6.2f} {between:7.3f} "
          f"{whole:9.1f}", flush=True)  # fmt: skip
    return abs(expected / step - 1) <= 0.05 and (step <= 1.05 * longest or not config.schedule.max_staleness)


if __name__ == "__main__":
    main()
