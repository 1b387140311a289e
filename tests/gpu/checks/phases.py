"""A run of gkd.main whose workers note their memory after each phase of colocation.

    python -m tests.gpu.checks.phases FILE +recipe=NAME [OVERRIDES]

FILE gets a line of JSON for every phase of a worker: the actor's offload and onload, the engines' sleep and wake, and
each push of weights.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gkd.cluster.workers.group import Group

ANSWERS_S = 60.0
PHASES = ("offload", "onload", "sleep", "wake weights", "wake", "push")
"""``wake weights``: as far as new weights need."""
GroupsOf = Callable[[Any], "Iterable[Group]"]


def note_phases(file: Path) -> None:
    """Have the groups of the run in this process add to ``file`` after each phase."""
    from gkd.actor.ranks import ActorRanks
    from gkd.driver.groups.scorers import Scorers
    from gkd.driver.groups.weight_sync import WeightSync
    from gkd.rollout.group import RolloutGroup

    patched: list[tuple[type, dict[str, str], GroupsOf]] = [
        (ActorRanks, {"offload": "offload", "onload": "onload"}, lambda actor: [actor.group]),
        (RolloutGroup, {"sleep": "sleep", "wake": "wake"}, lambda rollout: [rollout.living_group]),
        (
            Scorers,
            {"sleep": "sleep", "wake": "wake"},
            lambda its: [its.groups[name] for name in its.list_sleeping_groups()],
        ),
        (WeightSync, {"push": "push"}, lambda sync: [sync.actor.group, sync.rollout.living_group]),
    ]
    for kind, phases, groups_of in patched:
        for method, phase in phases.items():
            setattr(kind, method, _noting(getattr(kind, method), phase, groups_of, file))


def _noting(method: Callable[..., Any], phase: str, groups_of: GroupsOf, file: Path) -> Callable[..., Any]:
    import ray

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        name = f"{phase} weights" if phase == "wake" and (kwargs or args) else phase
        with file.open("a") as lines:
            for group in groups_of(self):
                refs = [worker.__ray_call__.remote(measure_memory) for worker in group.workers]
                for rank, memory in enumerate(ray.get(refs, timeout=ANSWERS_S)):
                    lines.write(json.dumps({"phase": name, "worker": f"{group.name} {rank}", **memory}) + "\n")
        return result

    return call


def measure_memory(worker: Any) -> dict[str, float]:
    """Return GB that a worker has on the host and, where it computes on a GPU, there, and what is free on it.

    A sampling engine may compute in further processes: on the host it is the sum, on the GPU the one that has most.
    """
    import torch

    from gkd.cluster.workers.activity import memory_here
    from gkd.rollout.worker import RolloutWorker

    built = worker._object
    memory = [memory_here()]
    free = [torch.cuda.mem_get_info()] if torch.cuda.is_initialized() else []
    if isinstance(built, RolloutWorker):  # only the thread of its engine may call these
        memory += built.loop.call(lambda: built.engine.call_processes(memory_here), "measure its memory")
        if any("allocated_gb" in its for its in memory[1:]):
            free += built.loop.call(lambda: built.engine.call_processes(torch.cuda.mem_get_info), "measure its memory")
    noted = {"process_gb": sum(its["process_gb"] for its in memory)}
    if allocated := [its["allocated_gb"] for its in memory if "allocated_gb" in its]:
        noted["allocated_gb"] = max(allocated)
    if free:
        noted["free_gb"] = min(its for its, _ in free) / 1e9
    return noted


def read_phases(file: Path) -> dict[str, dict[str, list[float]]]:
    """Return what :func:`note_phases` wrote: by phase and worker, as ``offload, actor 0``, every figure in order."""
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in map(json.loads, file.read_text().splitlines()):
        of_phase = figures[f"{row.pop('phase')}, {row.pop('worker')}"]
        for name, value in row.items():
            of_phase[name].append(float(f"{value:.4g}"))
    return {phase: dict(values) for phase, values in figures.items()}


if __name__ == "__main__":
    from gkd.cli.command import run

    note_phases(Path(sys.argv.pop(1)))
    run("train")
