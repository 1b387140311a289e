"""What to change when a group does not fit: found by trying, the smallest sets that do, in levels of what they cost.

Level 1 trains the same, slower: smaller pieces, recomputation. Level 2 takes memory elsewhere or shortens texts.
Level 3 trains less of the model: adapters. Each level may use those before it, and only where it needs them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError

from gkd.cluster.layout import asks_of, idle_nodes, solve
from gkd.config import GROUPS, Config
from gkd.planning.items import GB, GroupMemory
from gkd.planning.knobs import Knob, Value, after, complete, knobs_of, need_of
from gkd.planning.memory import memory_of
from gkd.planning.pipeline import step_of
from gkd.planning.stages import stages_of
from gkd.planning.subject import Subject, changed

LEVELS = (1, 2, 3)
LEVEL_NAMES = {
    1: "the same training, slower",
    2: "memory elsewhere, or shorter texts",
    3: "adapters instead of the model",
}
MOST_CHANGES = 4
CACHE = (".gpu_memory_utilization", ".kv_cache_gb")


@dataclass(frozen=True, slots=True)
class Advice:
    """Changes after which ``group`` fits. ``saves`` bytes of a GPU; ``slower``: the step's time against now."""

    group: str
    level: int
    settings: Mapping[str, Value]
    saves: float
    margin: float
    slower: float

    def overrides(self) -> str:
        """To paste behind the command."""
        return overrides(self.settings)

    def line(self) -> str:
        """In words."""
        return f"{self.overrides()} (saves {self.saves / GB:.1f} GB, a step takes {self.slower:.2f} of the time)"


def advice(subject: Subject, group: str) -> list[Advice]:
    """For each level that can make ``group`` fit, its cheapest changes; empty when none can, or none is needed.

    Other groups need not fit for it, and may want the same GPUs: see :func:`together`.
    """
    return list(_advice(subject, group))


def together(subject: Subject) -> str | None:
    """Overrides after which every group fits, of low levels rather. None: all fit already, or none were found."""
    groups = _short_groups(subject)
    if any(_hopeless_anywhere(subject, group) for group in groups):
        return None
    known: dict[tuple[str, str], list[Advice]] = {}
    # The first in order may take GPUs that the next needs; the mildest changes of one may not be enough for another.
    for pick, order in itertools.product((0, -1), (groups, groups[::-1])):
        settings: dict[str, Value] = {}
        now = subject
        for i, group in enumerate([*order, *order]):  # again, for what another's changes took from it or left it
            if group not in _short_groups(now):
                continue
            if (key := (group, overrides(settings))) not in known:
                known[key] = advice(now, group)
            if known[key]:
                settings |= known[key][pick].settings
                now = replace(subject, config=changed(subject.config, settings))
            elif i >= len(order):
                break
        if settings and not _short_groups(now):
            return overrides(settings)
    return None


def _hopeless_anywhere(subject: Subject, group: str) -> bool:
    """Whether a group that loads a model of its own fits on no GPUs of its own either."""
    if subject.card.is_cpu or group in ("actor", "reference") or advice(subject, group):
        return False
    section = next(section for section, _ in subject.config.pools() if GROUPS.get(section, section) == group)
    own = changed(subject.config, {f"{section}.{name}": None for name in ("share_with", "gpus", "gpus_by_node")})
    apart = replace(subject, config=own, nodes=None)
    return not need_of(apart, group).fits and next(_advice(apart, group), None) is None


def overrides(settings: Mapping[str, Value]) -> str:
    """To paste behind the command."""
    return " ".join(f"{name}={str(value).lower()}" for name, value in settings.items())


def shortage(subject: Subject, group: str) -> str:
    """In one line: what does not fit, and the mildest changes, for a message or a handler of out-of-memory errors."""
    memory = need_of(subject, group)
    found = next(_advice(subject, group), None)
    hint = hopeless(subject, memory) if found is None else f"this fits: {found.overrides()}"
    return f"{short(memory, subject.card.is_cpu)}; {hint}"


def hopeless(subject: Subject, memory: GroupMemory) -> str:
    """What to say of a group that does not fit, and for which there is no advice."""
    if subject.nodes is not None and advice(replace(subject, nodes=None), memory.group):
        return "no change of settings makes it fit on the nodes there are: more would"
    if memory.lack or memory.total > subject.card.memory:
        return "no change of settings makes it fit: a smaller model or a larger card would"
    if subject.card.is_cpu:
        return "no change of its own settings makes it fit: smaller groups beside it, or more memory, would"
    return "no change of its own settings makes it fit: smaller groups on its GPUs, or GPUs of its own, would"


