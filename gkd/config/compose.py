"""Hydra composes recipe, placement and task into one tree; :func:`gkd.config.load` checks it.

Hydra's own messages run over several lines and end with exit code 1, so overrides are looked at first and every
mistake becomes one :class:`ConfigError`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gkd.config import Config, hint, load, settings, suggest
from gkd.config.base import GROUP_OF, quote, user_path
from gkd.config.data import TASKS
from gkd.config.loading import (
    CONF_DIR,
    is_text,
    make_unknown_error,
    names_file,
    open_sections,
    plain_name,
    read_layer,
)
from gkd.config.open import OpenSections
from gkd.config.overrides import VALUES, flatten, keep_name, literal_override, split_name, with_text_names
from gkd.config.registry import forget_edited, make_absolute, shorten_name
from gkd.errors import ConfigError, one_line

BASE: Mapping[str, Any] = {
    **{name: {"n_gpus_per_node": None, "nnodes": None} for name in GROUP_OF},  # so that ranges alone state how many
    "actor": {"lr": None},  # so that the recipe's algorithm decides
}
"""What every configuration begins with; the defaults of all other settings are those of :class:`gkd.config.Config`."""
LAYOUT = ("n_gpus_per_node", "nnodes", "gpus", "gpus_by_node", "colocate_with")
"""Settings of a pool that state where it is."""


@cache
def groups() -> dict[str, list[str]]:
    """Return choices of every configuration group: recipe, placement, ..."""
    return {d.name: sorted(f.stem for f in d.glob("*.yaml")) for d in sorted(CONF_DIR.iterdir()) if d.is_dir()}


def compose(overrides: Sequence[str]) -> Config:
    """Compose conf/config.yaml with Hydra overrides such as ``+recipe=on_policy_distill`` or ``trainer.gpus=0-1``.

    One of the overrides may be a YAML file instead, such as a run's ``config.yaml``: the recipe and the placement that
    it names come first, then its other values, then the command line. A recipe that only the command line names comes
    below the file's values, too; a placement there replaces the file's, with what came of that. Where no model is
    named, the task's settings (conf/task) come in between the recipe's and what is given. Raises ConfigError, in one
    line, for what Hydra or :mod:`gkd.config` does not accept.
    """
    files = [override for override in overrides if names_file(override)]
    if len(files) > 1:
        raise ConfigError(f"{' and '.join(files)}: one file with a configuration is expected")
    parsed = _parse([o for o in overrides if o not in files])
    below, stored = _read(files[0]) if files else ({}, {})
    above: dict[str, str] = {}
    for override in parsed:
        if (group := override.key_or_group) in groups():
            over_file = bool(files) and (group == "placement" or group in below)
            (above if over_file else below)[group] = _choice_text(override.value())
    values = [override for override in parsed if override.key_or_group not in groups()]
    _drop_own_of_replaced(stored, values)
    if "placement" in above:
        _drop_placement(stored, below.get("placement"))
        below["placement"] = above["placement"]
    layers = [layer for layer in (stored, _compose_groups(**above)) if layer]

    def compose_with(**task: str) -> Config:
        return load(_tree([_compose_base(**{"placement": "auto", **below, **task}), *layers], values))

    config = compose_with()
    if config.uses_task and "task" not in below:
        by_token = config.algorithm.distils or config.algorithm.is_supervised
        task = TASKS.load(config.data.task or TASKS.names()[0])
        choice = getattr(task, "token_settings" if by_token else "reward_settings", None)
        if choice is not None:
            config = compose_with(task=choice)
    return config


def compose_run(overrides: Sequence[str]) -> Config:
    """Compose the configuration of a run. Raises ConfigError, also for settings that are of evaluations alone."""
    forget_edited()
    config = compose(overrides)
    named = named_settings([arg for arg in overrides if not names_file(arg)])  # a run's own file has every setting
    if config.evaluates or config.evaluate.sets or any(name.startswith("evaluate.") for name in named):
        raise ConfigError("models.* and evaluate.* are for gkd evaluate; a run trains model.path")
    return config


@cache
def _compose_base(**choices: str) -> DictConfig:
    """Return what the files of these groups set above :data:`BASE`."""
    composed = OmegaConf.merge(BASE, _compose_groups(**choices))
    assert isinstance(composed, DictConfig)
    return composed


def _compose_groups(**choices: str) -> DictConfig:
    """Return what the files of these groups set, the later above the earlier."""
    composed = OmegaConf.merge(*(_compose_group(group, choice) for group, choice in choices.items()), {})
    assert isinstance(composed, DictConfig)
    return composed


@cache
def _compose_group(group: str, choice: str) -> DictConfig:
    """Return what the file of this choice sets. Hydra takes as long for one as for several together."""
    outer = GlobalHydra.instance().hydra  # of a program that uses Hydra itself
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR.resolve())):
            composed: DictConfig = hydra_compose("config", overrides=[f"+{group}={choice}"])
    except HydraException as error:
        raise ConfigError(one_line(error)) from None
    finally:
        GlobalHydra.instance().hydra = outer
    OmegaConf.set_struct(composed, False)  # what is merged with it may hold further names
    return composed


def _read(file: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Read a configuration file; returns the choices of groups that it names, and its values."""
    values, choices = _nest(file, with_text_names(read_layer(file))), groups()
    selection = {group: values.pop(group, None) for group in ("recipe", "placement")}
    for key in values:
        if key not in Config.model_fields:
            raise make_unknown_error(key, values[key])
        if _is_section(key):
            _require_section(file, key, values[key])
    for group, choice in selection.items():
        if choice not in (None, "none", *choices[group]):
            raise ConfigError(f"{file}: {_explain_no_choice(group, choice, choices[group])}")
    named = {group: str(choice) for group, choice in selection.items() if choice not in (None, "none")}
    return named, values


