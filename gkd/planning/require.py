"""The check before a run: a layout that cannot fit ends it before anything loads.

The estimate is good to some per cent, so what misses by less than :data:`DOUBT` is warned of and may try.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gkd.config import Config
from gkd.errors import ConfigError
from gkd.planning import cards
from gkd.planning.advice import shortage
from gkd.planning.memory import memory_of, takes_turns
from gkd.planning.subject import Models, Subject

log = logging.getLogger("gkd")
DOUBT = 0.1  # of what is there


def require_memory(
    config: Config, models: Models, card_bytes_by_group: Mapping[str, float] | None, gpus_of_nodes: Sequence[int] = ()
) -> None:
    """Raise ConfigError, in one line with advice, unless every group fits on its cards.

    ``card_bytes_by_group``: memory of the smallest GPU of each group, as CUDA reports it; groups left out are not
    checked. None: all groups compute on this machine's CPU and share its memory. ``gpus_of_nodes``: how many GPUs every
    node has, beyond which no advice goes; empty where that is not known. Does nothing where ``plan.check`` is false.
    """
    if not config.plan.check:
        return
    override = "plan.check=false starts it all the same"
    for name, subject in _subjects(config, models, card_bytes_by_group, gpus_of_nodes).items():
        # On a CPU no group fits when one does not; the largest is the one to change.
        for memory in sorted(memory_of(subject), key=lambda memory: -memory.total):
            if name not in (None, memory.group) or memory.fits:
                continue
            told = shortage(subject, memory.group)
            if memory.lack or memory.margin < -DOUBT * memory.available:
                raise ConfigError(f"{told}; {override}")
            log.warning(told)
            return


def turns_needed(config: Config, models: Models, card_bytes_by_group: Mapping[str, float] | None) -> bool:
    """Whether the actor and the engines on its GPUs take turns there; arguments as of :func:`require_memory`."""
    return any(takes_turns(subject) for subject in _subjects(config, models, card_bytes_by_group).values())


def _subjects(
    config: Config,
    models: Models,
    card_bytes_by_group: Mapping[str, float] | None,
    gpus_of_nodes: Sequence[int] = (),
) -> dict[str | None, Subject]:
    """What to plan, by the group whose card it is on; None: all on a CPU."""
    if card_bytes_by_group is None:
        return {None: Subject(config, models, cards.cpu(config.plan))}
    card = cards.gpu(config.plan)  # its speed only orders the advice
    nodes = tuple(gpus_of_nodes) or None
    return {
        group: Subject(config, models, replace(card, memory=size), nodes) for group, size in card_bytes_by_group.items()
    }
