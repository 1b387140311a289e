"""Hydra composes files and overrides into one tree; :func:`gkd.config.load` checks it.

Hydra's own messages run over several lines and end with exit code 1, so overrides are looked at first and every
mistake becomes one :class:`ConfigError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gkd.config import Config, hint, load, nearest, settings
from gkd.config.data import TASKS
from gkd.config.file import CONF_DIR, read_yaml
from gkd.config.loading import is_text, open_sections, unknown
from gkd.errors import ConfigError, one_line
from gkd.registry import absolute


def groups() -> dict[str, list[str]]:
    """Choices of every configuration group: recipe, placement, ..."""
    return {d.name: sorted(f.stem for f in d.glob("*.yaml")) for d in sorted(CONF_DIR.iterdir()) if d.is_dir()}


def compose(overrides: Sequence[str]) -> Config:
    """Compose conf/config.yaml with Hydra overrides such as ``+recipe=on_policy_distill`` or ``trainer.gpus=0-1``.

    One of the overrides may be a YAML file instead, such as a run's ``config.yaml``: the recipe and the placement that
    it names come first, then its other values, then the command line. A recipe that only the command line names comes
    below the file's values, too. Where no model is named, the task's settings (conf/task) come in between the recipe's
    and what is given. Raises ConfigError, in one line, for what Hydra or :mod:`gkd.config` does not accept.
    """
    files = [o for o in overrides if "=" not in o and o.endswith((".yaml", ".yml"))]
    overrides = [o for o in overrides if o not in files]
    # The recipe has no default to override, so Hydra asks for a plus; people forget it.
    overrides = [_plus(o) for o in overrides]
    _check(overrides)
    if len(files) > 1:
        raise ConfigError(f"{' and '.join(files)}: one file with a configuration is expected")
    composed = partial(_with_file, files[0], overrides) if files else partial(_without_file, overrides)
    config = load(composed([]))
    if config.uses_task and not any(o.startswith("+task=") for o in overrides):
        task = config.data.task or TASKS.names()[0]
        variants = [task] if config.algorithm.distils else [f"{task}_rewards", task]
        for variant in [name for name in variants if name in groups()["task"]][:1]:
            config = load(composed([f"+task={variant}"]))
    return config


def _plus(override: str) -> str:
    """``override`` with the plus that Hydra wants before what has no default to override."""
    if override.startswith(("recipe=", "teacher.models")):
        return f"+{override}"
    key = override.partition("=")[0]
    is_own = any(key.startswith(f"{section}.") for section in open_sections()) and key not in _names_with_defaults()
    return f"++{override}" if is_own else override


def _defaults() -> DictConfig:
    defaults = Config().model_dump()
    for name in ("trainer", "rollout", "teacher", "reference", "reward_model"):
        defaults[name] |= {"n_gpus_per_node": None, "nnodes": None}  # so that ranges alone say how many
    defaults["actor"]["lr"] = None  # so that the recipe's algorithm decides
    for name in open_sections():
        _drop_own(defaults, name)  # which are those of the class that is named in the end
    return OmegaConf.create(defaults)


def _drop_own(tree: Mapping[str, Any], section: str) -> None:
    """Leave of ``section`` in ``tree`` the settings that it has whatever class it names."""
    node: Any = tree
    for part in section.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    for key in set(node or {}) - set(open_sections()[section].model_fields):
        del node[key]


def _drop_own_of_replaced(values: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Drop from a file's ``values`` the own settings of classes in whose place ``overrides`` name others."""
    texts = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
    for section, kind in open_sections().items():
        name: Any = values
        for part in [*section.split("."), kind.selects]:
            name = name.get(part, {}) if isinstance(name, Mapping) else {}
        text = texts.get(f"{section}.{kind.selects}")
        if isinstance(name, str) and text is not None and absolute(text.strip("\"'")) != absolute(name):
            _drop_own(values, section)


