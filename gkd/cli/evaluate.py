"""``gkd evaluate models.base=DIR models.student=RUN/model +sets=gsm8k [OVERRIDES]``: how good are these models?

``gkd evaluate RUN [OVERRIDES]`` measures where the run in that directory began, every checkpoint and the trained
student, on its own questions (``data.val_files``, ``data.val_sets``) unless sets are named.

Asks every model every question of every set (``evaluate.sets.NAME``), with each strategy, and prints scores with their
errors and what the models differ by. ``evaluate.output_dir`` keeps each answer as it comes: the same command goes on
where an earlier one ended, also with more samples or further models. Exit codes as of ``gkd train``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gkd.errors import ConfigError, Parser, entry_point  # imports nothing that may be missing

if TYPE_CHECKING:
    from gkd.config import Config
    from gkd.evaluation.reloading import FurtherWeights

log = logging.getLogger("gkd")

SECTIONS = ("models", "evaluate", "rollout", "cluster", "reward", "plan")
SETTINGS = ("model.dtype", "trainer.seed", "data.max_prompt_length")
"""Sections and settings that an evaluation takes; another one would have no effect."""
POOL = ("rollout.n_gpus_per_node", "rollout.nnodes", "rollout.colocate_with")
OF_A_SET = {"reward.functions": "rewards", "reward.weights": "rewards", "rollout.n": "samples"} | {
    f"rollout.{name}": name for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty")
}


@entry_point
def main(arguments: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    parser = Parser("gkd evaluate", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="ask the first 5 questions of each set alone")
    parser.add_argument(
        "overrides", nargs="*", help="RUN, models.NAME=DIR, +sets=NAME, placement=NAME, section.key=value"
    )
    options = parser.parse_intermixed_args(arguments)
    from gkd.cluster.session.shutdown import exit_on_signals

    exit_on_signals()
    from gkd.cli.compare import show_each_score
    from gkd.config.idle import find_idle_sections
    from gkd.evaluation.run import evaluate
    from gkd.evaluation.table import show
    from gkd.observability.progress import console, log_to

    out = console()
    log_to(out)
    config, further = configure(options.overrides)
    for doubt in find_idle_sections("evaluate", config.evaluate):
        log.warning(doubt)
    if not further:  # of a run these are its own, and not the user's
        for doubt in find_idle_sections("reward", config.reward, "evaluate.sets.NAME.rewards"):
            log.warning(doubt)
    results = evaluate(config, out, options.quick, further)
    out.print()
    show(sorted(results, key=lambda result: list(config.evaluate.sets).index(result.set)), out)
    show_each_score(results, out)
    out.print(f"\n{config.evaluate.output_dir}: results/ has these scores, answers.jsonl every answer", soft_wrap=True)
    return 0


def configure(overrides: Sequence[str]) -> tuple[Config, tuple[FurtherWeights, ...]]:
    """Compose the configuration of an evaluation, and find the models of a run that is named.

    Raises ConfigError, also for settings that have no effect on an evaluation.
    """
    from gkd.config.registry import forget_edited

    forget_edited()
    runs = [override for override in overrides if _names_a_run(override)]
    if not runs:
        return compose_evaluation(overrides), ()
    if len(runs) > 1:
        raise ConfigError(f"{' and '.join(runs)}: one run at a time; of several name the models: models.NAME=RUN/model")
    return _compose_for_run(runs[0], [override for override in overrides if override != runs[0]])


def _names_a_run(override: str) -> bool:
    """Return whether an argument is a run's directory, whose name may look like a setting (actor.lr=1e-05)."""
    from gkd.config import user_path

    if "=" not in override:
        return not override.endswith((".yaml", ".yml"))
    return "/" in override and (user_path(override) / "config.yaml").exists()


def _names_sets(override: str) -> bool:
    """Return whether a setting names sets of questions; another one of a set is for that of the run."""
    from gkd.config.overrides import split_name

    key, _, value = override.lstrip("+").partition("=")
    parts = split_name(key, value.startswith("{"))
    return key == "sets" or (parts[:2] == ["evaluate", "sets"] and parts[3:] in ([], ["files"]))


def _compose_for_run(directory: str, overrides: Sequence[str]) -> tuple[Config, tuple[FurtherWeights, ...]]:
    from gkd.config import escape, user_path
    from gkd.config.compose import compose
    from gkd.config.overrides import overrides_of
    from gkd.driver.checkpoints.run_models import models_of_run, settings_of

    run = user_path(directory).absolute()
    if not (run / "config.yaml").exists():
        raise ConfigError(f"{directory}: no run is there (its config.yaml); models.NAME=DIR measures a model by itself")
    config = compose([str(run / "config.yaml")])
    models = models_of_run(run, config)
    with_sets = not any(map(_names_sets, overrides))
    run_overrides = overrides_of(escape(settings_of(config, models, run, with_sets)))
    return compose_evaluation([*run_overrides, *overrides]), models.further


def compose_evaluation(overrides: Sequence[str]) -> Config:
    """Compose the configuration of an evaluation. Raises ConfigError, also for settings that have no effect on one."""
    from gkd.config.compose import compose, groups, named_settings

    for override in overrides:
        _require_effect(override.partition("=")[0].lstrip("+~"), list(groups()))
    named, wide = named_settings(overrides), "rollout.tensor_parallel_size"
    if wide in named and not named & {"rollout.gpus", "rollout.gpus_by_node"}:
        # As many GPUs as an engine has, before mode makes them more.
        overrides = [*overrides, f"rollout.n_gpus_per_node=${{{wide}}}"]
    config = compose(overrides)
    if not config.evaluates:
        raise ConfigError("name a model: gkd evaluate models.NAME=DIR +sets=NAME")
    return config


def _require_effect(key: str, groups: Sequence[str]) -> None:
    """Raise ConfigError for a setting of training, which would change nothing here."""
    from gkd.config import settings

    if key in ("recipe", "task"):
        raise ConfigError(f"{key} is for training; an evaluation takes +sets=NAME and placement=NAME")
    if key in POOL:
        raise ConfigError(f"{key}: evaluate.mode sets how many GPUs an evaluation takes, rollout.gpus which")
    if key in OF_A_SET:
        raise ConfigError(f"{key} is of training; a set of questions has its own: evaluate.sets.NAME.{OF_A_SET[key]}")
    is_setting = key in settings() and key not in SETTINGS and key.partition(".")[0] not in SECTIONS
    if is_setting and key not in groups:
        raise ConfigError(f"{key} has no effect on an evaluation, which takes {', '.join(SECTIONS)}")
