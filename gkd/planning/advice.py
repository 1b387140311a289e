"""What to change when a group does not fit: found by trying, the smallest sets that do, in levels of what they cost.

Level 1 trains the same, slower: smaller pieces, recomputation. Level 2 takes memory elsewhere or shortens texts.
Level 3 trains less of the model: adapters. Each level may use those before it, and only where it needs them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError

from gkd.config import GROUPS, Config, Engine
from gkd.planning.items import GB, GroupMemory
from gkd.planning.knobs import Knob, Value, after, complete, knobs_of, need_of
from gkd.planning.memory import memory_of
from gkd.planning.pipeline import step_of
from gkd.planning.stages import stages_of
from gkd.planning.subject import Subject, apart, changed, has_room

LEVELS = (1, 2, 3)
LEVEL_NAMES = {
    1: "the same training, slower",
    2: "memory elsewhere, or shorter texts",
    3: "adapters instead of the model",
}
MOST_CHANGES = 4
CACHE = (".gpu_memory_utilization", ".kv_cache_gb")  # of which any value may be what is wanted, larger or smaller
# Their smallest pieces, and several ranks, also cost something: sums of gradients in pieces, NCCL's buffers.
NOT_FREE = ("actor.loss_chunk", "actor.max_tokens_per_micro_batch", "trainer.n_gpus_per_node", "trainer.nnodes")
SHARES = (0.6, 0.5, 0.4, 0.3)  # of the shares that engines on the same GPUs have


@dataclass(frozen=True, slots=True)
class Advice:
    """Changes after which ``group`` fits.

    ``saves`` bytes of a GPU; ``host``: bytes it takes of the host's memory for that; ``slower``: the step's time
    against now.
    """

    group: str
    level: int
    settings: Mapping[str, Value]
    saves: float
    margin: float
    slower: float
    host: float = 0.0

    def overrides(self) -> str:
        """To paste behind the command."""
        return overrides(self.settings)

    def line(self) -> str:
        """In words."""
        host = f", with {self.host / GB:.1f} GB of the host's memory" if self.host else ""
        saved = f"saves {self.saves / GB:.1f} GB a GPU{host}"
        return f"{self.overrides()} ({saved}; a step takes {self.slower:.2f} of the time)"


def advice(subject: Subject, group: str) -> list[Advice]:
    """For each level that can make ``group`` fit, its cheapest changes; empty when none can, or none is needed.

    Other groups need not fit for it, and may want the same GPUs: see :func:`together`.
    """
    return list(_advice(subject, group))


def together(subject: Subject, own: Mapping[str, Sequence[Advice]] | None = None) -> str | None:
    """Overrides after which every group fits, of low levels rather. None: all fit already, or none were found.

    ``own``: :func:`advice` for each group, where that is known.
    """
    groups = short_groups(subject)
    if own is None:
        own = {group: advice(subject, group) for group in groups}
    if any(not own[group] and not _fits_alone(subject, group) for group in groups if group != "reference"):
        return None  # (a reference may come to be needed no more)
    known = {(group, ""): list(own[group]) for group in groups}
    # The first in order may take GPUs that the next needs; the mildest changes of one may not be enough for another.
    for begin, pick, order in itertools.product(_beginnings(subject), (0, -1), (groups, groups[::-1])):
        settings = dict(begin)
        now = replace(subject, config=changed(subject.config, settings))
        for i, group in enumerate([*order, *order]):  # again, for what another's changes took from it or left it
            if group not in short_groups(now):
                continue
            if (key := (group, overrides(settings))) not in known:
                known[key] = advice(now, group)
            if known[key]:
                settings |= known[key][pick].settings
                now = replace(subject, config=changed(subject.config, settings))
            elif i >= len(order):
                break
        if settings and not short_groups(now):
            return overrides(settings)
    return None


def _beginnings(subject: Subject) -> list[dict[str, Value]]:
    """Nothing, and where engines on the same GPUs want too much of them, the largest shares with which they fit."""
    pairs, short = subject.config.may_share(), short_groups(subject)
    engines = {
        section: pool.gpu_memory_utilization
        for section, pool in subject.config.pools()
        if isinstance(pool, Engine) and any(GROUPS.get(section, section) in pair for pair in pairs)
    }
    if len(engines) > 1 and not subject.card.is_cpu and any(GROUPS.get(name, name) in short for name in engines):
        for part in SHARES:
            smaller: dict[str, Value] = {
                f"{name}.gpu_memory_utilization": round(share * part, 3) for name, share in engines.items()
            }
            still = short_groups(replace(subject, config=changed(subject.config, smaller)))
            if not any(GROUPS.get(name, name) in still for name in engines):
                return [{}, smaller]
    return [{}]


def _fits_alone(subject: Subject, group: str) -> bool:
    """Whether a group fits on GPUs of its own, as it is or after changes."""
    alone = apart(replace(subject, nodes=None))
    return need_of(alone, group).fits or next(_advice(alone, group), None) is not None


def overrides(settings: Mapping[str, Value]) -> str:
    """To paste behind the command."""
    return " ".join(f"{name}={str(value).lower()}" for name, value in settings.items())


def shortage(subject: Subject, group: str) -> str:
    """In one line: what does not fit, and the mildest changes, for a message or a handler of out-of-memory errors."""
    memory = need_of(subject, group)
    found = next(_advice(subject, group), None)
    fits = found.overrides() if found else together(subject)
    return f"{short(memory, subject.card.is_cpu)}; {f'this fits: {fits}' if fits else hopeless(subject, memory)}"


def hopeless(subject: Subject, memory: GroupMemory) -> str:
    """What to say of a group that does not fit, and for which there is no advice."""
    if subject.card.is_cpu:
        return "no change of its own settings makes it fit: smaller models, or more memory, would"
    if subject.nodes is not None and next(_advice(replace(subject, nodes=None), memory.group), None):
        return "no change of settings makes it fit on the nodes there are: more would"
    if _fits_alone(subject, memory.group):
        return "no change of its own settings makes it fit: smaller groups on its GPUs, or GPUs of its own, would"
    return "no change of settings makes it fit: a smaller model or a larger card would"


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


def short_groups(subject: Subject) -> list[str]:
    """Groups that do not fit."""
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
        """Whether the strongest changes make it fit, with or without those that also cost something."""
        caches = {knob.setting: knob.values for knob in knobs if knob.setting.endswith(CACHE)}
        strongest = {knob.setting: knob.values[-1] for knob in knobs if knob.setting not in caches}
        costly = [name for name in strongest if name in NOT_FREE]
        for n in range(len(costly) + 1):
            for left_out in itertools.combinations(costly, n):
                settings = {name: value for name, value in strongest.items() if name not in left_out}
                tried = [settings, *(settings | {name: v} for name, values in caches.items() for v in values)]
                if any(self.after(one).fits for one in tried):
                    return True
        return False

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
                saves = now - _needed(memory)
                fitting.append(Advice(group, level, whole, saves, memory.margin, slower, memory.host))
        if fitting:
            return min(fitting, key=lambda one: (round(one.slower, 2), one.saves))
    return None


def _can_be(subject: Subject, config: Config) -> bool:
    """Whether a configuration composes and, where the nodes are known, its groups have room on them."""
    try:
        Config.model_validate(config.model_dump())
    except ValidationError:
        return False
    return subject.nodes is None or has_room(config, subject.nodes)


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
