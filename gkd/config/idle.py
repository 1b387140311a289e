"""Settings that change nothing beside the others, and GPUs of a placement that a run leaves idle."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from gkd.config.base import SCORERS, SECTION_OF, Pool
from gkd.config.loading import CONF_DIR, read_yaml
from gkd.config.open import OpenSections
from gkd.config.overrides import flatten
from gkd.config.run import Config

OF_CLIENTS = (
    "server_ip", "server_port", "key_file", "chat_template", "request_timeout_s", "max_attempts", "heartbeat_s",
    "max_top_k", "model.path",
)  # fmt: skip
"""Settings of ``teacher`` that a run reads also where the teacher is a server elsewhere."""
OF_SETS = ("timeout_s", "concurrency", "workers", "max_failed_share", "set_functions")
"""Settings of ``reward`` that rewards of ``data.val_sets`` have as well."""


def find_idle(config: Config) -> Iterator[str]:
    """Yield a warning, in one line, for what was requested and changes nothing. ``config``: as it was requested."""
    placed = _read_placement(config.placement)
    yield from _find_idle_pools(config, placed)
    for why, section, used in _find_unused_parts(config):
        named = [
            f"{section}.{name}={value}" for name, value in _find_changed(config, section, placed) if name not in used
        ]
        if named:
            yield f"{', '.join(named)} change{'s' * (len(named) == 1)} nothing: {why}"
    yield from _find_idle_settings(config)
    yield from find_idle_sections("reward", config.reward)
    yield from find_idle_sections("trainer", config.trainer)


@cache
def _read_placement(name: str) -> Mapping[str, Any]:
    """Return what the file of a placement sets."""
    return read_yaml(CONF_DIR / "placement" / f"{name}.yaml")


def _find_changed(config: Config, section: str, placed: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield settings of a section that neither have their default nor are as the placement's file has them."""
    settings = getattr(config, section)
    usual = flatten(type(settings).model_validate(placed.get(section, {})).model_dump())
    values = flatten(settings.model_dump())
    counted = isinstance(settings, Pool) and settings.ranges() is not None  # by these, not by a setting of its own
    for name, default in usual.items():
        value = values.get(name, default)
        if value != default and not (counted and name in ("n_gpus_per_node", "nnodes")):
            yield name, str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _find_unused_parts(config: Config) -> Iterator[tuple[str, str, Collection[str]]]:
    """Yield why a section's settings change nothing, the section, and which of its settings do all the same."""
    groups, name = config.groups(), f"algorithm.name={config.algorithm.name}"
    for section in SCORERS:
        if section not in groups:
            read = OF_CLIENTS if _is_external(config, section) else ()
            keyed = ("key_file",) if any(group in groups for group in SCORERS) else ()  # of all their sockets
            passed_on = ("colocate_with",) if section in _find_hosts(config) else ()
            yield _why_absent(config, section), section, (*read, *keyed, *passed_on)
    if config.algorithm.policy_weight == 0:
        used = OF_SETS if config.reward.set_functions else ("set_functions",)
        yield f"{name} learns from no rewards", "reward", used
    for section, setting, has_effect, why in (
        ("teacher", "server_port", "teacher" not in groups, "the run starts a teacher, without teacher.server_ip"),
        ("reference", "max_top_k", "reference" not in groups, "a reference gives one log-probability a token"),
        ("watch", "distill_kl", config.algorithm.distils, f"{name} learns no teacher's distribution"),
        ("watch", "reference_kl", config.algorithm.needs_reference, "algorithm.kl.coef=0 uses no reference"),
        ("watch", "no_advantage_steps", config.algorithm.policy_weight > 0, f"{name} learns from no rewards"),
        ("watch", "mismatch_kl", not config.algorithm.is_supervised, f"{name} learns from nothing that is sampled"),
    ):
        if not has_effect:
            yield why, section, flatten(getattr(config, section).model_dump()).keys() - {setting}


def _is_external(config: Config, section: str) -> bool:
    return section == "teacher" and config.algorithm.needs_teacher


def _why_absent(config: Config, section: str) -> str:
    """Return why a run does not start the group that scores and that a section is for."""
    if _is_external(config, section):
        return f"the teacher is a server elsewhere, teacher.server_ip={config.teacher.server_ip}"
    from_adapter = f"with actor.lora.r={config.actor.lora.r} the reference is the actor without its adapter"
    return {
        "teacher": f"algorithm.name={config.algorithm.name} uses no teacher",
        "reward_model": "no reward is the reward model's, as with reward.functions=[reward_model]",
        "reference": from_adapter if config.algorithm.needs_reference else "algorithm.kl.coef=0 uses no reference",
    }[section]


def _find_hosts(config: Config) -> set[str]:
    """Return the groups that others of the run are to share GPUs with, also by way of one that it does not have."""
    hosts: set[str] = set()
    following: list[str] = list(config.groups())
    while following:
        pools = [getattr(config, SECTION_OF[group]) for group in following]
        following = [pool.colocate_with for pool in pools if pool.colocate_with is not None]
        hosts.update(following)
    return hosts


def _find_idle_pools(config: Config, placed: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each pool with GPUs of its own in the placement's file whose group the run does not have."""
    for section in SCORERS:
        if section not in placed or section in config.groups() or section in _find_hosts(config):
            continue
        pool: Pool = type(getattr(config, section)).model_validate(placed[section])
        if pool.colocate_with is not None or (pool.n_workers == 1 and not pool.ranges()):
            continue
        gpus = f"{pool.n_workers} GPU{'s' * (pool.n_workers > 1)}"
        yield f"placement={config.placement} has {gpus} for {section}, which stay idle: {_why_absent(config, section)}"


def _find_idle_settings(config: Config) -> Iterator[str]:
    """Yield a warning for each setting that is not as by default and has no effect beside the others."""
    algorithm = config.algorithm
    samples_are_weighed = algorithm.importance_sampling.level is not None
    conditions = {
        "algorithm.overlong.buffer": (algorithm.overlong.action == "penalty", "action=penalty"),
        "algorithm.kl.estimator": (algorithm.kl.coef > 0, "coef above 0"),
        "algorithm.loss.tail": (algorithm.loss.top_k is not None, "top_k, a number"),
        "algorithm.importance_sampling.cap": (samples_are_weighed, "level=token or sequence"),
        "algorithm.importance_sampling.mask": (samples_are_weighed, "level=token or sequence"),
        "rollout.horizon.steps": (config.rollout.horizon.start is not None, "start"),
        "schedule.recompute_cache": (config.schedule.in_flight, "in_flight=true"),
    }
    for setting, (has_effect, needed) in conditions.items():
        value, default = config.read_setting(setting)
        if value != default and not has_effect:
            section = setting.rpartition(".")[0]
            yield f"{setting}={str(value).lower()} changes nothing without {section}.{needed}"


def find_idle_sections(section: str, settings: OpenSections, selects: str = "") -> Iterator[str]:
    """Yield a warning for each section of a class that is not named, such as ``reward.judge``.

    ``selects``: the setting that would name it, where that is another one than the section's own.
    """
    for name in settings.find_idle_sections():
        yield f"{section}.{name}.* change nothing: {selects or f'{section}.{settings.selects}'} does not name {name}"
