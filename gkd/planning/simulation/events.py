"""Steps of a run, event by event: who works when, and who waits, over the run's own schedule (:mod:`gkd.schedule`).

Simulated is what the driver's loop does: requests go to the emptiest engine and hold a place there until they are
sampled, scorers take samples as they finish, the actor adds up chunks in the batch's order, an engine is drained before
new weights unless these are loaded in flight. What the driver itself takes, and messages, are counted where a run has
measured them.

Where groups share devices, each works there as much slower as more of them are busy than these have room for at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from gkd.planning.simulation.clocks import EngineClock, SimulationState
from gkd.planning.simulation.run import SimulatedRun, Step
from gkd.planning.simulation.sampling import SimulatedEngines
from gkd.planning.simulation.scoring import SimulatedScorers
from gkd.planning.simulation.updating import SimulatedActor

WARM_UP, MEASURED = 2, 4  # steps, of which the first ones begin with idle engines
LEAD = 3  # further ones of a run, by the updates that it samples ahead


def simulate(run: SimulatedRun, steps: int | None = None, first: int | None = None) -> Step:
    """Return the mean of ``steps`` steps after the ``first`` ones.

    None: of a few, or of as many as have paces of their own, after those until the long run.
    """
    steps = max(MEASURED, len(run.paces)) if steps is None else steps
    # What may be sampled ahead of the first update is drained before it: the groups behind the engines begin with a
    # lead, which lasts for several steps.
    first = WARM_UP + LEAD * run.max_staleness if first is None else first
    simulation = _Simulation(run, first + steps)
    simulation.run_all()
    ends, groups = [0.0, *simulation.ends], simulation.state.groups
    busy = {name: group.worked_at[first + steps] - group.worked_at[first] for name, group in groups.items()}
    busy = {name: seconds / steps for name, seconds in busy.items()}
    measured = [simulation.state.batches[step] for step in range(first + 1, first + steps + 1)]
    generated = fmean(batch.generated - batch.requested for batch in measured)
    scored = fmean(batch.scored - batch.requested for batch in measured)
    seconds = (ends[first + steps] - ends[first]) / steps
    return Step(run.max_staleness, seconds, busy, max(busy, key=lambda name: busy[name]), generated, scored)


class _Simulation:
    """Runs ``total`` steps; ``ends`` are their ends."""

    def __init__(self, run: SimulatedRun, total: int) -> None:
        self.state, self._run, self._total = SimulationState(run), run, total
        self._actor = SimulatedActor(self.state, self._end_update)
        scorers = SimulatedScorers(self.state, self._actor.deliver)
        self._sampling = SimulatedEngines(self.state, scorers.begin, self._go_on_if_draining)
        self._engines = self._sampling.engines
        self._draining = False
        self.ends: list[float] = []

    def run_all(self) -> None:
        """Simulate all steps."""
        self._sampling.dispatch(0)
        while len(self.ends) < self._total:
            self.state.advance()

    def _go_on_if_draining(self) -> None:
        if self._draining:
            self._drain()

    def _end_update(self) -> None:
        self.state.schedule(self._run.driver.call_s, self._end_call)

    def _end_call(self) -> None:
        self._draining = self._run.max_staleness > 0 and not self._run.in_flight
        if self._draining:
            self._drain()
        else:
            self._load(self._engines, self._end_push)

    def _drain(self) -> None:
        """Load new weights into engines that have sampled all that theirs are for, or into all once all have."""
        if self._actor.computing:  # the push to others
            return
        behind = [engine for engine in self._engines if engine.version < self.state.step]
        if not behind:
            self._draining = False
            self._end_step()
            return
        oldest = min((sample.version for sample in self._sampling.waiting), default=self.state.step)
        drained = [engine for engine in behind if not engine.held and engine.version < oldest]
        if drained and (len(drained) == len(behind) or not self._run.together):
            self._load(drained, self._go_on_draining)

    def _go_on_draining(self) -> None:
        self._sampling.dispatch(self.state.step)
        self._drain()

    def _load(self, engines: Sequence[EngineClock], then: Callable[[], None]) -> None:
        """Load new weights into engines, for which they stop where they are; in flight once these begin to come."""
        rollout, halt_s = self.state.groups["rollout"], self._run.updating.sync_s - self._run.spared_s

        def begin_load() -> None:
            rollout.paused = not self._draining
            self._actor.occupy(halt_s, end_load)

        def end_load() -> None:
            rollout.paused = False
            rollout.worked += halt_s * len(engines) / len(self._engines)
            for engine in engines:
                engine.version = self.state.step
            then()

        self._actor.occupy(self._run.spared_s, begin_load) if self._run.spared_s else begin_load()

    def _end_push(self) -> None:
        if self._run.in_flight:
            for number in range(len(self._engines)):
                self._sampling.recompute(number)
        self._end_step()

    def _end_step(self) -> None:
        self.ends.append(self.state.time)
        for group in self.state.groups.values():
            group.worked_at.append(group.worked)
        for engine in self._engines:  # by the pace so far
            self._sampling.account(engine)
        self.state.step += 1
        for number, engine in enumerate(self._engines):
            if engine.running:
                self._sampling.go_on(number)
        self._sampling.dispatch(self.state.step - 1)
        self._actor.begin_step()
