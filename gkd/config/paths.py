"""Settings that name files and directories, and what of them is meant from another directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gkd.config.base import user_path

Paths = str | list[str] | dict[str, str]


def is_pattern(file: str) -> bool:
    """Return whether ``file``, where there is none of this name, stands for several."""
    return "*" in file or "?" in file


def path_settings(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Paths]]:
    """Yield settings that name files or directories, by what their names end in, and that are given."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name != "teacher.models":
            yield from path_settings(value, f"{name}.")
        elif _is_path(name, value):
            yield name, value


def with_absolute_paths(tree: Mapping[str, Any], here: Path, prefix: str = "") -> dict[str, Any]:
    """Return settings in which what exists below ``here`` is named by its absolute path, as from any directory.

    What does not exist stays as it is: a model or data set may be a name in Hugging Face's cache.
    """
    absolute: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            every = name == "teacher.models"
            absolute[key] = (
                {its: find_absolute(path, here) for its, path in value.items()}
                if every
                else with_absolute_paths(value, here, f"{name}.")
            )
        elif isinstance(value, list) and _is_path(name, value):
            absolute[key] = [find_absolute(path, here) for path in value]
        else:
            absolute[key] = find_absolute(value, here) if _is_path(name, value) else value
    return absolute


def _is_path(name: str, value: Any) -> bool:
    if name == "teacher.chat_template":
        return value not in (None, "own", "student")
    is_named = name == "teacher.models" or name.endswith(("path", "file", "files", "dir"))
    return is_named and bool(value) and isinstance(value, str | list | Mapping)


def find_absolute(value: str, here: Path) -> str:
    """Return the absolute path of what exists below ``here``, or may by its pattern; any other name as it is."""
    path, (directory, colon, part) = here / user_path(value), value.partition(":")
    if path.exists() or is_pattern(value):
        return str(path)
    if colon and (here / user_path(directory)).is_dir():  # SUBSET, SPLIT or both, as gkd.data.reader has it
        return f"{here / user_path(directory)}:{part}"
    return value