def short(memory: GroupMemory, on_cpu: bool = False) -> str:
    """``actor needs 183.7 GB of each GPU and has 84.9``."""
    if memory.lack:
        return f"{memory.group}: {memory.lack}"
    if on_cpu:
        left = f"the other groups leave {max(0.0, memory.available) / GB:.1f} of this machine's memory"
        return f"{memory.group} needs {memory.total / GB:.1f} GB and {left}"
    return f"{memory.group} needs {memory.total / GB:.1f} GB of each GPU and has {memory.available / GB:.1f}"


def by_memory(subject: Subject, sizes_gb: Sequence[float]) -> list[tuple[float, Advice | None, bool]]:
    """What the actor needs changed on a card of each size: its cheapest advice, and whether it fits as it is."""
    rows = []
    for size in sizes_gb:
        other = replace(subject, card=replace(subject.card, memory=size * GB))
        rows.append((size, next(_advice(other, "actor"), None), need_of(other, "actor").fits))
    return rows


def _short_groups(subject: Subject) -> list[str]:
    return [memory.group for memory in memory_of(subject) if not memory.fits]


def _advice(subject: Subject, group: str) -> Iterator[Advice]:
    """:func:`advice`, each when it is asked for."""
    if not need_of(subject, group).fits:
        trials = _Trials(subject, group, {})
        yield from (found for level in LEVELS if (found := _cheapest(trials, level)) is not None)


@dataclass(frozen=True, slots=True)
class _Trials:
    """What ``group`` needs after changes, each looked at once."""

    subject: Subject
    group: str
    known: dict[frozenset[tuple[str, Value]], GroupMemory]

    def after(self, settings: Mapping[str, Value]) -> GroupMemory:
        key = frozenset(settings.items())
        if key not in self.known:
            self.known[key] = after(self.subject, self.group, settings)
        return self.known[key]

    def possible(self, knobs: Sequence[Knob]) -> bool:
        """Whether the strongest changes make it fit. Of a cache's size any may be what is wanted, larger or smaller."""
        caches = {knob.setting: knob.values for knob in knobs if knob.setting.endswith(CACHE)}
        strongest = {knob.setting: knob.values[-1] for knob in knobs if knob.setting not in caches}
        tried = [strongest, *(strongest | {name: value} for name, values in caches.items() for value in values)]
        return any(self.after(settings).fits for settings in tried)

    def minimal(self, settings: Mapping[str, Value]) -> bool:
        """Whether it fits after the changes, and after no fewer of them."""
        return self.after(settings).fits and not any(self.after(fewer).fits for fewer in _without_one(settings))


def _cheapest(trials: _Trials, level: int) -> Advice | None:
    """Of the smallest sets of changes that fit and use this level, the one with the shortest step."""
    subject, group = trials.subject, trials.group
    knobs = [knob for knob in knobs_of(subject, group) if knob.level <= level]
    if not trials.possible(knobs):
        return None
    now, seconds = _needed(need_of(subject, group)), _seconds(subject)
    for n in range(1, MOST_CHANGES + 1):
        fitting: list[Advice] = []
        for settings in filter(trials.minimal, _sets(trials, knobs, n, level)):
            memory, whole = trials.after(settings), complete(subject, settings)
            config = changed(subject.config, whole)
            if _can_be(subject, config):
                slower = _seconds(replace(subject, config=config)) / seconds
                fitting.append(Advice(group, level, whole, now - _needed(memory), memory.margin, slower))
        if fitting:
            return min(fitting, key=lambda one: (round(one.slower, 2), one.saves))
    return None


def _can_be(subject: Subject, config: Config) -> bool:
    """Whether a configuration composes and, where the nodes are known, its groups have room on them."""
    try:
        Config.model_validate(config.model_dump())
    except ValidationError:
        return False
    return subject.nodes is None or solve(asks_of(config), idle_nodes(subject.nodes), 0.0) is not None


def _needed(memory: GroupMemory) -> float:
    """Without the cache, which takes whatever there is."""
    return memory.total - memory.items.get("key-value cache", 0.0)


def _without_one(settings: Mapping[str, Value]) -> Iterator[dict[str, Value]]:
    for left_out in settings:
        yield {name: value for name, value in settings.items() if name != left_out}


def _sets(trials: _Trials, knobs: Sequence[Knob], n: int, level: int) -> Iterator[dict[str, Value]]:
    """Every choice of ``n`` knobs of different settings, one of ``level`` at least, each with every value.

    Those are left out that do not fit with their strongest values.
    """
    for chosen in itertools.combinations(knobs, n):
        if not any(knob.level == level for knob in chosen) or len({knob.setting for knob in chosen}) < n:
            continue
        if trials.possible(chosen):
            for values in itertools.product(*(knob.values for knob in chosen)):
                yield {knob.setting: value for knob, value in zip(chosen, values, strict=True)}


def _seconds(subject: Subject) -> float:
    return step_of(stages_of(subject), 0, subject.hosts).seconds
