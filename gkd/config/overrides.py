"""Settings by their dotted names, and as they are written on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gkd.config.base import escape, quote
from gkd.errors import ConfigError


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """Return settings, names with dots or nested, as overrides. Raises ConfigError for a value that has no text."""
    return [
        f"{'+' if name in ('recipe', 'sets', 'task') else ''}{name}={_text(name, value)}"
        for name, value in flatten(settings).items()
    ]


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


def _text(name: str, value: Any) -> str:
    """Return a value in Hydra's grammar."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str() | Path():
            return quote(str(value))
        case list() | tuple():
            return f"[{','.join(_text(name, item) for item in value)}]"
        case Mapping():
            return f"{{{','.join(f'{key}:{_text(name, item)}' for key, item in value.items())}}}"
    raise ConfigError(f"{name}={value!r}: a {type(value).__name__} is no value of a setting")
