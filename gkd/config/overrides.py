"""Settings by their dotted names, and as they are written on the command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from gkd.config.base import escape, quote
from gkd.config.loading import settings
from gkd.errors import ConfigError

VALUES = ("models", "teacher.models", "watch.reward_kl")
"""Sections of one value for each name that a user chooses."""


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """Return settings, names with dots or nested, as overrides. Raises ConfigError for a value that has no text."""
    return [
        f"{'+' if name in ('recipe', 'sets', 'task') else ''}{name}={_text(name, value)}"
        for name, value in flatten(settings).items()
    ]


def shell_override(name: str, value: str | Path) -> str:
    """Return a setting as one types it in a shell, with the quotes that its text needs there and in Hydra's grammar."""
    text = str(value)
    return f"{name}={text}" if re.fullmatch(r"[\w./-]+", text, re.ASCII) else shlex.quote(literal_override(name, text))


def literal_override(name: str, value: Any) -> str:
    """Return a setting as an override, whose texts stand for themselves (:func:`gkd.config.escape`)."""
    return f"{name}={_text(name, escape(value))}"


def flatten(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return values by dotted names, each below ``above``; an empty mapping is a value."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        values |= (
            flatten(value, f"{above}{name}.") if isinstance(value, Mapping) and value else {f"{above}{name}": value}
        )
    return values


def keep_name(override: str) -> str:
    """Return an override with the name that a user chose in braces, where dots or dashes would keep it from being one.

    ``models.Qwen2.5-7B=DIR`` is ``models={Qwen2.5-7B:DIR}``, ``data.val_sets.v1.0={files:[x]}`` is
    ``data.val_sets={v1.0:{files:[x]}}``, and other overrides are as they were.
    """
    key, equals, value = override.partition("=")
    begins = key[: len(key) - len(key.lstrip("+"))]
    section, name, fields = _split_name(key.removeprefix(begins), value.startswith("{"))
    if not equals or re.fullmatch(r"([A-Za-z_][\w-]*)?", name):
        return override
    for field in reversed(fields):
        value = f"{{{field}:{value}}}"
    return f"{begins}{section}={{{name}:{value}}}"


def split_name(key: str, is_section: bool) -> list[str]:
    """Return the parts of a setting's name; a name that a user chose is one, whatever dots it has.

    ``is_section``: whether its value is a section, perhaps all of what the user chose a name for.
    """
    section, name, fields = _split_name(key, is_section)
    return [*section.split("."), name, *fields] if name else key.split(".")


def _split_name(key: str, is_section: bool) -> tuple[str, str, list[str]]:
    """Return the section, the name chosen by a user and the setting below it, in parts; empty where there is none."""
    for section in VALUES:
        if key.startswith(f"{section}."):
            return section, key.removeprefix(f"{section}."), []
    for section in {name.partition(".NAME.")[0] for name in settings() if ".NAME." in name}:
        if key.startswith(f"{section}."):
            below = f"{section}.NAME."
            known_fields = {name.removeprefix(below) for name in settings() if name.startswith(below)}
            parts = key.removeprefix(f"{section}.").split(".")
            whole = len(parts) if is_section else None
            at = next((i for i, part in enumerate(parts) if i and part in known_fields), whole)
            return ("", "", []) if at is None else (section, ".".join(parts[:at]), parts[at:])
    return "", "", []


def _text(name: str, value: Any) -> str:
    """Return a value in Hydra's grammar."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case Integral() | Real():  # numpy's scalars are of these, too
            return repr(int(value) if isinstance(value, Integral) else float(value))
        case str() | Path():
            return quote(str(value))
        case list() | tuple():
            return f"[{','.join(_text(name, item) for item in value)}]"
        case Mapping():
            return f"{{{','.join(f'{key}:{_text(name, item)}' for key, item in value.items())}}}"
    raise ConfigError(f"{name}={value!r}: a {type(value).__name__} is no value of a setting")


def with_text_names(value: Any) -> Any:
    """Return a value, or a tree of such, in which names that look like numbers are text, as a set's may."""
    if not isinstance(value, Mapping):
        return value
    return {
        str(name) if isinstance(name, int | float) and not isinstance(name, bool) else name: with_text_names(below)
        for name, below in value.items()
    }
