"""Names in the configuration that stand for code: built-in ones, and users' own as ``module:name`` or ``FILE.py:name``.

A registry names its entries as ``module:attribute`` and imports one when it is needed, so that :mod:`gkd.config` can
check names and settings without loading torch or vLLM. The modules of entries import these within functions alone.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from gkd.config.base import user_path
from gkd.config.hints import suggest
from gkd.config.own_code import forget_edited_modules, is_there, load_module, record_source
from gkd.errors import ConfigError, describe_raised

_LOADED: dict[tuple[str, str | None, str], Any] = {}
"""What users' names stand for, by setting, base and name: a plan and a loss load them at every turn."""


@dataclass(frozen=True)
class Registry:
    """Names that ``setting`` may have: ``entries``, from a name to ``module:attribute``, or the user's own.

    ``base``: the class that all of them are of, as ``module:attribute``; None where any code will do.
    ``undecided``: the entry that counts for ``auto`` until a run decides it; None where ``auto`` is no choice.
    """

    setting: str
    entries: Mapping[str, str]
    base: str | None = None
    undecided: str | None = None

    def names(self) -> list[str]:
        """Return the names that need no code of the user's: ``auto`` where it is a choice, and built-in ones."""
        return list(self.entries) if self.undecided is None else ["auto", *self.entries]

    def settings_of_entries(self) -> Iterator[tuple[str, str, FieldInfo]]:
        """Yield the settings of built-in classes: name of the class, name of the setting, and what it is."""
        for entry in self.entries:
            for name, field in getattr(settings_class(self.load(entry)), "model_fields", {}).items():
                yield entry, name, field

    def load(self, name: str) -> Any:
        """Import the code that ``name`` stands for.

        Raises ConfigError when there is none, when it cannot be imported, and when it is not of the registry's base.
        """
        entry = self.undecided if name == "auto" and self.undecided is not None else name
        if entry in self.entries:
            return _attribute(self.entries[entry])
        if name.endswith((".py", ":")):
            raise ConfigError(f"{self.setting}={name}: a name in it is to come after it: {name.rstrip(':')}:NAME")
        if ":" not in name:
            names = self.names()
            raise ConfigError(
                f"{self.setting}={name}: no such choice{suggest(name, names)}; there are "
                f"{', '.join(names)}, or your own as package.module:name or FILE.py:name"
            )
        place = self.setting, self.base, name if name.startswith("/") else make_absolute(name)
        if place not in _LOADED:
            plugin = _load_own(self.setting, name)
            config = settings_class(plugin)
            if config is not None and not hasattr(config, "model_fields"):
                raise ConfigError(f"{self.setting}={name}: its Config is no pydantic model (pydantic.BaseModel)")
            if self.base is not None:
                self._require_base(name, plugin, self.base)
            _LOADED[place] = plugin
        return _LOADED[place]

    def _require_base(self, name: str, plugin: Any, required: str) -> None:
        """Raise ConfigError for what is not of the class ``required``, or has not the methods that are called of it."""
        base, is_class = _attribute(required), isinstance(plugin, type)
        if not (issubclass(plugin, base) if is_class else isinstance(plugin, base)):
            raise ConfigError(f"{self.setting}={name}: it is no {required.replace(':', '.')}, which it must extend")
        if self.entries and is_class != isinstance(_attribute(next(iter(self.entries.values()))), type):
            what = "a class, where one of its objects" if is_class else "an object, where its class"
            raise ConfigError(f"{self.setting}={name}: it is {what} is expected")
        if lacking := sorted(getattr(plugin, "__abstractmethods__", ())):
            raise ConfigError(f"{self.setting}={name}: it lacks the method {lacking[0]}")
        for attribute, kind in _class_attributes(base).items():
            if not hasattr(plugin, attribute):
                raise ConfigError(f"{self.setting}={name}: it lacks the class attribute {attribute}")
            try:
                TypeAdapter(kind).validate_python(value := getattr(plugin, attribute), strict=True)
            except ValidationError as error:
                message = error.errors()[0]["msg"].lower()
                raise ConfigError(f"{self.setting}={name}: its {attribute} is {value!r}: {message}") from None
        for method in sorted(getattr(base, "__abstractmethods__", ())):
            names = list(inspect.signature(getattr(base, method)).parameters)
            bound = isinstance(inspect.getattr_static(plugin, method), staticmethod | classmethod)
            why = why_not_callable(getattr(plugin, method), len(names) - bound)
            if inspect.iscoroutinefunction(getattr(plugin, method)):
                why = "it is async, and nothing awaits it"
            if why:
                raise ConfigError(f"{self.setting}={name}: its {method} is called with {', '.join(names[1:])}: {why}")


