"""What a simulation of steps is given, and what it comes to (:mod:`gkd.planning.simulation.events`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingGroup:
    """Describes the rollout group.

    Each of ``n_engines`` is given at most ``capacity`` requests and samples at most ``running`` of them at a time; a
    token of all n of those takes ``token_s(n)`` seconds. A new sequence keeps an engine busy for ``prefill_s`` seconds,
    and one that is under way when weights are loaded in flight for ``recompute_s`` for each of its tokens so far.
    ``continuous``: a sequence ends by itself and another takes its place; else all that began together end together.
    """

    n_engines: int
    capacity: int
    running: int
    token_s: Callable[[float], float]
    prefill_s: float = 0.0
    recompute_s: float = 0.0
    continuous: bool = True


@dataclass(frozen=True, slots=True)
class ScoringGroup:
    """Describes a group that scores: ``n_servers``, and the ``seconds`` that one takes for a sample of mean tokens.

    An idle server takes what they were sent, ``a_pass`` samples at most, and is done with all of them together. Of
    what is to be scored the first to be trained is sent first, once a server has less than ``held`` samples, those
    included that it works on; what it was sent it takes as it came.
    """

    n_servers: int
    seconds: float
    a_pass: int = 1
    held: int = 1


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """Describes the actor: ``accumulate_s`` for the gradients of a batch of mean tokens, ``apply_s`` for its optimizer
    steps.

    ``chunk_tokens`` are accumulated at a time while a batch is being sampled; None: the whole batch, once it is there.
    A chunk holds whole groups of ``unit`` samples, and computes a prompt for so many of its samples together.
    """

    accumulate_s: float
    apply_s: float
    sync_s: float
    chunk_tokens: float | None = None
    unit: int = 1
    samples_a_prompt: float = 1.0


@dataclass(frozen=True, slots=True)
class DriverTimes:
    """Seconds of the driver's own work and of messages in a step, while nobody it waits for does anything.

    ``start_s``: from new weights until engines sample what was requested with them; ``score_s``: of what lies between a
    sample and its scores besides scorers' work, messages and rewards; ``record_s``: from new weights until the driver
    has requested, measured and logged all, before which it takes no sample in; ``deliver_s``: from a scored batch until
    it takes it in; ``prepare_s``: until it has handed the batch to the actor; ``call_s``: of the actor's calls, until
    the driver is notified that the update is done. ``spared_s``: of a push, in which an engine loads nothing.
    """

    start_s: float = 0.0
    score_s: float = 0.0
    record_s: float = 0.0
    deliver_s: float = 0.0
    prepare_s: float = 0.0
    call_s: float = 0.0
    spared_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds of a step in which nothing is sampled."""
        return self.record_s + self.deliver_s + self.prepare_s + self.call_s


@dataclass(frozen=True, slots=True)
class Pace:
    """Holds how much longer than on average groups take in a step, 1 for as long."""

    sample: float = 1.0
    score: float = 1.0
    update: float = 1.0


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Describes what is simulated.

    ``lengths(step)`` are the tokens of the responses to ``n_prompts`` prompts, ``n`` neighbours each, of ``prompt``
    tokens; ``mean_tokens`` those of a sample that the times of scoring and updating are for, its prompt included.
    ``together``: weights that do not come in flight come to all engines at the same time, once all are drained, else to
    each by itself. ``hosts`` maps groups to the one whose devices they compute on; ``at_once`` groups have a device's
    full speed each. ``shares``: the parts of the groups' time in which these work, all of it where none is stated.
    ``paces`` are those of steps, one after the other and again; without any all steps are alike.
    """

    n_prompts: int
    n: int
    prompt: float
    mean_tokens: float
    lengths: Callable[[int], Sequence[float]]
    sampling: SamplingGroup
    scoring: Mapping[str, ScoringGroup]
    updating: TrainingGroup
    max_staleness: int = 0
    in_flight: bool = False
    together: bool = False
    hosts: Mapping[str, str] = field(default_factory=dict)
    at_once: int = 1
    shares: Mapping[str, float] = field(default_factory=dict)
    driver: DriverTimes = field(default_factory=DriverTimes)
    paces: Sequence[Pace] = ()

    @property
    def spared_s(self) -> float:
        """Return the seconds of a push in which engines go on sampling: in flight, until they get the weights."""
        return min(self.driver.spared_s, self.updating.sync_s) if self.in_flight else 0.0

    @property
    def trained_prompt(self) -> float:
        """Count the tokens of a sample's prompt that the actor computes for it."""
        return self.prompt / self.updating.samples_a_prompt


def slowness(share: float, load: float) -> float:
    """Return how many times as long a group takes that is on its device for ``share`` of its time.

    ``load``: the devices that all who are busy there would take.
    """
    return 1 - share + share * max(1.0, load)


@dataclass(frozen=True, slots=True)
class Step:
    """Describes one step in the long run. ``busy``: seconds that the workers of each group work, on average.

    ``bound``: the group that is most busy; ``generate``: seconds from a batch's request to its last finished sample,
    and ``scored`` to its last scored one.
    """

    staleness: int
    seconds: float
    busy: dict[str, float]
    bound: str
    generate: float = 0.0
    scored: float = 0.0

    @property
    def waiting_s(self) -> dict[str, float]:
        """Return the seconds of a step that each group has nothing to do."""
        return {group: max(0.0, self.seconds - busy) for group, busy in self.busy.items()}
