"""Subjects of plans, from overrides as on the command line."""

from __future__ import annotations

import functools

from gkd.config.compose import compose
from gkd.planning import cards
from gkd.planning.subject import Subject, models_of, nodes_of

DATA = ("data.train_files=[x]", "data.val_files=[x]", "data.answer_key=x")


@functools.cache
def subject(*overrides: str, on_cpu: bool = False) -> Subject:
    """A GPU's unless told otherwise."""
    config = compose([*DATA, *overrides] if any("model." in o for o in overrides) else list(overrides))
    card = cards.cpu(config.plan) if on_cpu else cards.gpu(config.plan)
    return Subject(config, models_of(config), card, nodes_of(config))