def _class_attributes(base: type) -> dict[str, Any]:
    """Return the types of the class attributes that ``base`` itself states, by name."""
    hints = {name: kind for name, kind in get_type_hints(base).items() if name in vars(base)["__annotations__"]}
    return {name: get_args(kind)[0] for name, kind in hints.items() if get_origin(kind) is ClassVar}


def why_not_callable(function: Any, n: int) -> str | None:
    """Return why a function cannot be called with ``n`` arguments, by their places; None where it can."""
    try:
        inspect.signature(function).bind(*range(n))
    except TypeError as error:
        return str(error)
    except ValueError:  # a builtin, which states nothing
        return None
    return None


def settings_class(kind: Any) -> Any:
    """Return the pydantic model ``Config`` of what a registry has loaded; None for what takes no settings."""
    return getattr(kind, "Config", None)


def _attribute(entry: str) -> Any:
    module, _, attribute = entry.partition(":")
    loaded = getattr(sys.modules.get(module), attribute, None)  # a plan does this a million times
    return getattr(importlib.import_module(module), attribute) if loaded is None else loaded


def make_absolute(name: str) -> str:
    """Return ``FILE.py:name`` with an absolute path, as a worker's own directory is another one; other names as they
    are.
    """
    file = file_of(name)
    return name if file is None else f"{file}:{name.rpartition(':')[2]}"


EntryName = Annotated[str, AfterValidator(make_absolute)]
"""A name of a registry's, of which a file is named by its whole path."""
EntryNames = Annotated[list[str], AfterValidator(lambda names: [make_absolute(name) for name in names])]


def forget_edited() -> None:
    """Have files of the user's that have changed since they were loaded here be loaded anew, with what is beside them.

    For a process that does one thing after another, as a notebook does; a run under way keeps the code it began with.
    """
    edited = {str(file) for file in forget_edited_modules()}
    for place in [place for place in _LOADED if place[2].rpartition(":")[0] in edited]:
        del _LOADED[place]


def shorten_name(name: str) -> str:
    """Return the last part of a name, which is what figures and sections of settings are called by."""
    return name.rpartition(":")[2]


def _load_own(setting: str, name: str) -> Any:
    path, (module, _, attribute) = file_of(name), name.rpartition(":")
    file = None if path is None else _local_copy(path)
    if file is not None and not is_there(file):
        raise ConfigError(f"{setting}: {name}: there is no file {file}")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what it prints is no part of what a program prints
            imported = importlib.import_module(module) if file is None else load_module(file)
        if file is None:
            record_source(imported)
        plugin = getattr(imported, attribute, None)
    except (Exception, SystemExit) as error:  # the user's module may raise anything, and may end programs
        raise ConfigError(f"{setting}: {name} cannot be imported: {describe_raised(error)}") from None
    if plugin is None:
        names = [key for key, value in vars(imported).items() if not isinstance(value, ModuleType)]
        raise ConfigError(f"{setting}: {name}: {file or module} has no {attribute}{suggest(attribute, names)}")
    return plugin


def file_of(name: str) -> Path | None:
    """Return the file of a name ``FILE.py:name``; None for names of other kinds."""
    file = name.rpartition(":")[0]
    return user_path(file).absolute() if file.endswith(".py") else None


def _local_copy(file: Path) -> Path:
    """Return ``file``, or this node's copy of it where it came with a job.

    Ray unpacks a job's files into a directory that is named after their content, on each node where that node keeps
    such things, and starts workers in it.
    """
    job_folders = {
        folder.name: folder for folder in (Path.cwd(), *Path.cwd().parents) if folder.name.startswith("_ray_pkg_")
    }
    for folder in file.parents:
        if folder.name in job_folders:
            return job_folders[folder.name] / file.relative_to(folder)
    return file
