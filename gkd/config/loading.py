"""Files of settings, the way from a composed tree to a checked configuration, and what its settings are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError  # type: ignore[import-untyped]

from gkd.config.base import Settings, escape, sections_below, user_path
from gkd.config.checks import require_together
from gkd.config.describe import describe_all
from gkd.config.doubts import rates
from gkd.config.endpoint import hide_secrets
from gkd.config.hints import hint
from gkd.config.open import OWN, OpenSettings
from gkd.config.rewards import find_set_functions
from gkd.config.run import Config
from gkd.errors import ConfigError, one_line

# An installed package carries conf inside itself; a checkout has it at the top.
_INSIDE, _TOP = Path(__file__).parents[1] / "conf", Path(__file__).parents[2] / "conf"
CONF_DIR = _INSIDE if _INSIDE.is_dir() else _TOP
REQUESTED = "requested"
"""Section of a run's file: settings that the run has decided, such as ``auto`` ones, as they were requested."""


def read_yaml(path: str | Path, resolve: bool = True) -> dict[str, Any]:
    """Read what a configuration file holds, unchecked; interpolations as they are unless they are to be resolved.

    Raises ConfigError for a file that holds no names and values.
    """
    try:
        loaded = OmegaConf.load(user_path(str(path)))
        content = OmegaConf.to_container(loaded)
        try:  # in any case, so that a variable that is not set is reported of this file
            resolved = OmegaConf.to_container(loaded, resolve=True)
            content = resolved if resolve else content
        except InterpolationKeyError:  # of a setting that the file has not
            if resolve:
                raise
    except OSError as error:
        if error.errno is not None:
            raise ConfigError(f"{path}: {error.strerror}") from None
        content = None  # OmegaConf's answer to a file of one number
    except RecursionError:
        raise ConfigError(f"{path} cannot be read: it is nested too deep, or holds itself") from None
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no configuration: names and values are expected")
    return {str(name): value for name, value in content.items()}


def names_file(argument: str) -> bool:
    """Return whether an argument among overrides is a file of settings; directories of sweeps have ``=`` in them."""
    if not argument.endswith((".yaml", ".yml")):
        return False
    return "=" not in argument or os.path.isfile(user_path(argument))  # noqa: PTH113 - it takes any text


def dump_yaml(config: Config) -> str:
    """Return a configuration as a file holds it, of which :func:`read_yaml` gives the same values."""
    return str(OmegaConf.to_yaml(OmegaConf.create(escape(config.model_dump()))))


def dump_run(requested: Config, ran: Config) -> str:
    """Return a run's configuration as its file holds it: as it ``ran``, and what was ``requested`` where that differs.

    That the run goes on is left out, for one that begins with its settings.
    """
    requested_values, ran_values = requested.model_dump(), ran.model_dump()
    ran_values["trainer"]["resume"] = requested_values["trainer"]["resume"] = False
    ran_values |= {REQUESTED: decided} if (decided := _find_differences(requested_values, ran_values)) else {}
    return str(OmegaConf.to_yaml(OmegaConf.create(escape(ran_values))))


