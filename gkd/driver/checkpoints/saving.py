"""Writing a run's checkpoints: by step, by time, and where it ends before its time."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gkd.actor.batches import combine_mini_batches
from gkd.actor.group import ActorGroup
from gkd.cluster.workers.group import Attend, PendingCall, attend_until_done, gather, is_done, wait
from gkd.config import Config
from gkd.config.output_files import METRICS, SAMPLES
from gkd.driver.checkpoints import checkpoint
from gkd.driver.checkpoints.checkpoint import RANKS, Cause, RunState, SavedCheckpoint
from gkd.durable import Checksum, DirectoryIdentity, flush, make_beside, reason
from gkd.errors import RunFailed, describe_error
from gkd.observability import events
from gkd.observability.metrics import JsonLines, keep_finite

log = logging.getLogger("gkd")


@dataclass(frozen=True, slots=True)
class RunningWrite:
    """A checkpoint that the ranks are writing, until ``deadline`` (``time.monotonic``)."""

    saved: SavedCheckpoint
    calls: PendingCall
    deadline: float


def require_place(place: DirectoryIdentity) -> None:
    """Raise RunFailed where the run's directory is not there any more: another one would be written into."""
    if change := place.describe_change():
        raise RunFailed(f"trainer.output_dir: {change}")


