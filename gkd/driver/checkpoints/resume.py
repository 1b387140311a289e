"""Going on with a run: from which checkpoint, and whether it is the same run."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from gkd.config import Config
from gkd.config.endpoint import hide_secrets
from gkd.config.output_files import BEST, METRICS, SUMMARY, parse, read_best
from gkd.config.overrides import flatten
from gkd.config.paths import with_absolute_paths
from gkd.config.validating import require_figures
from gkd.data.tokenizer import check_causal_lm
from gkd.driver.checkpoints.checkpoint import SavedCheckpoint, complete, describe_none, find_newest_intact, step_of
from gkd.driver.validation.early_stop import EarlyStop
from gkd.durable import replace
from gkd.errors import ConfigError
from gkd.observability.report import steps_done
from gkd.version import __version__

log = logging.getLogger("gkd")

_SAME = (
    "actor.lora", "algorithm", "data", "model", "reward", "rollout.n", "trainer.batch_size", "trainer.seed",
)  # fmt: skip
"""Settings that a run must go on with, but for those of :data:`_FREE`."""

_FREE = (
    "data.cache_dir", "data.train_files", "data.val_files", "reward.concurrency", "reward.judge.api_key_env",
    "reward.judge.retries", "reward.judge.slow_s", "reward.judge.timeout_s", "reward.judge.url",
    "reward.max_failed_share", "reward.timeout_s", "reward.workers",
)  # fmt: skip
"""Where files are, whose prompts are compared, and how rewards are computed: a run may have ended for want of time."""

_FILES_OF_SET = re.compile(r"data\.val_sets\..+\.files")
"""Free as well: questions of a set are compared."""

_OWN = ("trainer.output_dir", "trainer.resume", "trainer.restarts", "plan")
"""Settings that change nothing of what a run computes."""


DAY = "day"
"""Beside the fingerprints of a checkpoint: the day that a run's prompts state, in ISO 8601."""


def explain_finished(config: Config, output: Path) -> str | None:
    """Describe a run in ``output`` that is done with all its steps and has written its student; None of any other.

    Raises ConfigError when it has done more steps than it is to have now.
    """
    if (steps := steps_done(output)) is None:
        return None
    total = config.trainer.total_steps
    if steps > total:
        raise ConfigError(
            f"trainer.resume: the run in {output} has done {steps} steps, more than trainer.total_steps={total}"
        )
    stopped = None if steps == total else EarlyStop(config.trainer.stop_early, output / METRICS).reason
    if steps < total and stopped is None:
        return None
    model = output / "model"
    try:
        check_causal_lm(str(model), "model")
    except ConfigError as error:
        log.warning("the run has done its %d steps, but its student is not all there: %s", steps, error)
        return None
    state, setting = f"all {steps} steps are done", "a larger trainer.total_steps"
    if stopped is not None:
        state, setting = f"it stopped early after step {steps} ({stopped})", "other values of trainer.stop_early"
    checkpoints = complete(output / "checkpoints")
    further = _explain_no_checkpoint(output)
    if checkpoints:
        further = f"{setting} would go on after step {step_of(checkpoints[-1])}, from {checkpoints[-1]}"
    return f"the run in {output} is finished: {state} and the trained student is in {model}; {further}"


def has_trained(output: Path) -> bool:
    """Return whether a run has done its last step: it has written its student, and then summary.json."""
    return steps_done(output) is not None or (output / "model").is_dir()


def _explain_no_checkpoint(output: Path) -> str:
    """Describe what is left of a finished run that has nothing to go on from."""
    return f"it left no checkpoint, so more steps are a run of their own, with model.path={output / 'model'}"


def find(config: Config, output: Path) -> SavedCheckpoint:
    """Return the newest intact checkpoint in ``output``; damaged ones after it are named in a warning.

    Raises ConfigError when there is none, when it is of a run with other settings, when its validations have not
    measured what is to keep the best student or to end the run, or when its best.json cannot be read.
    """
    directory = output / "checkpoints"
    saved, damaged = find_newest_intact(directory)
    if saved is None and damaged:
        reasons = "; ".join(f"{path.name}: {why}" for path, why in damaged.items())
        raise ConfigError(f"trainer.resume: every checkpoint in {directory} is damaged: {reasons}")
    if saved is None and has_trained(output):
        how = "is finished" if steps_done(output) is not None else f"has written its student, but no {SUMMARY}"
        raise ConfigError(f"trainer.resume: the run in {output} {how}: {_explain_no_checkpoint(output)}")
    if saved is None:
        raise ConfigError(f"trainer.resume: {describe_none(directory)}; trainer.resume=auto would begin")
    for path, why in damaged.items():
        log.warning("%s is damaged and left out: %s", path, why)
    for key, (old, new) in _changes(saved, config).items():
        free = _is_of(key, _FREE) or _FILES_OF_SET.fullmatch(key) or key in saved.data  # a model's content is compared
        if _is_of(key, _SAME) and not free:
            by = "" if saved.version == __version__ else f" (gkd {saved.version} made it, this is {__version__})"
            raise ConfigError(f"trainer.resume: {saved.path} was made with {key}={old}, this is {new}{by}")
    if saved.state.step > config.trainer.total_steps:
        raise ConfigError(f"trainer.resume: {saved.path} is beyond trainer.total_steps={config.trainer.total_steps}")
    require_figures(config.trainer, {**saved.state.before, **saved.state.validated})
    read_best(output)
    return saved


