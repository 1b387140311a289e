"""``gkd train +recipe=on_policy_distill [OVERRIDES]``: compose the configuration, connect to Ray, run.

Exit codes: 0 where it is done, 1 where the run failed, 2 where it cannot run. Ended by SIGHUP, Ctrl-C and SIGTERM it
has 129, 130 and 143.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gkd.driver.output_dir import claim, make_output_dir, require_writable
from gkd.durable import DirectoryIdentity
from gkd.errors import (  # imports nothing that may be missing
    ConfigError,
    ControlLost,
    Parser,
    RunFailed,
    end_with_reader,
    entry_point,
)

if TYPE_CHECKING:
    from gkd.config import Config
    from gkd.driver.checkpoints.checkpoint import SavedCheckpoint
    from gkd.driver.inputs.find import Inputs
    from gkd.observability.tracking import OnStep

EPILOG = "--settings (or gkd settings) lists every setting, --settings WORD those about something."


@entry_point
def main(arguments: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    parser = Parser("gkd train", description=__doc__, epilog=EPILOG)
    parser.add_argument(
        "--settings", action="store_true", help="list every setting, or those that the words after it name"
    )
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="one run for each combination of values: actor.lr=1e-5,1e-4"
    )
    parser.add_argument("--config", action="store_true", help="print the resolved configuration as YAML")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides: +recipe=NAME, placement=NAME, section.key=value")
    options, unknown = parser.parse_known_intermixed_args(arguments)
    from gkd.cluster.session.shutdown import exit_on_signals

    exit_on_signals()
    from gkd.config import hint, settings
    from gkd.config.compose import compose
    from gkd.config.loading import dump_yaml

    if unknown:
        suggestion = hint(unknown[0].partition("=")[0], settings())
        raise ConfigError(f"unknown option {unknown[0]}: settings are written as section.name=value{suggestion}")
    if options.settings:
        from gkd.cli.settings import show

        show(options.overrides)
        return 0
    if options.config:
        config = compose(options.overrides)
        with end_with_reader():
            print(dump_yaml(config), end="")
        return 0
    if options.multirun:
        from gkd.cli.sweep import sweep

        return sweep(options.overrides, configure)
    from gkd.driver.checkpoints.attempts import name_first_failure

    with name_first_failure():
        run(configure(options.overrides), options.overrides)
    return 0


def configure(overrides: Sequence[str]) -> Config:
    """Compose the configuration of a run. Raises ConfigError for settings that are none of a run's."""
    from gkd.config.compose import compose_run

    config = compose_run(overrides)
    require_recipe(config, "gkd train")
    return config


def require_recipe(config: Config, program: str) -> None:
    """Raise ConfigError, with how ``program`` is given one, for a run without a recipe."""
    from gkd.config.compose import groups

    if config.recipe == "none":
        raise ConfigError(f"name a recipe: {program} +recipe={{{','.join(groups()['recipe'])}}}")


