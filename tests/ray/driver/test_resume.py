"""A run that is ended at any moment of a step goes on as if it had not been: the loop, on an actor of one number."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from gkd.actor.batches import AppliedUpdate, combine_mini_batches
from gkd.cluster.workers.group import PendingCall
from gkd.config import Config, load
from gkd.data.model_info import ModelInfo
from gkd.data.stream import PromptStream
from gkd.driver.checkpoints.checkpoint import RunState
from gkd.driver.checkpoints.resume import cut, find
from gkd.driver.checkpoints.saving import Checkpoints
from gkd.driver.loop.parts import RunLog
from gkd.driver.loop.train import train
from gkd.driver.validation.early_stop import EarlyStop
from gkd.durable import DirectoryIdentity, compute_checksum
from gkd.errors import RunFailed
from gkd.observability.metrics import JsonLines
from gkd.observability.timeline import Timeline
from gkd.types import Prompt, SampleRequest, TrainingSample
from tests.samples import training_sample

STEPS = 6
TRAINER = {"total_steps": STEPS, "batch_size": 3, "val_every": 2}
CONFIGS = [load({"trainer": TRAINER, "schedule": {"max_staleness": staleness}}) for staleness in range(3)]
CONFIG = CONFIGS[0]
MEASURED = ("timing_s/", "perf/")


class Ended(BaseException):
    """As a signal ends a run, wherever it is."""


@dataclass
class World:
    """Everything a run drives, and the moment at which it ends: a name of one, and in which step."""

    output: Path
    end: tuple[str, int] = ("", 0)
    value: int = 1
    step: int = 0
    rows: tuple[dict[str, float], ...] = ()
    at: int = 0
    prompts: PromptStream = field(
        default_factory=lambda: PromptStream([Prompt(i, np.array([i]), "") for i in range(7)], 0)
    )
    model_path: str = "/model"
    dtype: str = "float32"
    version: int = 0
    served: int = 0
    staleness: int = 0
    meanwhile: Any = None
    beside: Any = None
    group: Any = field(default_factory=lambda: SimpleNamespace(reports=()))
    seeds: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Of what was requested, by order and prompt."""

    @property
    def config(self) -> Config:
        return CONFIGS[self.staleness]

    def maybe(self, moment: str, step: int | None = None) -> None:
        if self.end == (moment, self.at if step is None else step):
            raise Ended

    def submit(self, requests: list[SampleRequest], order: int) -> list[tuple[int, int, int]]:
        for request in requests:
            self.seeds.setdefault((order, request.prompt.id), []).append(request.seed)
        return [(order, request.prompt.id, self.served) for request in requests]

    def collect_in_order(self, keys: list[tuple[int, int, int]], timeout_s: float) -> Iterator[list[TrainingSample]]:
        self.at = keys[0][0]
        self.maybe("collect")
        yield [training_sample(0, id_, n_prompt=id_, n=1, version=version) for _, id_, version in keys]

    def fits(self, samples: list[TrainingSample]) -> bool:
        return True

    def attend(self, calls: Any) -> None:
        raise AssertionError("nobody waits for this actor")

    def push_drained(self, request: Callable[[], None]) -> list[tuple[float, float]]:
        self.push()
        request()
        return []

    def update(self, samples: list[TrainingSample], step: int) -> dict[str, float]:
        """Two mini-batches, the second of which nobody may be there to wait for; beside it samples are logged."""
        self.beside()
        for number in (1, 2):
            self.value = (self.value * 31 + number + sum(sample.n_tokens - 1 for sample in samples)) % 1009
            self.rows = (*self.rows[: number - 1], {"actor/loss": float(self.value)})
        self.step = step
        self.maybe("update")
        self.version = step
        return combine_mini_batches(self.rows)

    def read_applied(self) -> AppliedUpdate:
        return AppliedUpdate(self.step, self.rows)

    stage = read_applied

    def is_responding(self) -> bool:
        return True

    def write_staged(self, directory: str) -> PendingCall:
        file = Path(directory, "rank_00000.safetensors")
        file.write_text(str(self.value))
        return PendingCall("writing", ("actor rank 0",), (ray.put((file.name, compute_checksum(file))),))

    def push(self) -> None:
        self.maybe("push")
        self.served = self.version

    def report(self) -> list[Any]:
        self.maybe("report")
        return []

    def request(self, order: int) -> int:
        """A validation of the weights that are served."""
        self.maybe("request")
        return self.served

    def measure(self, served: int) -> dict[str, float]:
        self.maybe("validate", served)
        assert served == self.version == self.served
        return {"val/value": float(self.value)}

    def show(self, step: int, row: dict[str, float]) -> None:
        self.maybe("show", step)

    def run(self, start: RunState) -> dict[str, float]:
        """The loop, as gkd.driver.run has it."""
        parts: Any = SimpleNamespace(
            prompts=self.prompts, rollout=self, actor=self,
            sync=SimpleNamespace(push=self.push, push_drained=self.push_drained),
            validation=SimpleNamespace(request=self.request, measure=self.measure),
            model=ModelInfo(10, None, [], 10), n_gpus=1,
            device="cpu", report=self.report, answers=None,
            val_sets=SimpleNamespace(
                request=lambda due, order: due, measure=lambda due: {}, sets=[],
                select_due_sets=lambda step, rest=False: [],
            ),
        )  # fmt: skip
        checkpoints = Checkpoints(self.config, DirectoryIdentity.of(self.output), time.monotonic(), {}, start.step)
        with JsonLines(self.output / "metrics.jsonl") as metrics, JsonLines(self.output / "samples.jsonl") as file:
            samples: Any = SimpleNamespace(write=lambda step, records: file.write({"step": step, "n": len(records)}))
            progress: Any = SimpleNamespace(step=self.show)
            timeline = Timeline(self.output / "timeline.json", 0)
            try:
                stop = EarlyStop(self.config.trainer.stop_early, self.output / "metrics.jsonl")
                log = RunLog(metrics, samples, progress, checkpoints, timeline, None, stop)
                return train(self.config, parts, log, start).validated
            except BaseException:
                checkpoints.rescue(parts.actor)
                raise

    def go_on(self) -> dict[str, float]:
        """As a run does after trainer.resume=true."""
        saved = find(self.config, self.output)
        self.value = int(saved.rank_files[0].read_text())
        self.step = self.version = self.served = saved.state.step
        self.prompts.restore(saved.state.prompts)
        cut(self.output / "metrics.jsonl", saved.state.last_logged_step)
        cut(self.output / "samples.jsonl", saved.state.step)
        return self.run(saved.state)

    def logged(self, name: str = "metrics.jsonl") -> list[dict[str, float]]:
        rows = [json.loads(row) for row in (self.output / name).read_text().splitlines()]
        return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in rows]