def _changes(saved: SavedCheckpoint, config: Config) -> dict[str, tuple[str, str]]:
    """Return settings by dotted name that are not the checkpoint's: before, and now; those of one's own come last.

    Files and directories are compared by absolute path, however they were named. What another version had no setting
    for is taken to have been as it is by default.
    """
    trees = saved.config, config.model_dump(mode="json"), Config().model_dump(mode="json")
    before, now, defaults = (flatten(with_absolute_paths(tree, Path.cwd())) for tree in trees)
    if saved.version != __version__:
        before = {key: value for key, value in defaults.items() if key in now} | before
    keys = [*sorted(now.keys() & before.keys()), *sorted(now.keys() ^ before.keys())]
    values = {key: (before.get(key), now.get(key)) for key in keys}
    return {key: (_format(old), _format(new)) for key, (old, new) in values.items() if old != new}


def differences(saved: SavedCheckpoint, config: Config) -> str:
    """Return settings with other values than in the run's earlier part, in one line; empty where there are none.

    Another version of gkd counts as one of them.
    """
    changed = [] if saved.version == __version__ else [f"gkd {saved.version} -> {__version__}"]
    changed += [
        f"{key} {old} -> {new}" for key, (old, new) in sorted(_changes(saved, config).items()) if not _is_of(key, _OWN)
    ]
    return f"goes on with other settings: {', '.join(changed)}" if changed else ""


def day_of(saved: SavedCheckpoint | None) -> date:
    """Return the day that a run's prompts state: that on which it began; today of one that begins.

    Checkpoints of earlier versions do not have it.
    """
    day = None if saved is None else saved.data.get(DAY)
    return date.today() if day is None else date.fromisoformat(day)


def require_same_data(saved: SavedCheckpoint, data: Mapping[str, str]) -> None:
    """Raise ConfigError unless ``data``, fingerprints of prompts and models, are those of the checkpoint.

    Earlier checkpoints state none of ``data.val_sets``, of models, or of a teacher outside the cluster.
    """
    for use, fingerprint in data.items():
        if saved.data.get(use, fingerprint) == fingerprint:
            continue
        if use in ("train", "val") or use.startswith("val_sets."):
            files = f"data.{use}.files" if "." in use else f"data.{use}_files"
            raise ConfigError(f"trainer.resume: the prompts of {files} are not those that {saved.path} was made with")
        run = saved.path.parent.parent
        raise ConfigError(
            f"trainer.resume: {use} has other weights than the model that {saved.path} was made with; put that back, "
            f"or begin a run of its own from the checkpoint (gkd export {run} OUT, model.path=OUT)"
        )


def cut(file: Path, step: int) -> None:
    """Forget what a JSON-lines file, which may be large, states of steps after ``step``: they are done again.

    So is a last line that is not whole. Others that are no JSON are left out with a warning.
    """
    if file.exists():
        with file.open("rb") as rows:
            replace(file, _keep_until(step, rows, file))


def _keep_until(step: int, rows: Iterable[bytes], file: Path) -> Iterator[bytes]:
    for number, row in enumerate(rows, 1):
        if not row.endswith(b"\n"):
            return
        try:
            if parse(row)["step"] <= step:
                yield row
        except (ValueError, KeyError, TypeError) as error:
            log.warning("%s line %d is left out: it is no row of a step (%s)", file, number, error)


def forget_best_after(output: Path, step: int) -> None:
    """Forget the best validation that a run states if it is of a step after ``step``: its figure is cut as well.

    Its student stays until the next validation, which writes one whatever its figure.
    """
    best = read_best(output)
    if best is not None and best["step"] > step:
        (output / BEST).unlink()


def _is_of(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _format(value: Any) -> str:
    """Return a value for a message, of a URL without what may be secret."""
    return f"{value:g}" if isinstance(value, float) else "null" if value is None else hide_secrets(str(value))
