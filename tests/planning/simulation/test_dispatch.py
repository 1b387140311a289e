"""The simulation hands requests to engines as the real dispatcher does, and cuts chunks as the real stream does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gkd.actor.batches import count_tokens, measure_lengths
from gkd.config import load
from gkd.driver.loop.streaming import BatchStream
from gkd.planning.simulation import events
from gkd.planning.simulation.run import SamplingGroup, SimulatedRun, TrainingGroup
from gkd.planning.simulation.sampling import SimulatedEngines
from gkd.planning.simulation.updating import SimulatedActor
from gkd.rollout.dispatch import RequestDispatcher
from gkd.types import Prompt, SampleRequest
from gkd.types import Sampling as HowSampled
from tests.samples import training_sample

N_PROMPTS, N = 16, 4


def run_of(**settings: Any) -> SimulatedRun:
    def lengths(step: int) -> list[float]:
        drawn = np.random.default_rng(step).lognormal(3.0, 0.6, N_PROMPTS * N)
        return [float(length) for length in np.ceil(drawn)]

    return SimulatedRun(N_PROMPTS, N, 5.0, 29.0, lengths, SamplingGroup(3, 12, 4, lambda n: 0.01 * n), {}, **settings)


class Watched(SimulatedEngines):
    """Beside every handing out, the real dispatcher's for the same requests."""

    n_given = 0

    def __init__(self, *arguments: Any) -> None:
        self.dispatcher, self.queued = RequestDispatcher(range(3), 12, spill=N), set[int]()
        super().__init__(*arguments)

    def _hand_out(self, *changed_engines: int) -> None:
        def key(sample: Any) -> int:
            return int(sample.step * 1000 + sample.place)

        held = {
            i: {key(sample) for sample in [*engine.waiting, *(running for *_, running in engine.running)]}
            for i, engine in enumerate(self.engines)
        }
        for engine, its in self.dispatcher.at_work.items():
            for done in [one for one in its if one not in held[engine]]:
                assert self.dispatcher.finish(engine, done)
        new = [sample for sample in self.waiting if key(sample) not in self.queued]
        for sample in new:
            prompt = Prompt(sample.step * 1000 + sample.place // N, np.array([1], np.int32), "")
            numbers = {"key": key(sample), "order": sample.step, "version": sample.version}
            self.dispatcher.add([SampleRequest(prompt, 0, 0, HowSampled(4), **numbers)])
        for i, engine in enumerate(self.engines):
            self.dispatcher.join(i, engine.version)
        self.queued |= {key(sample) for sample in new}
        before = list(self.waiting)
        super()._hand_out(*changed_engines)
        assigned = {key(sample): sample.engine for sample in before[: len(before) - len(self.waiting)]}
        placed = {request.key: engine for engine, its in self.dispatcher.hand_out().items() for request in its}
        assert assigned == placed
        Watched.n_given += len(assigned)


@pytest.mark.parametrize(
    ("staleness", "in_flight", "together"),
    [(0, False, False), (1, False, False), (1, False, True), (2, False, False), (4, True, False)],
)
@pytest.mark.parametrize("continuous", [True, False])  # without, an engine frees several places at a time
def test_requests_go_where_the_dispatcher_sends_them(
    staleness: int, in_flight: bool, together: bool, continuous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    updating = TrainingGroup(accumulate_s=2.0, apply_s=0.1, sync_s=0.1)
    run = run_of(updating=updating, max_staleness=staleness, in_flight=in_flight, together=together)
    run = replace(run, sampling=replace(run.sampling, continuous=continuous))
    monkeypatch.setattr(events, "SimulatedEngines", Watched)
    monkeypatch.setattr(Watched, "n_given", 0)
    events.simulate(run, steps=6, first=0)
    assert Watched.n_given >= 6 * N_PROMPTS * N


@pytest.mark.parametrize(("unit", "shared"), [(1, False), (N, False), (N, True)])
def test_chunks_are_those_that_the_stream_cuts(unit: int, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By tokens in their order; where rewards are learned from, of whole groups; prompts each time or once."""
    budget = 120
    updating = TrainingGroup(
        2.0, apply_s=0.1, sync_s=0.1, chunk_tokens=budget, unit=unit, samples_a_prompt=N if shared else 1
    )
    run = run_of(updating=updating)
    computed: list[float] = []

    class Noting(SimulatedActor):
        def _compute(self) -> None:
            if not self.computing and self._chunks and self._state.step == 1:
                computed.append(self._chunks[0])
            super()._compute()

    monkeypatch.setattr(events, "SimulatedActor", Noting)
    events.simulate(run, steps=1, first=0)
    handed: list[int] = []

    def count(samples: Any) -> int:
        return count_tokens(range(len(samples)), measure_lengths(samples, shared))

    actor: Any = SimpleNamespace(
        fits=lambda samples: count(samples) <= budget or len(samples) == 1,
        accumulate=lambda chunks: handed.extend(map(count, chunks)),
        apply=lambda step: {},
    )
    config = load({"algorithm": {"name": "on_policy_distill"}, "rollout": {"n": N}})
    stream = BatchStream(config, actor)
    stream._unit = unit
    samples: Any = [
        training_sample(prompt_id=i // N, n_prompt=5, n=int(length)) for i, length in enumerate(run.lengths(1))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gkd.driver.loop.streaming.assign_advantages", lambda config, group: group)
        stream.feed(samples)
        stream.update(samples, 1)
    assert len(handed) > 5
    assert computed == handed
