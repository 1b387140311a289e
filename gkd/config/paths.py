"""Settings that name files and directories, and what of them is meant from another directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gkd.config.base import user_path


def is_pattern(file: str) -> bool:
    """Return whether ``file``, where there is none of this name, stands for several."""
    return "*" in file or "?" in file


def map_paths(tree: Mapping[str, Any], make: Callable[[str, str], str], prefix: str = "") -> dict[str, Any]:
    """Return settings in which each path is what ``make`` returns of its setting's name and itself.

    Those are settings that name files or directories, by what their names end in, and that are given.
    """
    mapped: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name != "teacher.models":
            mapped[key] = map_paths(value, make, f"{name}.")
        elif not _is_path(name, value):
            mapped[key] = value
        elif isinstance(value, str):
            mapped[key] = make(name, value)
        elif isinstance(value, list):
            mapped[key] = [make(name, path) for path in value]
        else:
            mapped[key] = {teacher: make(name, path) for teacher, path in value.items()}
    return mapped


def with_absolute_paths(tree: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return settings in which what exists below ``base`` is named by its absolute path, as from any directory.

    What does not exist stays as it is: a model or data set may be a name in Hugging Face's cache.
    """
    return map_paths(tree, lambda _, path: find_absolute(path, base))


def _is_path(name: str, value: Any) -> bool:
    if name == "teacher.chat_template":
        return value not in (None, "own", "student")
    is_named = name == "teacher.models" or name.endswith(("path", "file", "files", "dir"))
    return is_named and bool(value) and isinstance(value, str | list | Mapping)


def find_absolute(value: str, base: Path) -> str:
    """Return the absolute path of what exists below ``base``, or may by its pattern; any other name as it is."""
    path, (directory, colon, part) = base / user_path(value), value.partition(":")
    if path.exists() or is_pattern(value):
        return str(path)
    if colon and (base / user_path(directory)).is_dir():  # SUBSET, SPLIT or both, as gkd.data.reader has it
        return f"{base / user_path(directory)}:{part}"
    return value
