"""``gkd export RUN [--step N] OUT``: write a checkpoint of a run as a Hugging Face model directory.

RUN is the run's output directory, OUT a directory that holds nothing yet, such as a volume mounted there, and has its
config.json last. Without --step it is the newest checkpoint that is intact; a finished run's student, which may be of a
later step, is in RUN/model. An adapter is merged into the weights, and written to OUT/adapter as well. Needs no Ray
and no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gkd.errors import ConfigError, Parser, entry_point

if TYPE_CHECKING:
    from gkd.driver.checkpoints.checkpoint import SavedCheckpoint


UNFINISHED = ".gkd-export"
"""What a model is written to, within OUT, before it is moved there."""
OF_NOBODY = {UNFINISHED, "lost+found"}
"""Names that a directory may have in it which holds nothing: of an export that was killed, and of a file system."""
TRIES = 3
"""How many checkpoints are begun to be read, each of which the run, which goes on, deletes meanwhile."""


@entry_point
def main(arguments: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    parser = Parser("gkd export", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="output directory of a run")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write; it must not hold anything")
    parser.add_argument("--step", type=int, metavar="N", help="which checkpoint; the newest unless given")
    options = parser.parse_args(arguments)
    out: Path = options.out.absolute()
    if out.exists() and not (out.is_dir() and {path.name for path in out.iterdir()} <= OF_NOBODY):
        raise ConfigError(f"OUT={options.out} already holds something; choose another directory")
    directory = options.run / "checkpoints"
    from gkd.driver.checkpoints.run_models import export
    from gkd.evaluation.reloading import WeightsDeleted
    from gkd.observability.report import steps_done

    for left in reversed(range(TRIES)):
        saved = choose_checkpoint(directory, options.step)
        try:
            export(saved, out, out / UNFINISHED)
            break
        except WeightsDeleted:
            if not left:
                raise
    line, steps = f"step {saved.state.step} of {options.run} is in {options.out}", steps_done(options.run)
    if options.step is None and steps is not None and steps > saved.state.step:
        line += f"; the trained student, of step {steps}, is in {options.run / 'model'}"
    print(line)
    return 0


def choose_checkpoint(directory: Path, step: int | None) -> SavedCheckpoint:
    """Find the checkpoint of ``step`` in ``directory``, or the newest intact one, of those that are there by then.

    Raises ConfigError when there is none, or when the one of that step is damaged.
    """
    from gkd.driver.checkpoints.checkpoint import (
        DamagedCheckpoint,
        complete,
        describe_none,
        find_newest_intact,
        read_intact,
        step_of,
    )

    if not complete(directory):
        raise ConfigError(describe_none(directory))
    if step is None:
        for _ in range(TRIES):
            saved, damaged = find_newest_intact(directory)
            for path, why in damaged.items():
                print(f"{path} is damaged and left out: {why}", file=sys.stderr)
            if saved is not None:
                return saved
            if damaged:
                raise ConfigError(f"every checkpoint in {directory} is damaged")
        raise ConfigError(f"the run in {directory.parent} deletes its checkpoints before they are read")
    path = directory / f"step_{step}"
    try:
        return read_intact(path)
    except DamagedCheckpoint as error:
        checkpoints = complete(directory)
        if path in checkpoints:
            raise ConfigError(f"--step {step}: {path} is damaged: {error}") from None
    steps = ", ".join(str(step_of(other)) for other in checkpoints)
    raise ConfigError(f"--step {step}: {directory} has no complete checkpoint of it; there are those of {steps}")
