"""On-policy distillation and reinforcement learning of language models on Ray pools.

``from gkd import train, evaluate, plan``: the programs as functions, with the same settings. These are a mapping from
names, with dots or nested, to values: ``{"recipe": "grpo", "actor.lr": 1e-5}``. What the command line refuses is a
:class:`gkd.errors.ConfigError`, a run that fails a :class:`gkd.errors.RunFailed`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gkd.version import __version__ as __version__

if TYPE_CHECKING:
    from gkd.evaluation.results import Results
    from gkd.observability.report import Summary
    from gkd.observability.tracking import OnStep
    from gkd.planning.advice.report import PlanReport

Overrides = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A run that has ended: where it is, and what its summary.json holds."""

    output_dir: Path
    summary: Summary

    @property
    def model(self) -> Path:
        """The student, in Hugging Face format."""
        return self.output_dir / "model"


def train(settings: Overrides, on_step: OnStep | None = None) -> TrainedRun:
    """Do a run, as ``gkd train`` does.

    ``on_step`` is called with each step and its metrics as they are logged, 0 being the validation before training;
    what it raises ends the run, which saves a checkpoint first. A run whose workers are lost is not begun again by
    itself: ``trainer.resume`` goes on with it.
    """
    from inspect import iscoroutinefunction

    from gkd.cli.train import configure, run
    from gkd.cluster.session.shutdown import exit_on_unhandled_signals
    from gkd.config.overrides import overrides_of
    from gkd.errors import ConfigError
    from gkd.observability.report import read

    if iscoroutinefunction(on_step):
        raise ConfigError("on_step is async, and nothing awaits it")
    with exit_on_unhandled_signals():
        output = run(configure(overrides_of(settings)), on_step=on_step)
    return TrainedRun(output, read(output))


def evaluate(settings: Overrides, quick: bool = False, run: str | Path | None = None) -> list[Results]:
    """Measure ``models.*`` on sets of questions, as ``gkd evaluate`` does; ``quick``: 5 questions of each set.

    ``run``: the directory of a run, whose checkpoints are measured.
    """
    from gkd.cli.evaluate import configure
    from gkd.cluster.session.shutdown import exit_on_unhandled_signals
    from gkd.config.overrides import overrides_of
    from gkd.evaluation.run import evaluate as measure
    from gkd.observability.progress import console, log_to

    out = console()
    log_to(out)
    config, further = configure([*([] if run is None else [str(run)]), *overrides_of(settings)])
    with exit_on_unhandled_signals():
        return measure(config, out, quick, further)


def plan(settings: Overrides, best: int | None = None, by_memory: bool = False) -> PlanReport:
    """Return what a layout needs, as ``gkd plan`` does; nothing is printed.

    ``best``: the three best splits of so many GPUs; ``by_memory``: what the actor needs changed on GPUs of other sizes.
    """
    from gkd.cli.plan import make
    from gkd.config.overrides import overrides_of

    return make(overrides_of(settings), best=best, by_memory=by_memory)


class _Package(ModuleType):
    """Keeps plan and evaluate the functions where the modules ``gkd.plan`` and ``gkd.evaluate`` are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in ("plan", "evaluate") and isinstance(value, ModuleType)):  # importing a submodule sets it
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
