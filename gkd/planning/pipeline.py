"""The time of a step from its stages, by how far sampling may run ahead of training, and who waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
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


def step_of(stages: Stages, staleness: int, hosts: Mapping[str, str] | None = None) -> Step:
    """A step at ``schedule.max_staleness``.

    0: sampling, beside which finished samples are judged, then the update, then the new weights.
    1: the next batch is sampled and judged while this one is trained on; engines and actor stop for new weights.
    2 and more: a further batch is under way, so that nobody waits for the last samples to be judged.
    ``hosts``: of groups that compute on those of another one, which; what they do takes turns.
    """
    judges = {"teacher": stages.score, "reference": stages.reference, "reward_model": stages.reward}
    judges = {name: seconds for name, seconds in judges.items() if seconds}
    sampling = {"rollout": stages.generate, **judges}
    busy = {"actor": stages.update + stages.sync, "rollout": stages.generate + stages.sync, **judges}
    where = {group: (hosts or {}).get(group, group) for group in busy}
    apart = all(where[name] != where["rollout"] for name in judges)
    sampled = max(_by_place(sampling, where).values()) + (stages.tail if apart else 0.0)
    in_turns = _by_place(busy, where)
    if where["actor"] == where["rollout"]:
        in_turns[where["actor"]] -= stages.sync  # which both take part in
    if staleness == 0:
        seconds = sampled + stages.update + stages.sync
    elif staleness == 1:
        seconds = max(sampled + stages.sync, *in_turns.values())
    else:
        seconds = max(in_turns.values())
    return Step(staleness, seconds, busy, max(busy, key=lambda group: busy[group]))


def _by_place(seconds: Mapping[str, float], where: Mapping[str, str]) -> dict[str, float]:
    """Seconds of all groups of one place together."""
    found: dict[str, float] = defaultdict(float)
    for group, own in seconds.items():
        found[where[group]] += own
    return found