def _find_differences(tree: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ``tree`` that ``other`` has not, None for those that it alone has."""
    values: dict[str, Any] = {}
    for name in {**tree, **other}:
        value, other_value = tree.get(name), other.get(name)
        if value != other_value:
            values[name] = (
                _find_differences(value, other_value)
                if isinstance(value, Mapping) and isinstance(other_value, Mapping)
                else value
            )
    return values


def read_run(file: Path, as_requested: bool = False) -> Config:
    """Read the settings that a run has, with what it has decided, or ``as_requested``. Raises ConfigError."""
    tree = read_requested(file) if as_requested else read_yaml(file)
    try:
        return load({name: value for name, value in tree.items() if name != REQUESTED})
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def read_requested(file: str | Path, resolve: bool = True) -> dict[str, Any]:
    """Read a file of settings, a run's as they were requested; raises as :func:`read_yaml`."""
    values = read_yaml(file, resolve)
    requested = values.pop(REQUESTED, {})
    if not isinstance(requested, dict):
        raise ConfigError(f"{file} does not fit: {REQUESTED} is a section of settings, not {requested!r}")
    return _lay_over(values, requested)


def read_layer(file: str | Path) -> dict[str, Any]:
    """Read a file of settings that others are laid over: what it takes from a setting is that setting's final value.

    Only a whole section, a choice of a group or the like at its top is what the file itself has there.
    """
    values = read_requested(file, resolve=False)
    tree = OmegaConf.create(values)
    for name, value in values.items():
        if isinstance(value, str) and "${" in value and "." not in name:
            try:
                node = tree[name]
            except OmegaConfBaseException as error:
                raise ConfigError(f"{file} cannot be read: {one_line(error)}") from None
            values[name] = OmegaConf.to_container(node) if OmegaConf.is_config(node) else escape(node)
    return values


def _lay_over(tree: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of ``above``, and of ``tree`` those that it lacks."""
    values = {**tree, **above}
    for name in tree.keys() & above.keys():
        if isinstance(tree[name], Mapping) and isinstance(above[name], Mapping):
            values[name] = _lay_over(tree[name], above[name])
    return values


def dump_public(config: Config) -> dict[str, Any]:
    """Return a configuration as a tree of JSON's values for others to see: :func:`hide_secrets` of every text."""

    def hide(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: hide(below) for name, below in value.items()}
        if isinstance(value, list):
            return [hide(below) for below in value]
        return hide_secrets(value) if isinstance(value, str) else value

    return {name: hide(section) for name, section in config.model_dump(mode="json").items()}


@cache
def settings() -> Mapping[str, str]:
    """Return every setting's dotted name and its meaning."""
    return MappingProxyType({setting.name: setting.meaning for setting in describe_all()})


@cache
def open_sections() -> Mapping[str, type[OpenSettings]]:
    """Return sections that take settings of users' own classes, by dotted name."""

    def walk(section: type[Settings], prefix: str) -> Iterator[tuple[str, type[OpenSettings]]]:
        if issubclass(section, OpenSettings):
            yield prefix.removesuffix("."), section
        for below, begins in sections_below(section, prefix).values():
            yield from walk(below, begins)

    return MappingProxyType(dict(walk(Config, "")))


def load(tree: Mapping[str, Any]) -> Config:
    """Turn a composed tree into a checked :class:`Config`.

    Raises ConfigError, in one line, for the first thing that is wrong.
    """
    for key, text in _texts(tree, ""):
        if not is_text(text):
            raise ConfigError(f"{key}={text!r}: is no text that a file could hold")
    if isinstance(reward := tree.get("reward", {}), Mapping):
        tree = {**tree, "reward": {**reward, "set_functions": find_set_functions(tree)}}
    try:
        config = Config.model_validate(tree)
        require_together(config)
    except ValidationError as error:
        raise _error(error) from None
    except ValueError as error:
        raise ConfigError(_lower_first(str(error))) from None
    if config.actor.lr is not None:
        return config
    return config.with_settings({"actor.lr": rates(config).usual})


def _error(error: ValidationError) -> ConfigError:
    """Return the error of the first thing that is wrong."""
    first = error.errors()[0]
    # Union branches add their type's name to the location; only real keys are shown.
    key = ".".join(str(part) for part in first["loc"] if not re.search(r"[\[\]()]|^(int|str|bool|float)$", str(part)))
    if first["type"] == "extra_forbidden":
        if key in settings():
            return _dotted_error(key, first["input"])
        return make_unknown_error(key, first["input"])
    if first["type"] == OWN:
        return _own_error(key, first["ctx"])
    message = _lower_first(str(first["msg"]).removeprefix("Value error, "))
    if first["type"] == "model_type":  # which names the class
        message = f"{key} is a section of settings, not one"
    begin = re.match(r"\w+(\.\w+)*", message)
    if begin is not None and f"{key}.{begin[0]}" in settings():  # a section's own check begins with what is wrong in it
        return ConfigError(f"{key}.{message}")
    if first["type"].startswith("greater_than"):
        message += _explain_null(key)
    value = "null" if first["input"] is None else first["input"]
    shown = "" if isinstance(value, Mapping) else f"={value}"
    return ConfigError(f"{key}{shown}: {message}" if key else message)


def _own_error(section: str, context: Mapping[str, Any]) -> ConfigError:
    """Return the error of a setting of the class that a section names, or of one that it does not take."""
    key, value, names = f"{section}.{context['key']}", context["value"], settings()
    if not context["unknown"]:
        shown = f"={value}" if value else ""
        return ConfigError(f"{key}{shown}: {_lower_first(str(context['why']))}")
    if key in names and "." in context["key"]:
        return _dotted_error(key, value)
    if key in names:  # of another class than the one that its section names
        return ConfigError(f"{key}={value}: is no setting of what is named, but of {names[key]}")
    return make_unknown_error(key, value, [f"{section}.{name}" for name in context["known"]], str(context["why"]))


def _dotted_error(key: str, value: Any) -> ConfigError:
    return ConfigError(f"{key}={value}: in a section names have no dots, as those at the top of a file may")


def _explain_null(key: str) -> str:
    """Return what null means as the value of a setting, in brackets, for who gave what means that elsewhere (0, -1)."""
    null = re.search(r"\bnull: [^;()]+", settings().get(plain_name(key), ""))
    return f" ({null[0].strip()})" if null else ""


def _lower_first(message: str) -> str:
    return message[:1].lower() + message[1:]


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Return every string in a tree, with the dotted name of where it is."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, below in value.items():
            yield from _texts(below, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for below in value:
            yield from _texts(below, key)


def is_text(text: str) -> bool:
    """Return whether a path may be ``text``, and config.yaml hold it: no zero bytes, and nothing that UTF-8 has not."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def make_unknown_error(key: str, value: Any, class_settings: Iterable[str] = (), why: str = "") -> ConfigError:
    """Return the error of an unknown setting; of an unknown section that of its first setting.

    ``class_settings``: settings of a user's class, one of which may be meant. ``why``: why it takes none.
    """
    while isinstance(value, Mapping) and value:
        part, value = next(iter(value.items()))
        key = f"{key}.{part}"
    explained = f"{key}: {why}" if why else key
    return ConfigError(f"unknown setting {explained}{hint(plain_name(key), [*settings(), *class_settings])}")


def plain_name(key: str) -> str:
    """Return a setting of one of several sections, such as ``evaluate.sets.gsm8k.files``, with NAME for its name."""
    for begins in {name.partition("NAME.")[0] for name in settings() if ".NAME." in name}:
        if key.startswith(begins):
            _, dot, rest = key[len(begins) :].partition(".")
            return f"{begins}NAME{dot}{rest}"
    return key