def _nest(file: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in which what has dots in its name stands in its section, and empty sections do not."""
    keys = [name for name in values if plain_name(name) != name]  # of what a user has chosen to name
    tree = {name: value for name, value in values.items() if value is not None or name in keys or not _is_section(name)}
    dotted = [name for name in tree if "." in name and (_is_section(name) or _may_be_own(name))]
    for name in sorted(dotted, key=len):  # sections before what is in them
        section, value = tree, tree.pop(name)
        *above, last = split_name(name, isinstance(value, Mapping))
        for part in above:
            section[part] = _require_section(file, part, section.get(part))
            section = section[part]
        if last in section:
            raise ConfigError(f"{file}: {name} stands there twice")
        section[last] = value
    return tree


def _require_section(file: str, name: str, value: Any) -> dict[str, Any]:
    """Return what a file has in a section. Raises ConfigError for what is none."""
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"{file} does not fit: {name} is a section of settings, not {value!r}")
    return dict(value or {})


def _tree(layers: Sequence[Mapping[str, Any]], values: Sequence[Override]) -> dict[str, Any]:
    """Merge ``layers``, each above the one before, and then ``values``, into a tree without interpolations."""
    try:
        tree = OmegaConf.merge(*layers)
        for override in values:
            key = override.key_or_group
            if override.is_delete():
                section, _, name = key.rpartition(".")
                parent = OmegaConf.select(tree, section) if section else tree
                if isinstance(parent, DictConfig):
                    parent.pop(name, None)
            else:
                OmegaConf.update(tree, key, with_text_names(override.value()), merge=True, force_add=True)
        if "${" in str(tree):  # which may mean a setting's default
            tree = OmegaConf.merge(_defaults(), tree)
        resolved = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        why = one_line(error).partition(" full_key: ")[0]
        place = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{place}{why}; where ${{ is text, it is written \\${{") from None
    assert isinstance(resolved, dict)
    return {str(name): value for name, value in resolved.items()}


def _defaults() -> dict[str, Any]:
    """Return the default of every setting whose name does not depend on the class that another one names."""
    defaults = load({}).model_dump()
    for name in open_sections():
        _drop_own(defaults, name)
    return defaults


def _drop_own(tree: Mapping[str, Any], section: str) -> None:
    """Leave of ``section`` in ``tree`` the settings that it has whatever class it names."""
    node = _get_value(tree, section)
    for key in set(node or {}) - set(open_sections()[section].model_fields):
        del node[key]


def _get_value(tree: Any, name: str) -> Any:
    """Return what ``tree`` has by a dotted name, None where there is nothing."""
    for part in name.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _drop_own_of_replaced(values: Mapping[str, Any], overrides: Sequence[Override]) -> None:
    """Drop from a file's ``values`` the own settings of classes in whose place ``overrides`` name others."""
    replaced = {override.key_or_group: override.value() for override in overrides if not override.is_delete()}
    for section, kind in open_sections().items():
        setting = f"{section}.{kind.selects}"
        if setting not in replaced:
            continue
        before, after = (
            {make_absolute(str(name)) for name in _list_named(named)}
            for named in (_get_value(values, setting), replaced[setting])
        )
        if not issubclass(kind, OpenSections):
            if before and before != after:
                _drop_own(values, section)
            continue
        for name in before - after:
            if ":" in name:  # sections of built-in classes may stand there unused
                _get_value(values, section).pop(shorten_name(name), None)


def _drop_placement(values: dict[str, Any], name: str | None) -> None:
    """Drop from a file's ``values`` what came of the placement that it names, for another one in its place.

    That is where the groups are, and what else the placement sets unless the file has another value.
    """
    if name is None:
        return
    for section in GROUP_OF:
        for setting in LAYOUT:
            (values.get(section) or {}).pop(setting, None)
    _drop_equal(values, _compose_group("placement", name))


def _drop_equal(tree: dict[str, Any], other: Mapping[Any, Any]) -> None:
    """Drop from ``tree`` what ``other`` has with the same value."""
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _drop_equal(tree[key], value)
        elif key in tree and tree[key] == value:
            del tree[key]


def _list_named(value: Any) -> list[Any]:
    """Return the names that a setting has, one or a list; none for any other value, which its check refuses."""
    if isinstance(value, str):
        return [value]
    return list(value) if isinstance(value, list) else []


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides by Hydra's grammar, whatever they name. Raises ConfigError for what it does not have."""
    try:
        return [_parse_override(keep_name(override)) for override in overrides]
    except HydraException:
        for override in overrides:
            if override and os.path.exists(user_path(override)):  # noqa: PTH110 - it takes any text, Path.exists not
                raise ConfigError(f"{override}: a file or directory is no setting, unless it is a .yaml file") from None
        raise ConfigError(_explain_unreadable(overrides)) from None


def named_settings(overrides: Sequence[str]) -> set[str]:
    """Return the settings that overrides name, and those that a file among them sets. Raises ConfigError."""
    files = [flatten(read_layer(override)) for override in overrides if names_file(override)]
    parsed = parse_overrides([override for override in overrides if not names_file(override)])
    named = {key for one in parsed for key in flatten({one.key_or_group: one.value()})}
    return named | {key for values in files for key, value in values.items() if value not in (None, [])}


_parser = cache(OverridesParser.create)


def _parse_override(override: str) -> Override:
    parsed: list[Override] = _parser().parse_overrides([override])
    return parsed[0]


def _explain_unreadable(overrides: Sequence[str]) -> str:
    """Describe the first override that is not of Hydra's grammar, and how it would be; its own words name tokens."""
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals and not override.startswith("~"):
            shown = override if override.strip() else repr(override)
            return f"{shown}: is no section.name=value; a recipe is +recipe=NAME, and what has spaces is quoted"
        try:
            _parse_override(keep_name(override))
        except HydraException:
            break
    try:
        _parse_override(f"{key}=1")
    except HydraException:
        return f"{override}: {key} cannot be a setting's name"
    if texts := re.fullmatch(r"\[([^\[\]{}\"'\\]+)\]", value):  # a list of texts alone
        parts = [part if re.fullmatch(r"[\w./:-]*", part, re.ASCII) else f'"{part}"' for part in texts[1].split(",")]
        text = f"[{','.join(parts)}]"
    elif names := _read_json(value):
        return f"{override}: names in a mapping have no quotes: {shlex.quote(literal_override(key, names))}"
    elif value[:1] and value[0] in "[{(\"'":
        return f"{override}: cannot be read; lists are '[a,b]', mappings '{{a: b}}', texts with signs in double quotes"
    else:
        text = quote(value) if re.search(r'["\\]', value) else f'"{value}"'
    return f"{override}: its value needs quotes within those of the shell: {shlex.quote(f'{key}={text}')}"


def _read_json(value: str) -> dict[str, Any] | None:
    """Return what JSON makes of a text that is a mapping there, of plain names; None for any other."""
    try:
        content = json.loads(value)
    except ValueError:
        return None
    return content if isinstance(content, dict) and all(re.fullmatch(r"\w+", name) for name in content) else None


def _parse(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides, each the choice of a group or the value of a setting that there is."""
    for override in overrides:
        if not is_text(override):
            raise ConfigError(f"{override!r}: is no text that a file could hold")
    parsed = parse_overrides(overrides)
    names, choices = settings(), groups()
    for override in parsed:
        key = override.key_or_group
        if not key:
            raise ConfigError(f"cannot read the overrides: {override.input_line} names no setting")
        is_section = _is_section(key)
        if override.package is not None:
            raise ConfigError(f"{override.input_line}: names no setting; a group is chosen as {key}=NAME")
        if key in choices:
            _check_choice(override, choices[key], several=key == "sets")
            first = next(other for other in parsed if other.key_or_group == key)
            if first is not override and key != "placement":  # which is a default that one may replace again
                several = "; several are a list, as +sets='[a,b]'" if key == "sets" else "; one is expected"
                raise ConfigError(f"{first.input_line} and {override.input_line}: {key} is chosen twice{several}")
        elif key not in names and not is_section and not _may_be_own(key):
            raise ConfigError(f"unknown setting {key}{hint(plain_name(key), [*names, *choices])}")
        elif override.is_sweep_override():
            line = str(override.input_line)
            raise ConfigError(f"{line}: one value is expected; write a list as '[a,b]' or quote it")
        elif is_section and not override.is_delete() and not isinstance(override.value(), dict | None):
            raise ConfigError(f"{override.input_line}: {key} is a section of settings, not one")
    return parsed


def _is_section(key: str) -> bool:
    section = f"{plain_name(key)}."
    return any(name.startswith(section) for name in settings())


def _may_be_own(key: str) -> bool:
    """Return whether a user's own class may take the setting ``key``, which is known once the class is loaded."""
    names = settings()
    named_by_user = any(key.startswith(f"{section}.") for section in (*VALUES, "data.chat_template_kwargs"))
    if named_by_user or plain_name(key) in names:
        return True
    in_open_section = any(key.startswith(f"{section}.") for section in open_sections())
    return in_open_section and not any(key.startswith(f"{name}.") for name in names)


def _check_choice(override: Override, choices: list[str], several: bool) -> None:
    if override.is_delete():
        raise ConfigError(f"{override.input_line}: one of {', '.join(choices)} is expected")
    if override.is_sweep_override():
        otherwise = "several are a list, as +sets='[a,b]'" if several else "gkd train --multirun does a run for each"
        raise ConfigError(f"{override.input_line}: one choice is expected; {otherwise}")
    choice = override.value()
    for value in choice if several and isinstance(choice, list) else [choice]:
        if value not in choices:
            raise ConfigError(_explain_no_choice(override.key_or_group, value, choices))


def _explain_no_choice(group: str, choice: Any, choices: list[str]) -> str:
    return f"{group}={choice}: no such choice{suggest(str(choice), choices)}; there are {', '.join(choices)}"


def _choice_text(value: Any) -> str:
    """Return the choice of a group as Hydra takes it: one name, or several as a list."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