def run(config: Config, overrides: Sequence[str] | None = None, on_step: OnStep | None = None) -> Path:
    """Do one run, from checked configuration to summary; returns its directory.

    Raises ConfigError or RunFailed; leaves no process behind. Where it loses workers, this process is replaced by one
    that goes on, given the ``overrides`` that ``config`` is made of. ``on_step``: as of :func:`gkd.train`.
    """
    from gkd.cluster.session.connect import connect, run_address
    from gkd.config.device import installed_device
    from gkd.config.transfer import require_gpus
    from gkd.driver.checkpoints import restart
    from gkd.driver.checkpoints.attempts import forget_failure_on_step
    from gkd.driver.checkpoints.resume import explain_finished, find
    from gkd.observability.progress import console, log_to
    from gkd.observability.tracking import require_trackers

    started = time.monotonic()
    out = console(patient=True)
    log_to(out)
    require_trackers(config)
    if run_address(config.cluster) is None:  # workers are on this machine
        require_gpus(config.weights, installed_device())
    _require_home(config.data.cache_dir)
    output = make_output_dir(config)
    descriptor = claim(output)
    private, address, saved, place = False, None, None, DirectoryIdentity.of(output)
    try:
        require_writable(output)
        if config.trainer.resume and (text := explain_finished(config, output)) is not None:
            out.print(text)
            return output
        if config.trainer.resume and not restart.start_over(config, output):
            saved = find(config, output)
        inputs = _find_inputs(config, saved, out.print)
        out.print("starting Ray and reserving GPUs")
        print(end="", flush=True)  # a log that takes nothing from the start on ends a run
        with connect(config) as session:
            from gkd.driver.run import drive

            private, address = session.directory is not None, session.joined_address
            whole = _with_absolute_paths(config)
            drive(whole, inputs, session, place, out, started, saved, forget_failure_on_step(on_step))
        return output
    except ConfigError:
        with contextlib.suppress(OSError):  # nothing came of it: leave no empty directory
            output.rmdir()
        raise
    except SystemExit as end:  # a signal, or output that nobody reads any more
        end.add_note(_describe_end(config, output))
        raise
    except (RunFailed, ControlLost) as failure:
        # Where its directory is gone, another run's may be there.
        if overrides is not None and place.is_there and restart.may_begin_again(config, failure, private):
            out.print(f"failed: {failure}", style="red", soft_wrap=True)
            _raise_received(config, output, failure)
            restart.begin_again(config, overrides, output, descriptor, address, failure)
        raise
    finally:
        os.close(descriptor)


def _with_absolute_paths(config: Config) -> Config:
    """Return the configuration that a run leaves behind: of use from any directory."""
    from gkd.config import load
    from gkd.config.paths import with_absolute_paths

    return load(with_absolute_paths(config.model_dump(), Path.cwd()))


def _raise_received(config: Config, output: Path, failure: Exception) -> None:
    """Raise the end that a signal asked for while the run was closed after a ``failure``."""
    from gkd.cluster.session.shutdown import received_signal

    if (end := received_signal()) is not None:
        end.add_note(_describe_end(config, output))
        raise end from failure


def _find_inputs(config: Config, saved: SavedCheckpoint | None, report: Callable[[str], None]) -> Inputs:
    """Find models and data of a run. Raises ConfigError where they are not those of the ``saved`` run that goes on.

    So does the lack of a tracker's login for one that begins; one that goes on, or begins again, does so without the
    tracker.
    """
    from gkd.cluster.workers.heap import pause_garbage_collection
    from gkd.data.layouts import state_day
    from gkd.driver.checkpoints.attempts import restarts
    from gkd.driver.checkpoints.resume import day_of, differences, require_same_data
    from gkd.driver.inputs.find import find_inputs
    from gkd.driver.validation.held_out import require_measurable
    from gkd.observability.tracking import require_logins

    if saved is None and not restarts():
        require_logins(config)
    state_day(day_of(saved))
    with pause_garbage_collection():
        inputs = find_inputs(config, report)
    require_measurable(config, inputs)
    if saved is not None:
        require_same_data(saved, inputs.fingerprints(config))
        if changed := differences(saved, config):
            report(changed)
    return inputs


def _require_home(cache_dir: str | None) -> None:
    """Give a user without an account on the system, as in many containers, what libraries look up: a name and a home.

    They keep caches there. Raises ConfigError, naming what to set, where there is no directory for them.
    """
    user = os.getuid()
    try:
        pwd.getpwuid(user)
        return
    except KeyError:
        os.environ.setdefault("USER", f"uid{user}")
    if os.environ.get("HOME"):
        return
    if cache_dir is None:
        raise ConfigError(f"user {user} has no home directory for caches: name one with data.cache_dir=DIR")
    os.environ["HOME"] = str(Path(cache_dir).absolute())


def _describe_end(config: Config, output: Path) -> str:
    """Return what a run that was stopped leaves."""
    from gkd.config.overrides import shell_override
    from gkd.driver.checkpoints.resume import explain_finished

    if (text := explain_finished(config, output)) is not None:
        return text
    try:
        newest = output / "checkpoints" / (output / "checkpoints" / "latest").read_text(encoding="utf-8")
    except (OSError, ValueError):  # no file, or one that is damaged
        return "there is no checkpoint"
    return f"checkpoint: {newest} ({shell_override('trainer.output_dir', output)} trainer.resume=true goes on)"
