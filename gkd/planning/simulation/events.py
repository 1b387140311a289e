"""Steps of a run, event by event: who works when, and who waits, over the run's own schedule (:mod:`gkd.schedule`).

Simulated is what the driver's loop does: requests go to the emptiest engine and hold a place there until they are
sampled, scorers take samples as they finish, the actor adds up chunks in the batch's order, an engine is drained before
new weights unless these are loaded in flight. What the driver itself takes, and messages, are counted where a run has
measured them.

Where groups share devices, each works there as much slower as more of them are busy than these have room for at once.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from gkd.planning.simulation.clocks import EngineClock, GroupClock, SimulatedBatch, SimulatedSample
from gkd.planning.simulation.run import Pace, SimulatedRun, Step, slowness
from gkd.schedule import TicketSchedule

ENDLESS = 1 << 40
EVEN = Pace()
LEAST_PACE = 1e-3  # of a step in which the run's engines had nothing to do
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
    ends = [0.0, *simulation.ends]
    busy = {name: group.worked_at[first + steps] - group.worked_at[first] for name, group in simulation.groups.items()}
    busy = {name: seconds / steps for name, seconds in busy.items()}
    measured = [simulation.batches[step] for step in range(first + 1, first + steps + 1)]
    generated = fmean(batch.generated - batch.requested for batch in measured)
    scored = fmean(batch.scored - batch.requested for batch in measured)
    seconds = (ends[first + steps] - ends[first]) / steps
    return Step(run.max_staleness, seconds, busy, max(busy, key=lambda name: busy[name]), generated, scored)


class _Simulation:
    def __init__(self, run: SimulatedRun, total: int) -> None:
        self.run, self.total, self.time = run, total, 0.0
        workers = {"actor": 1, "rollout": run.sampling.n_engines} | {k: s.n_servers for k, s in run.scoring.items()}
        self.groups = {
            name: GroupClock(run.hosts.get(name, name), n, run.shares.get(name, 1.0)) for name, n in workers.items()
        }
        self.driver = GroupClock("driver", 1)
        self.clocks = [*self.groups.values(), self.driver]
        self.shares_devices = len({clock.device for clock in self.clocks}) < len(self.clocks)
        self.engines = [EngineClock() for _ in range(run.sampling.n_engines)]
        # What is to be sent to scorers, by step and place; what they were sent and have not begun; with what they have.
        self.unsent: dict[str, list[tuple[int, int, SimulatedSample]]] = {name: [] for name in run.scoring}
        self.queues: dict[str, deque[SimulatedSample]] = {name: deque() for name in run.scoring}
        self.held = dict.fromkeys(run.scoring, 0)
        self.schedule = TicketSchedule(run.n_prompts, run.max_staleness, ENDLESS, lambda n: [0] * n)
        self.waiting: deque[SimulatedSample] = deque()
        self.homes: dict[tuple[int, int], int] = {}
        self.batches: dict[int, SimulatedBatch] = {}  # by step
        self.ends: list[float] = []
        self.number = 0
        # Of the actor's present step: samples that were fed, the open chunk's tokens, chunks that wait, and its state;
        # the driver's is recording while it logs the step before.
        self.step, self.fed, self.chunk = 1, 0, 0.0
        self.chunks: deque[float] = deque()
        self.began = self.preparing = self.prepared = False
        self.computing = self.draining = self.recording = False

    @property
    def pace(self) -> Pace:
        """Of the present step."""
        return self.run.paces[self.step % len(self.run.paces)] if self.run.paces else EVEN

    def run_all(self) -> None:
        self._dispatch(0)
        while len(self.ends) < self.total:
            self._advance()

    def _advance(self) -> None:
        """Go on to the next event of any group."""
        working = [clock for clock in self.clocks if clock.busy > 0 and not clock.paused]
        if self.shares_devices:
            self._slow_down(working)
        nearest: GroupClock | None = None
        dt = float("inf")
        for clock in working:
            if clock.events and (left := (clock.events[0][0] - clock.now) * clock.slowness) < dt:
                nearest, dt = clock, left
        assert nearest is not None, "somebody works until the last step has ended"
        if dt > 0:
            self.time += dt
            for clock in working:
                clock.advance(dt / clock.slowness)
        heapq.heappop(nearest.events)[2]()

    def _slow_down(self, working: Sequence[GroupClock]) -> None:
        """Have each group work as fast as those that work besides it on its devices leave it, on average over these."""
        load = dict.fromkeys((clock.device for clock in working), 0.0)
        for clock in working:
            load[clock.device] += clock.share * min(1.0, clock.busy / clock.n_workers) / self.run.at_once
        for clock in working:
            clock.slowness = slowness(clock.share, load[clock.device])

    def _run_after(self, clock: GroupClock, seconds: float, action: Callable[[], None]) -> None:
        """Have ``action`` happen after so many seconds of a group's own time."""
        self.number += 1
        heapq.heappush(clock.events, (clock.now + seconds, self.number, action))

    def _schedule(self, seconds: float, action: Callable[[], None]) -> None:
        """Have ``action`` happen after so many seconds of the driver's, or of a message."""
        if not seconds:
            action()
            return
        self.driver.busy += 1

        def run_action() -> None:
            self.driver.busy -= 1
            action()

        self._run_after(self.driver, seconds, run_action)

    # Requests and engines

    def _dispatch(self, version: int) -> None:
        for tickets in self.schedule.admit(version):
            step, lengths = tickets[0].step, self.run.lengths(tickets[0].step)
            samples = [
                SimulatedSample(step, i, (step, i // self.run.n), length, version, unscored=len(self.run.scoring))
                for i, length in enumerate(lengths)
            ]
            self.batches[step] = SimulatedBatch(samples, self.time, len(samples), len(samples))
            self.waiting += samples
        self._schedule(self.run.driver.start_s, self._hand_out)

    def _hand_out(self, *changed_engines: int) -> None:
        """Fill the engines' free places, as :class:`gkd.rollout.dispatch.RequestDispatcher` does.

        Those that have changed otherwise go on as well.
        """
        engines, capacity = self.engines, self.run.sampling.capacity
        changed = set(changed_engines)
        while self.waiting:
            emptiest, least = -1, capacity
            for number, engine in enumerate(engines):
                if engine.held < least and engine.version >= self.waiting[0].version:
                    emptiest, least = number, engine.held
            if emptiest < 0:
                break
            sample = self.waiting.popleft()
            home = self.homes.get(sample.prompt, emptiest)
            if engines[home].held >= min(capacity, least + self.run.n):
                home = emptiest
            self.homes[sample.prompt], sample.engine = home, home
            engines[home].held += 1
            engines[home].waiting.append(sample)
            changed.add(home)
        for number in changed:
            self._continue(number)

    def _continue(self, number: int) -> None:
        """Account for what an engine has sampled so far, begin what waits there, and plan its next end of a sample."""
        engine, group, sampling = self.engines[number], self.groups["rollout"], self.run.sampling
        self._account(engine)
        was_busy = bool(engine.running)
        for sample, length in self._begin(engine):
            self.number += 1
            heapq.heappush(engine.running, (engine.tokens + length, self.number, sample))
            engine.at += sampling.prefill_s
        group.busy += bool(engine.running) - was_busy
        engine.planned += 1
        if engine.running:
            left = (engine.running[0][0] - engine.tokens) * self._token_s(engine)
            self._run_after(group, engine.at - group.now + left, partial(self._end_sampling, number, engine.planned))

    def _begin(self, engine: EngineClock) -> list[tuple[SimulatedSample, float]]:
        """Return the waiting samples that an engine begins now, and the tokens after which each comes out of it."""
        sampling = self.run.sampling
        if engine.running and not sampling.continuous:
            return []
        n = min(len(engine.waiting), sampling.running - len(engine.running))
        begun = [engine.waiting.popleft() for _ in range(n)]
        longest = max((sample.length for sample in begun), default=0.0)
        return [(sample, sample.length if sampling.continuous else longest) for sample in begun]

    def _account(self, engine: EngineClock) -> None:
        now = self.groups["rollout"].now
        if engine.running and now > engine.at:
            engine.tokens += (now - engine.at) / self._token_s(engine)
        engine.at = max(engine.at, now)

    def _token_s(self, engine: EngineClock) -> float:
        return self.run.sampling.token_s(len(engine.running)) * max(self.pace.sample, LEAST_PACE)

    def _recompute(self, number: int) -> None:
        """Have an engine compute what its sequences have cached under the new weights."""
        engine = self.engines[number]
        self._account(engine)
        so_far = (self.run.prompt + sample.length - (end - engine.tokens) for end, _, sample in engine.running)
        engine.at += self.run.sampling.recompute_s * sum(so_far)
        self._continue(number)

    def _end_sampling(self, number: int, planned: int) -> None:
        """Take the samples that an engine has finished, unless its next end was planned anew meanwhile."""
        engine = self.engines[number]
        if engine.planned != planned:
            return
        group = self.groups["rollout"]
        engine.tokens, engine.at = engine.running[0][0], group.now
        finished = []
        while engine.running and engine.running[0][0] <= engine.tokens + 1e-6:
            finished.append(heapq.heappop(engine.running)[2])
        group.busy -= not engine.running
        for sample in finished:
            self.engines[number].held -= 1
            batch = self.batches[sample.step]
            batch.unsampled -= 1
            if not batch.unsampled:
                batch.generated = self.time
            self._schedule(self.run.driver.score_s, partial(self._begin_scoring, sample))
        self._hand_out(number)
        if self.draining:
            self._drain()

    def _begin_scoring(self, sample: SimulatedSample) -> None:
        for name in self.run.scoring:
            heapq.heappush(self.unsent[name], (sample.step, sample.place, sample))
            self._score(name)
        if not self.run.scoring:
            self._finish(sample)

    def _score(self, name: str) -> None:
        group, scoring, queue = self.groups[name], self.run.scoring[name], self.queues[name]
        while self.unsent[name] and self.held[name] < scoring.n_servers * max(scoring.held, scoring.a_pass):
            queue.append(heapq.heappop(self.unsent[name])[-1])
            self.held[name] += 1
        while queue and group.busy < scoring.n_servers:
            n = min(scoring.a_pass, -(-len(queue) // (scoring.n_servers - group.busy)))
            samples = [queue.popleft() for _ in range(n)]
            group.busy += 1
            tokens = sum(self.run.prompt + sample.length for sample in samples) / self.run.mean_tokens
            self._run_after(
                group, scoring.seconds * tokens * self.pace.score, partial(self._end_scoring, name, samples)
            )

    def _end_scoring(self, name: str, samples: Sequence[SimulatedSample]) -> None:
        self.groups[name].busy -= 1
        self.held[name] -= len(samples)
        self._score(name)
        for sample in samples:
            sample.unscored -= 1
            if not sample.unscored:
                self._finish(sample)

    def _finish(self, sample: SimulatedSample) -> None:
        """Give the sample to the actor once it is its turn."""
        batch = self.batches[sample.step]
        batch.unscored -= 1
        if not batch.unscored:
            batch.scored = self.time
        self._schedule(self.run.driver.deliver_s, partial(self._deliver, sample))

    def _deliver(self, sample: SimulatedSample) -> None:
        self.batches[sample.step].delivered.add(sample.place)
        if sample.step == self.step:
            self._feed()

    # The actor's step

    def _feed(self) -> None:
        """Close chunks as the batch's samples come; begin the update once it is whole."""
        if self.recording or self.preparing or self.step not in self.batches:
            return
        self._close_chunks()
        if self.fed == len(self.batches[self.step].samples):
            self.preparing = True
            self.chunks.append(self.chunk)
            self._schedule(self.run.driver.prepare_s, self._end_preparing)
        self._compute()

    def _close_chunks(self) -> None:
        """Put what is there of the batch, in its order, into chunks, and close those that are full."""
        if (batch := self.batches.get(self.step)) is None:
            return
        updating = self.run.updating
        while self.fed in batch.delivered and batch.delivered.issuperset(range(self.fed, self.fed + updating.unit)):
            unit = batch.samples[self.fed : self.fed + updating.unit]
            tokens = sum(self.run.trained_prompt + sample.length for sample in unit)
            if updating.chunk_tokens is not None and self.chunk and self.chunk + tokens > updating.chunk_tokens:
                self.chunks.append(self.chunk)
                self.chunk, self.began = 0.0, True
            self.chunk += tokens
            self.fed += len(unit)

    def _end_preparing(self) -> None:
        self.prepared = True
        self._compute()

    def _compute(self) -> None:
        """Have the actor compute what it has: a batch that was not begun in chunks once it is prepared."""
        if self.computing or not (self.began or self.prepared):
            return
        if self.chunks:
            mean_tokens = self.run.mean_tokens - self.run.prompt + self.run.trained_prompt
            share = self.chunks.popleft() / (mean_tokens * len(self.batches[self.step].samples))
            self._occupy(self.run.updating.accumulate_s * share * self.pace.update, self._compute)
        elif self.prepared:
            self._occupy(self.run.updating.apply_s * self.pace.update, self._end_update)

    def _occupy(self, seconds: float, then: Callable[[], None]) -> None:
        """Have the actor work so long."""
        self.computing, self.groups["actor"].busy = True, 1

        def finish() -> None:
            self.computing, self.groups["actor"].busy = False, 0
            then()

        self._run_after(self.groups["actor"], seconds, finish)

    def _end_update(self) -> None:
        self._schedule(self.run.driver.call_s, self._end_call)

    def _end_call(self) -> None:
        self.draining = self.run.max_staleness > 0 and not self.run.in_flight
        if self.draining:
            self._drain()
        else:
            self._load(self.engines, self._end_push)

    def _drain(self) -> None:
        """Load new weights into engines that have sampled all that theirs are for, or into all once all have."""
        if self.computing:  # the push to others
            return
        behind = [engine for engine in self.engines if engine.version < self.step]
        if not behind:
            self.draining = False
            self._end_step()
            return
        oldest = min((sample.version for sample in self.waiting), default=self.step)
        drained = [engine for engine in behind if not engine.held and engine.version < oldest]
        if drained and (len(drained) == len(behind) or not self.run.together):
            self._load(drained, self._go_on_draining)

    def _go_on_draining(self) -> None:
        self._dispatch(self.step)
        self._drain()

    def _load(self, engines: Sequence[EngineClock], then: Callable[[], None]) -> None:
        """Load new weights into engines, for which they stop where they are; in flight once these begin to come."""
        rollout, halt_s = self.groups["rollout"], self.run.updating.sync_s - self.run.spared_s

        def begin_load() -> None:
            rollout.paused = not self.draining
            self._occupy(halt_s, end_load)

        def end_load() -> None:
            rollout.paused = False
            rollout.worked += halt_s * len(engines) / len(self.engines)
            for engine in engines:
                engine.version = self.step
            then()

        self._occupy(self.run.spared_s, begin_load) if self.run.spared_s else begin_load()

    def _end_push(self) -> None:
        if self.run.in_flight:
            for number in range(len(self.engines)):
                self._recompute(number)
        self._end_step()

    def _end_step(self) -> None:
        self.ends.append(self.time)
        for group in self.groups.values():
            group.worked_at.append(group.worked)
        for engine in self.engines:  # by the pace so far
            self._account(engine)
        self.step, self.fed, self.chunk = self.step + 1, 0, 0.0
        for number, engine in enumerate(self.engines):
            if engine.running:
                self._continue(number)
        self.began = self.preparing = self.prepared = False
        self._dispatch(self.step - 1)
        self.recording = True
        if self.run.max_staleness:  # the actor has what is there before the step is logged
            self._close_chunks()
            self._compute()
        self._schedule(self.run.driver.record_s, self._end_recording)

    def _end_recording(self) -> None:
        self.recording = False
        self._feed()