class Checkpoints:
    """Has the actor write checkpoints while the run goes on, which waits for the copy of its state alone.

    A checkpoint is named after the step that the ranks' weights are of; :meth:`train` and :meth:`save_if_due` are given
    the driver's part of each step. A checkpoint is completed at the first of these calls after its files are written.

    ``place`` is the run's directory; ``started`` is when it began (``time.monotonic``); ``data`` are fingerprints of
    its prompts and models; ``first`` is the step that it goes on after; ``logs`` are files whose lines are there
    wherever a checkpoint is.
    A directory of checkpoints belongs to one run at a time.
    """

    def __init__(
        self,
        config: Config,
        place: DirectoryIdentity,
        started: float,
        data: Mapping[str, str],
        first: int = 0,
        logs: Sequence[JsonLines] = (),
    ) -> None:
        self.config, self.directory, self.started, self.data = config, place.path / "checkpoints", started, data
        self._place, self._logs = place, logs
        self._newest = self._done = first  # steps: of the newest checkpoint; that are trained, validated and logged
        self._states: dict[int, RunState] = {}
        self._writing: RunningWrite | None = None
        self._begun = time.monotonic()  # the last checkpoint, or the run
        self._failure: str | None = None
        self._last: int | None = None  # the step that the run ends with, once that is known
        self._ending = False

    def train(self, state: RunState) -> None:
        """Note that the actor may hold the weights of this step from now on, whose row is not written yet."""
        self._states = {step: old_state for step, old_state in self._states.items() if step == state.step - 1}
        self._states[state.step] = state
        writing = self._writing
        if writing is not None and (is_done(writing.calls) or time.monotonic() > writing.deadline):
            self.wait()

    def save_if_due(self, actor: ActorGroup, state: RunState, last: bool = False, attend: Attend | None = None) -> None:
        """Begin a checkpoint if it is time, after a step is trained, validated and logged. A failure is a warning.

        ``last``: the run ends with this step, before ``trainer.total_steps``. Where the one before is still being
        written it is waited for, and ``attend`` called meanwhile (:func:`attend_until_done`).
        """
        self.train(state)
        self._done = state.step
        trainer = self.config.trainer
        if last or state.step == trainer.total_steps:
            self._last = state.step
        last = self._last is not None
        if trainer.save_every is not None and (state.step % trainer.save_every == 0 or last):
            if attend is not None and self._writing is not None:
                attend_until_done(self._writing.calls, self._writing.deadline - time.monotonic(), attend)
            self.wait()
            self._begin(actor, "step")
        elif self._writing is None and (time.monotonic() - self._begun) / 60 >= (trainer.save_minutes or math.inf):
            self._begin(actor, "time")

    def settle(self) -> Path:
        """Return the directory for what a run leaves at its end: its own, or a new one where that is not there."""
        output = self._place.path
        if (change := self._place.describe_change()) is not None:
            output = make_beside(output)
            log.warning("trainer.output_dir: %s; what was trained goes to %s", change, output)
            self.directory, self._place, self._newest = output / "checkpoints", DirectoryIdentity.of(output), 0
        return output

    def finish(self) -> None:
        """Raise RunFailed when the last step's, if it was due, could not be written."""
        if self._failure is not None:
            raise RunFailed(self._failure)

    def rescue(self, actor: ActorGroup) -> None:
        """Save what is whole of a run that ends before its time, and print where it can go on from. Never raises."""
        self._ending = True
        try:
            if self._writing is None or is_done(self._writing.calls) or actor.is_responding():
                self.wait()
            self.settle()
            step = actor.read_applied().step
            if step < self._done:
                raise RunFailed("its processes were being started again")
            if step > self._newest:
                self._start(actor, "end")
                self.wait(warn=False)
            elif step == 0:
                return  # nothing was trained yet
        except Exception as error:  # what ends the run is on its way, and must not be hidden by another error
            log.warning("no checkpoint of the last step could be written: %s", self._describe_failure(error))
        if self._newest:
            path = self.directory / f"step_{self._newest}"
            text = "checkpoint of step %d: %s (go on with trainer.resume=true)"
            log.warning(text, self._newest, path, extra={"kind": "checkpoint"})
        else:
            log.warning("there is no checkpoint to go on from")

    def _begin(self, actor: ActorGroup, cause: Cause) -> None:
        try:
            self._start(actor, cause)
        except (RunFailed, OSError) as error:
            self._fail(max(self._states), cause, error)

    def _start(self, actor: ActorGroup, cause: Cause) -> None:
        """Have all ranks copy what they hold and write it. Raises RunFailed or OSError."""
        self._begun = time.monotonic()
        require_place(self._place)
        applied = actor.stage()
        state = self._states.get(applied.step)
        if state is None:
            raise RunFailed(f"the actor holds the weights of step {applied.step}, which the run has no record of")
        if state.row is not None:  # of an update whose metrics never arrived
            state = replace(state, row={**keep_finite(combine_mini_batches(applied.rows)), **state.row})
        path = self.directory / f"step_{state.step}"
        checkpoint.remove(path)
        (path / RANKS).mkdir(parents=True)
        config = self.config.model_dump(mode="json")
        saved = SavedCheckpoint(path, cause, state, config, actor.model_path, actor.dtype, self.data, {})
        deadline = time.monotonic() + self.config.trainer.save_timeout_s
        self._writing = RunningWrite(saved, actor.write_staged(str(path / RANKS)), deadline)

    def wait(self, warn: bool = True) -> None:
        """Wait until the checkpoint under way is written, and complete it. With ``warn`` a failure is a warning."""
        writing = self._writing
        if writing is None:
            return
        self._writing, saved = None, writing.saved
        try:
            left = max(0.0, writing.deadline - time.monotonic())
            if not left and not is_done(writing.calls):
                limit = self.config.trainer.save_timeout_s
                raise RunFailed(f"it was not on the disk after {limit:g} s (trainer.save_timeout_s)")
            written: list[tuple[str, Checksum]] = gather([writing.calls], left)[0]
            require_place(self._place)
            files = {f"{RANKS}/{name}": sum_ for name, sum_ in written}
            state = replace(saved.state, wall_s=saved.state.wall_s + time.monotonic() - self.started)
            for lines in self._logs:
                lines.require_written()
            for file in (self.directory.parent / name for name in (METRICS, SAMPLES)):
                if file.exists():  # a checkpoint states that their lines up to its step are there
                    flush(file)
            checkpoint.write(replace(saved, files=files, state=state))
        except (RunFailed, OSError) as error:
            with suppress(RunFailed):  # of one rank; others may be writing there still
                wait(writing.calls, max(0.0, writing.deadline - time.monotonic()))
            if self._place.is_there:
                shutil.rmtree(saved.path, ignore_errors=True)
            if not warn:
                raise
            self._fail(saved.state.step, saved.cause, error)
            return
        except BaseException:
            self._writing = writing  # the run is ended while it waits: whoever saves what is whole waits again
            raise
        self._newest = saved.state.step
        events.note("checkpoint", f"checkpoint of step {self._newest}: {saved.path}", step=self._newest)
        with suppress(OSError):  # what cannot be deleted now is tried again after the next one
            self._forget(self._newest)

    def _fail(self, step: int, cause: Cause, error: Exception) -> None:
        text = f"the checkpoint of step {step} could not be written: {self._describe_failure(error)}"
        if cause == "step" and step == self._last:
            self._failure = text
            events.note("warning", text)
        else:
            log.warning("%s%s", text, "" if self._ending else "; the run goes on")

    def _describe_failure(self, error: Exception) -> str:
        if isinstance(error, OSError):
            return reason(error, self.directory)
        return str(error) if isinstance(error, RunFailed) else describe_error(error)

    def _forget(self, newest: int) -> None:
        """Delete all but the newest ones: of those by time what is not among the newest of all.

        Damaged ones of later steps, which the run does not go on from, are left to be looked at or written again.
        """
        keep = self.config.trainer.keep_checkpoints
        checkpoints = [path for path in checkpoint.complete(self.directory) if checkpoint.step_of(path) <= newest]
        lasting = [path for path in checkpoints if _cause(path) != "time"]
        for path in {*checkpoints} - {*checkpoints[-keep:], *lasting[-keep:]}:
            checkpoint.remove(path)
        for path in checkpoint.list_incomplete(self.directory):
            shutil.rmtree(path)


def _cause(path: Path) -> Cause:
    try:
        return checkpoint.read(path).cause
    except checkpoint.DamagedCheckpoint:
        return "time"
