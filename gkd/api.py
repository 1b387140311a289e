"""``from gkd import train, evaluate, plan``: the programs as functions, with the same settings.

Settings are a mapping from names, with dots or nested, to values: ``{"recipe": "grpo", "actor.lr": 1e-5}``. What the
command line refuses is a :class:`gkd.errors.ConfigError`, a run that fails a :class:`gkd.errors.RunFailed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gkd.config import quoted
from gkd.errors import ConfigError

if TYPE_CHECKING:
    from gkd.evaluation.results import Results
    from gkd.observability.report import Summary
    from gkd.observability.trackers.tracker import OnStep
    from gkd.planning.report import PlanReport

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trained:
    """A run that has ended: where it is, and what its summary.json says."""

    output_dir: Path
    summary: Summary

    @property
    def model(self) -> Path:
        """The student, in Hugging Face format."""
        return self.output_dir / "model"


def train(settings: Settings, on_step: OnStep | None = None) -> Trained:
    """Do a run, as ``gkd train`` does.

    ``on_step`` is called with each step and its metrics as they are logged, 0 being the validation before training;
    what it raises ends the run, which saves a checkpoint first. A run whose workers are lost is not begun again by
    itself: ``trainer.resume`` goes on with it.
    """
    from gkd.cli.train import configure, run
    from gkd.observability.report import read

    output = run(configure(overrides_of(settings)), on_step=on_step)
    return Trained(output, read(output))


def evaluate(settings: Settings, quick: bool = False) -> list[Results]:
    """Measure ``models.*`` on sets of questions, as ``gkd evaluate`` does; ``quick``: 5 questions of each set."""
    from gkd.cli.evaluate import compose_evaluation
    from gkd.evaluation.run import evaluate as measure
    from gkd.observability.progress import console, log_to

    config = compose_evaluation(overrides_of(settings))
    out = console()
    log_to(out)
    return measure(config, out, quick)


def plan(settings: Settings, best: int | None = None, by_memory: bool = False) -> PlanReport:
    """Return what a layout needs, as ``gkd plan`` does; nothing is printed.

    ``best``: the three best splits of so many GPUs; ``by_memory``: what the actor needs changed on GPUs of other sizes.
    """
    from gkd.cli.plan import make

    return make(overrides_of(settings), best=best, by_memory=by_memory)


def overrides_of(settings: Settings) -> list[str]:
    """Return settings as they are written on the command line. Raises ConfigError for a value that has no text."""
    return [
        f"{'+' if name in ('recipe', 'sets', 'task') else ''}{name}={_text(name, value)}"
        for name, value in _flat(settings)
    ]


def _flat(settings: Settings, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values; an empty mapping is a value."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _text(name: str, value: Any) -> str:
    """Return a value in Hydra's grammar."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str() | Path():
            return quoted(str(value))
        case list() | tuple():
            return f"[{','.join(_text(name, item) for item in value)}]"
        case Mapping():
            return f"{{{','.join(f'{key}:{_text(name, item)}' for key, item in value.items())}}}"
    raise ConfigError(f"{name}={value!r}: a {type(value).__name__} is no value of a setting")
