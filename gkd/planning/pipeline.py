"""The time of a step from its stages, by how far sampling may run ahead of training, and who waits."""

from __future__ import annotations

from dataclasses import dataclass

from gkd.planning.stages import Stages


@dataclass(frozen=True, slots=True)
class Step:
    """One step in the long run. ``busy`` seconds of each group; ``bound``: the group that sets the pace."""

    staleness: int
    seconds: float
    busy: dict[str, float]
    bound: str

    @property
    def waits(self) -> dict[str, float]:
        """Seconds of a step that each group has nothing to do."""
        return {group: max(0.0, self.seconds - busy) for group, busy in self.busy.items()}


def step_of(stages: Stages, staleness: int, shared: bool = False) -> Step:
    """A step at ``schedule.max_staleness``.

    0: sampling, beside which finished samples are scored, then the update, then the new weights.
    1: the next batch is sampled and scored while this one is trained on; engines and actor stop for new weights.
    2 and more: a further batch is under way, so that nobody waits for the last samples to be scored.
    ``shared``: all groups compute on the same cores, and nothing overlaps.
    """
    judges = {"teacher": stages.score, "reference": stages.reference}
    busy = {"actor": stages.update + stages.sync, "rollout": stages.generate + stages.sync}
    busy |= {name: seconds for name, seconds in judges.items() if seconds}
    sampled = max(stages.generate, stages.score, stages.reference) + stages.tail
    if shared:
        seconds = stages.generate + stages.score + stages.reference + stages.update + stages.sync
    elif staleness == 0:
        seconds = sampled + stages.update + stages.sync
    elif staleness == 1:
        seconds = max(sampled + stages.sync, busy["actor"])
    else:
        seconds = max(busy.values())
    return Step(staleness, seconds, busy, max(busy, key=lambda group: busy[group]))