@cache
def _names_with_defaults() -> frozenset[str]:
    """Dotted names of all that the defaults hold."""

    def walk(node: Any, prefix: str) -> Iterator[str]:
        for name, below in node.items() if isinstance(node, dict) else ():
            yield f"{prefix}{name}"
            yield from walk(below, f"{prefix}{name}.")

    return frozenset(walk(OmegaConf.to_container(_defaults()), ""))


def _without_file(overrides: Sequence[str], task: Sequence[str]) -> dict[str, Any]:
    return _tree(_defaults(), [*overrides, *task])


def _with_file(file: str, overrides: Sequence[str], task: Sequence[str]) -> dict[str, Any]:
    values = read_yaml(file)
    chosen = {group: values.pop(group, None) for group in ("recipe", "placement")}
    for key in values:
        if key not in Config.model_fields:  # before Hydra, to which some names mean more
            raise unknown(key, values[key])
    choices = groups()
    for group, choice in chosen.items():
        if choice not in (None, "none", *choices[group]):
            known = f"{nearest(str(choice), choices[group])}; there are {', '.join(choices[group])}"
            raise ConfigError(f"{file}: {group}={choice}: no such choice{known}")
    placement = [] if chosen["placement"] is None else [f"placement={chosen['placement']}"]
    recipe = [f"+recipe={chosen['recipe']}"]
    if chosen["recipe"] in (None, "none"):
        recipe = [o for o in overrides if o.startswith("+recipe=")]
        overrides = [o for o in overrides if o not in recipe]
    _drop_own_of_replaced(values, overrides)
    below = OmegaConf.create(_tree(_defaults(), [*placement, *recipe, *task]))
    if not any(o.startswith("placement=") for o in overrides):
        overrides = ["~placement", *overrides]  # it is in there already
    try:
        merged = OmegaConf.merge(below, values)
    except OmegaConfBaseException as error:  # a list in place of a section
        raise ConfigError(f"{file} does not fit: {str(error).splitlines()[0]}") from None
    assert isinstance(merged, DictConfig)
    return _tree(merged, overrides)


def _tree(base: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """What Hydra makes of ``base``, the choices and the values of ``overrides``."""
    ConfigStore.instance().store(name="settings", node=base)
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR.resolve())):
            tree = OmegaConf.to_container(hydra_compose("config", overrides=list(overrides)), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_line(error)) from None
    assert isinstance(tree, dict)
    return {str(k): v for k, v in tree.items()}


def _check(overrides: Sequence[str]) -> None:
    for override in overrides:
        if not is_text(override):
            raise ConfigError(f"{override!r}: is no text that a file could hold")
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        reason = str(error).splitlines()[0].split(":", 1)[-1].strip()
        raise ConfigError(f"cannot read the overrides (quote what has spaces or commas): {reason}") from None
    known, choices = settings(), groups()
    for override in parsed:
        key = override.key_or_group
        if not key:
            raise ConfigError(f"cannot read the overrides: {override.input_line} names no setting")
        if key in choices:
            _check_choice(override, choices[key])
        elif key not in known and not any(k.startswith(f"{key}.") for k in known) and not _may_be_own(key, known):
            raise ConfigError(f"unknown setting {key}{hint(key, [*known, *choices])}")
        elif override.is_sweep_override():
            line = str(override.input_line).removeprefix("++")
            raise ConfigError(f"{line}: one value is expected; write a list as '[a,b]' or quote it")


def _may_be_own(key: str, known: Mapping[str, str]) -> bool:
    """Whether a class of the user's own may take the setting ``key``, which is known once the class is loaded."""
    if key.startswith("teacher.models."):
        return True
    in_open_section = any(key.startswith(f"{section}.") for section in open_sections())
    return in_open_section and not any(key.startswith(f"{name}.") for name in known)


def _check_choice(override: Override, choices: list[str]) -> None:
    value = override.value()
    if value not in choices:
        known = f"{nearest(str(value), choices)}; there are {', '.join(choices)}"
        raise ConfigError(f"{override.key_or_group}={value}: no such choice{known}")
