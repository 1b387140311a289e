"""What every setting is: name, type or choices, default, meaning; and the search among them."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from gkd.config.base import Settings, sections_below
from gkd.config.hints import hint
from gkd.config.names import ELSEWHERE
from gkd.config.open import OpenSettings
from gkd.config.run import Config
from gkd.errors import ConfigError

_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_NAMES = {bool: "true or false", int: "whole number", float: "number", str: "text", type(None): "null"}


@dataclass(frozen=True)
class Setting:
    """One setting: ``kind`` is its type with its bounds, or its choices; ``default`` as YAML writes it."""

    name: str
    kind: str
    default: str
    meaning: str


@cache
def describe_all() -> tuple[Setting, ...]:
    """Describe every setting, in the order of the sections.

    Settings of built-in classes follow those of the section that selects them.
    """
    return tuple(describe(Config, ""))


def search(words: Sequence[str], described: Sequence[Setting]) -> Sequence[Setting]:
    """Find, among those ``described``, the settings that every word is about.

    A word is a part of the name, a choice, the beginning of a word of the meaning, or what another system calls it.
    Words that no setting is about one by one are taken together, as ``gradient accumulation``.

    Raises ConfigError, naming what may have been meant, where there are none.
    """
    for sought in (words, ["_".join(words)]):
        matching = [setting for setting in described if all(_matches(setting, word.lower()) for word in sought)]
        if matching:
            return matching
    names = [setting.name for setting in described]
    raise ConfigError(f"no setting is about {' and '.join(words)}{hint(words[-1], names)}")


def _matches(setting: Setting, word: str) -> bool:
    if (
        word in setting.name
        or word in setting.kind.split()
        or re.search(rf"\b{re.escape(word)}", setting.meaning.lower())
    ):
        return True
    equivalents = " ".join(settings for alias, settings in ELSEWHERE.items() if word == alias.lower())
    return setting.name in re.findall(r"[a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)+", equivalents)


def describe(section: type[Settings], prefix: str) -> Iterator[Setting]:
    """Describe the settings of a section whose names begin with ``prefix``."""
    below = sections_below(section, prefix)
    for name, field in section.model_fields.items():
        if name in below:
            yield from describe(*below[name])
            continue
        setting = _setting(f"{prefix}{name}", field, field.description or "")
        registry = getattr(section, "registry", None)
        if registry is not None and name == getattr(section, "selects", None):
            choices = " or ".join([*registry.names(), "your own"])
            setting = replace(setting, kind=setting.kind.replace("text", choices, 1))
        yield setting
    if issubclass(section, OpenSettings):
        for name, meaning, entry_field in section.settings_of_entries(prefix):
            yield _setting(name, entry_field, meaning)


def _setting(name: str, field: FieldInfo, meaning: str) -> Setting:
    kind = " or ".join(_kinds(field.annotation)).replace("number", f"number{_bounds(field.metadata)}", 1)
    default = "" if field.is_required() else _format_yaml(field.get_default(call_default_factory=True))
    return Setting(name, kind, default, meaning)


def _kinds(annotation: Any) -> list[str]:
    """Name the values that a type has; null comes last."""
    if get_origin(annotation) is Annotated:
        base, *metadata = get_args(annotation)
        bounds = _bounds(part for item in metadata for part in getattr(item, "metadata", [item]))
        return [kind.replace("number", f"number{bounds}", 1) for kind in _kinds(base)]
    if get_origin(annotation) is Literal:
        return [_format_yaml(value) for value in get_args(annotation)]
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for part in get_args(annotation) for kind in _kinds(part)]
        return sorted(dict.fromkeys(kinds), key=lambda kind: kind == "null")
    if get_origin(annotation) is list:
        return [f"list of ({' or '.join(_kinds(get_args(annotation)[0]))})"]
    if get_origin(annotation) is dict:
        return ["names with " + " or ".join(_kinds(get_args(annotation)[1]))]
    return [_NAMES.get(annotation, str(getattr(annotation, "__name__", annotation)))]


def _bounds(metadata: Iterable[Any]) -> str:
    bounds = [(sign, getattr(item, key)) for item in metadata for key, sign in _BOUNDS.items() if hasattr(item, key)]
    return " and".join(f" {sign} {_format_bound(bound)}" for sign, bound in bounds)


def _format_bound(bound: float) -> str:
    """Write a bound so that it can be pasted: a whole number with all its digits, such as 1048576, others in short."""
    return str(int(bound)) if float(bound).is_integer() else f"{bound:g}"


def _format_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(_format_yaml, value))}]"
    return repr(value) if isinstance(value, str) and (not value or "\n" in value) else str(value)