@pytest.fixture(autouse=True)
def _ray(local_ray: None) -> None:
    pass


def world(output: Path, end: tuple[str, int] = ("", 0)) -> World:
    output.mkdir()
    return World(output, end)


@pytest.mark.parametrize("step", [3, 4, STEPS])
@pytest.mark.parametrize("moment", ["collect", "update", "push", "request", "report", "validate", "show"])
def test_every_step_is_trained_and_logged_once(moment: str, step: int, tmp_path: Path) -> None:
    """Also with batches sampled ahead, which are sampled again; then from other weights, but never older ones."""
    if moment in ("request", "validate") and step % 2:
        step += 1  # in which there is one
    for staleness in range(3):
        (path := tmp_path / str(staleness)).mkdir()
        whole, ended = world(path / "whole"), world(path / "ended", (moment, step))
        whole.staleness = ended.staleness = staleness
        expected = whole.run(RunState())
        with pytest.raises(Ended):
            ended.run(RunState())
        saved = find(CONFIG, ended.output).state
        # With staleness workers report of a step once the actor has the first samples of the next one.
        before = moment == "collect" or (moment == "report" and staleness)
        assert saved.step == (step - 1 if before else step)
        again = World(ended.output, staleness=staleness)
        assert again.go_on() == expected
        rows, uninterrupted = again.logged(), whole.logged()
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        assert all(row.pop("staleness/max") <= staleness for row in rows)
        bound = [row.pop("staleness/max") for row in uninterrupted]
        assert bound == [min(staleness, done) for done in range(STEPS)]
        mean, whole_mean = ([row.pop("staleness/mean") for row in of] for of in (rows, uninterrupted))
        assert rows == uninterrupted  # the same prompts, whose lengths decide the losses here
        assert mean == whole_mean or staleness
        logged = [row["step"] for row in again.logged("samples.jsonl")]
        assert logged == list(range(1, STEPS + 1)) and again.logged("samples.jsonl") == whole.logged("samples.jsonl")
        assert again.value == whole.value
        assert ended.seeds | again.seeds == whole.seeds  # what is sampled again has the seeds that it had
        assert all(again.seeds.get(place, seeds) == seeds for place, seeds in ended.seeds.items())


def test_ended_twice_in_the_same_step(tmp_path: Path) -> None:
    whole, ended = world(tmp_path / "whole"), world(tmp_path / "ended", ("push", 4))
    whole.run(RunState())
    with pytest.raises(Ended):
        ended.run(RunState())
    for moment in ("validate", "show"):
        with pytest.raises(Ended):
            again = World(ended.output, (moment, 4))
            again.go_on()
    last = World(ended.output)
    last.go_on()
    assert (last.logged(), last.value) == (whole.logged(), whole.value)


def test_an_actor_that_is_gone_leaves_what_was_there_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = world(tmp_path / "ended", ("push", 4))

    def gone() -> AppliedUpdate:
        raise RunFailed("actor rank 0 died")

    monkeypatch.setattr(ended, "read_applied", gone)
    with pytest.raises(Ended):
        ended.run(RunState())
    assert not (ended.output / "checkpoints").exists()
