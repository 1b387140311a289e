"""Paths of a job: it runs in a copy of the working directory on another machine, so they must not be relative."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gkd.cli.launch.package import is_packed
from gkd.config import Config, escape, user_path
from gkd.config.loading import names_file
from gkd.config.overrides import flatten, literal_override, overrides_of
from gkd.config.paths import find_absolute, is_pattern, map_paths
from gkd.config.registry import file_of, shorten_name
from gkd.data.hub import looks_like_a_name
from gkd.data.reader import match_files
from gkd.errors import ConfigError

SETTINGS = Path(".gkd-settings.yaml")
"""Name that a file of settings from elsewhere gets, which none of the working directory has that goes along."""


def resolve_paths(config: Config, working_dir: Path, output: Path) -> list[str]:
    """Return overrides that make every path of ``config`` absolute, to be put behind the user's own.

    What exists below ``working_dir`` is meant; a model or data set that does not exist may be a name in the cluster's
    cache. Raises ConfigError for data that is neither, and for settings that would take the job away from its cluster.
    """
    _require_cluster_is_left_alone(config)
    tree = config.model_dump(exclude={"evaluate": True, "trainer": {"output_dir"}})  # the former is no run's
    before, after = flatten(tree), flatten(map_paths(tree, partial(_make_absolute, working_dir)))
    changed = {name: value for name, value in after.items() if value != before[name]}
    overrides = overrides_of(escape({"trainer.output_dir": output, **changed}))
    for name, value in _own_code(config.model_dump(), ""):
        entries = [_entry(name, entry, working_dir) for entry in (value if isinstance(value, list) else [value])]
        overrides.append(literal_override(name, entries if isinstance(value, list) else entries[0]))
    return overrides


def settings_file(overrides: Sequence[str], working_dir: Path) -> tuple[list[str], dict[Path, Path]]:
    """Return ``overrides`` with the name that a file of settings among them has for the job.

    Also that file, by this name, where it does not go along as a part of ``working_dir``.
    """
    names, further = list(overrides), dict[Path, Path]()
    for i, override in enumerate(names):
        if names_file(override):
            file = working_dir / user_path(override)
            goes_along = is_packed(file, working_dir)
            name = file.relative_to(working_dir) if goes_along else SETTINGS
            names[i] = str(name)
            further |= {} if goes_along else {name: file}
    return names, further


def _own_code(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str | list[str]]]:
    """Return settings that name code of the user's own as ``FILE.py:name``, in whichever registry."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _own_code(value, f"{prefix}{key}.")
        elif any(
            isinstance(entry, str) and file_of(entry) for entry in (value if isinstance(value, list) else [value])
        ):
            yield f"{prefix}{key}", value


def _entry(setting: str, name: str, working_dir: Path) -> str:
    """Return the name of code for the job: a file that goes with it, from its working directory; any other as it is.

    Raises ConfigError for a file that does not exist.
    """
    if (file := file_of(name)) is None:
        return name
    if not file.is_file():
        raise ConfigError(f"{setting}: {name}: there is no file {file}")
    return f"{file.relative_to(working_dir)}:{shorten_name(name)}" if is_packed(file, working_dir) else name


def _require_cluster_is_left_alone(config: Config) -> None:
    if config.cluster.address is not None:
        raise ConfigError(f"cluster.address={config.cluster.address}: a job runs on the cluster it is submitted to")
    if isinstance(config.cluster.simulate_gpus, int):
        raise ConfigError(
            f"cluster.simulate_gpus={config.cluster.simulate_gpus} (also placement=cpu) starts a private Ray; a job "
            "uses the cluster's GPUs, which nodes simulate with ./launch/ray_cluster.sh ... --simulate-gpus N"
        )


def _make_absolute(working_dir: Path, name: str, value: str) -> str:
    path = find_absolute(value, working_dir)
    if path != value or Path(value).is_absolute():
        if is_pattern(value) and not Path(value).is_absolute() and not Path(path).exists():
            match_files(path)
        return path
    if name.endswith("files"):
        if looks_like_a_name(value.partition(":")[0]):
            return value
        raise ConfigError(f"{name}={value}: there is no such file below {working_dir}")
    if name.endswith(("path", "models")) and not value.startswith("."):
        return value
    if name.endswith(("path", "models")):
        raise ConfigError(f"{name}={value}: there is no such directory below {working_dir}")
    return str(working_dir / user_path(value))
