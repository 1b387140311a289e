"""A whole plan: memory, stages, pipeline, advice, and the best splits, as tables and JSON show it."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

from gkd.planning.advice import LEVEL_NAMES, Advice, advice, by_memory, together
from gkd.planning.items import GroupMemory
from gkd.planning.measured import Factors
from gkd.planning.memory import memory_of, takes_turns
from gkd.planning.pipeline import Step, step_of
from gkd.planning.split import Split, best_splits
from gkd.planning.stages import Stages, stages_of
from gkd.planning.subject import Subject

STALENESS = (0, 1, 2)
CARD_SIZES_GB = (12.0, 16.0, 24.0, 40.0, 48.0, 80.0, 141.0)


@dataclass(frozen=True, slots=True)
class Result:
    """What was found of ``subject``.

    ``together``: overrides after which every group fits, None where all do already or none were found. ``factors``: an
    earlier run's, None without one.
    """

    subject: Subject
    memory: list[GroupMemory]
    advice: list[Advice]
    together: str | None
    stages: Stages
    steps: list[Step]
    factors: Factors | None
    splits: list[Split]
    cards: list[tuple[float, Advice | None, bool]]

    def notes(self) -> list[str]:
        """What was assumed."""
        models, config = self.subject.models, self.subject.config
        shapes = (models.student, models.teacher)
        found = list(dict.fromkeys(shape.note for shape in shapes if shape is not None and shape.note))
        if self.factors is None:
            found.append("times are estimates from operations, bytes and links; --from RUN_DIR takes measured ones")
        plan = config.plan
        if takes_turns(self.subject):
            engines = ", ".join(config.on_the_actors_gpus())
            found.append(f"actor and {engines} take turns (cluster.offload); moving them is not in the step's time")
        if plan.nodes is not None and self.subject.nodes is None:
            found.append(f"plan.nodes={plan.nodes} has no room for these groups; advice is for as many as it takes")
        if plan.response_length is None:
            found.append("every text is taken to be as long as its limit; plan.prompt_length, plan.response_length")
        if config.algorithm.needs_teacher and config.teacher.server_ip is not None:
            found.append("the external teacher is taken to keep up")
        return found

    def json(self) -> dict[str, Any]:
        """Everything, with bytes and seconds as they are."""
        work = self.subject.work()
        return {
            "card": asdict(self.subject.card),
            "work": asdict(work),
            "memory": [asdict(m) | {"total": m.total, "margin": m.margin, "fits": m.fits} for m in self.memory],
            "advice": [
                asdict(a) | {"overrides": a.overrides(), "level_name": LEVEL_NAMES[a.level]} for a in self.advice
            ],
            "together": self.together,
            "stages": asdict(self.stages),
            "pipeline": [asdict(s) | {"waits": s.waits} for s in self.steps],
            "measured": None if self.factors is None else asdict(self.factors),
            "best": [
                {"gpus": s.gpus, "overrides": s.overrides(), "stages": asdict(s.stages), "step": asdict(s.step)}
                for s in self.splits
            ],
            "by_memory": [
                {"memory_gb": size, "fits": fits, "overrides": None if a is None else a.overrides()}
                for size, a, fits in self.cards
            ],
            "notes": self.notes(),
        }


def plan(subject: Subject, factors: Factors | None, best: int | None, cards: bool) -> Result:
    """All of it. ``best``: GPUs to split, None for no splits; ``cards``: whether to try cards of several sizes."""
    memory = memory_of(subject)
    own = {group.group: advice(subject, group.group) for group in memory}
    known = factors or Factors()
    stages = known.apply(stages_of(subject))
    return Result(
        subject=subject,
        memory=memory,
        advice=list(itertools.chain(*own.values())),
        together=together(subject, own),
        stages=stages,
        steps=[step_of(stages, staleness, subject.hosts) for staleness in STALENESS],
        factors=factors,
        splits=[] if best is None else best_splits(subject, best, factors=known),
        cards=by_memory(subject, CARD_SIZES_GB) if cards else [],
    )
