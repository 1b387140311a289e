"""Sections whose further settings belong to the classes that they name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from gkd.config.base import Settings
from gkd.config.registry import Registry, settings_class, shorten_name
from gkd.errors import ConfigError, SignalExit, describe_raised, one_line

OWN = "own_setting"
"""Type of the error of a setting that a named class does not take; ``ctx`` has its key within the section and why."""


class OpenSettings(Settings):
    """A section with a setting that names a class of ``registry``, whose own settings stand beside it.

    A class has its settings in a pydantic model of its own, ``Config``; one without takes none. A section that names
    several classes, or gives each a section below, overrides :meth:`owners` and :meth:`settings_of_entries`.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")
    registry: ClassVar[Registry]
    selects: ClassVar[str] = "name"

    def owners(self) -> Mapping[str, Any]:
        """Return classes by the section below this one that has their settings; "" is this one itself."""
        return {"": self.registry.load(getattr(self, self.selects))}

    @classmethod
    def settings_of_entries(cls, prefix: str) -> Iterator[tuple[str, str, FieldInfo]]:
        """Yield the settings of built-in classes: dotted name, below ``prefix``, meaning, and what it is."""
        meanings: dict[str, dict[str, list[str]]] = {}  # by setting, then by meaning: the classes that take it
        fields: dict[str, FieldInfo] = {}
        for name, setting, fields[setting] in cls.registry.settings_of_entries():
            meanings.setdefault(setting, {}).setdefault(fields[setting].description or "", []).append(name)
        for setting, classes in meanings.items():
            meaning = "; ".join(f"{', '.join(names)}: {meaning}" for meaning, names in classes.items())
            yield f"{prefix}{setting}", meaning, fields[setting]

    def selected_names(self) -> list[str]:
        """Return names in the setting ``selects``, which may be one, several or none."""
        value = getattr(self, self.selects)
        return [value] if isinstance(value, str) else list(value or [])

    def class_settings(self) -> Any:
        """Return the settings of the class that is named, as its ``Config``."""
        kind = settings_class(self.selected_class)
        return None if kind is None else _validate(kind, self._select_values(""))

    @property
    def selected_class(self) -> Any:
        """The class that is named."""
        return self.owners()[""]

    def build(self, *arguments: Any) -> Any:
        """Make one of the class that is named, from its settings and then ``arguments``.

        Raises ConfigError where a class of the user's cannot be made.
        """
        try:
            return self.selected_class(self.class_settings(), *arguments)
        except (ConfigError, SignalExit):
            raise
        except (Exception, SystemExit) as error:
            name = getattr(self, self.selects)
            raise ConfigError(f"{self.registry.setting}={name} cannot be made: {describe_raised(error)}") from None

    def _select_values(self, section: str) -> dict[str, Any]:
        extra = self.model_extra or {}
        if not section:
            return {name: value for name, value in extra.items() if name not in self.owners()}
        return dict(extra.get(section) or {})

    @model_validator(mode="after")
    def _own_settings_are_the_classes(self) -> OpenSettings:
        """Add the defaults of the classes that are named, so that what is written of a run holds them."""
        owners, extra = self.owners(), self.model_extra
        assert extra is not None, "extra settings are allowed"
        for section, owner in owners.items():
            kind, prefix = settings_class(owner) or Settings, f"{section}." if section else ""
            if not isinstance(extra.get(section, {}), Mapping):
                why = f"a section with the settings of {owner.__name__} is expected"
                raise _refusal(section, extra[section], why)
            if not section and (twice := sorted(kind.model_fields.keys() & type(self).model_fields.keys())):
                raise ValueError(f"the setting {twice[0]} of {owner.__name__} has the name of another one here")
            values, class_settings = self._select_values(section), [f"{prefix}{name}" for name in kind.model_fields]
            try:
                checked = _validate(kind, values)
                written = checked.model_dump(mode="json", by_alias=False)
                complete = {name: value for name, value in written.items() if name not in kind.model_computed_fields}
                again = _validate(kind, complete)  # as what is written of a run is read
            except (TypeError, AttributeError, ArithmeticError, LookupError) as error:  # of the user's own check
                raise ValueError(f"in {owner.__name__}.Config: {describe_raised(error)}") from None
            except ValidationError as error:
                first = error.errors()[0]
                key, unknown = prefix + ".".join(map(str, first["loc"])), first["type"] == "extra_forbidden"
                why = one_line(str(first["msg"]).removeprefix("Value error, "))
                why = self._explain_unknown(getattr(self, self.selects)) if unknown else why
                raise _refusal(key, first["input"], why, unknown, class_settings) from None
            for name in _find_unkept(checked, complete, again):
                why = f"{owner.__name__}.Config would read another value from a run's file; secrets are for variables"
                raise _refusal(f"{prefix}{name}", getattr(checked, name), why)
            for name, value in _find_ignored(kind, values, prefix):
                raise _refusal(name, value, "", unknown=True, class_settings=class_settings)
            if not section:
                extra.update(complete)
            elif complete and section in map(shorten_name, self.selected_names()):
                extra[section] = complete
        if "" not in owners:
            named = {shorten_name(name): name for name in self.selected_names()}
            for name, value in extra.items():
                if name not in owners:
                    raise _refusal(name, value, self._explain_unknown(named.get(name)), unknown=True)
        return self

    def _explain_unknown(self, name: Any) -> str:
        """Return why no setting of ``name`` is known, where that is a class of the user's that takes none."""
        is_own = isinstance(name, str) and name not in self.registry.names()
        return (
            f"{shorten_name(name)} takes no settings" if is_own and not settings_class(self.registry.load(name)) else ""
        )


def find_changed_settings(section: Settings) -> dict[str, Any]:
    """Return settings of a section, its class' own among them, that are neither null nor as they are by default."""
    fields = dict(type(section).model_fields)
    if isinstance(section, OpenSettings):
        fields |= getattr(settings_class(section.selected_class), "model_fields", {})
    values = {name: getattr(section, name, field.default) for name, field in fields.items()}
    return {name: value for name, value in values.items() if value not in (fields[name].default, None)}


class OpenSections(OpenSettings):
    """A section with a setting that names classes of ``registry``, each with its settings in a section below.

    That section has the last part of the class' name: ``reward.format``, or ``reward.Brevity`` for ``mine.py:Brevity``.
    A built-in class takes settings also where it is not named. Those of the classes that are named are completed with
    their defaults.
    """

    def owners(self) -> Mapping[str, Any]:
        """Return classes with settings, by the section below this one. Raises ValueError where two have one section."""
        classes: dict[str, Any] = {}
        configured = [name for name in self.registry.names() if name in (self.model_extra or {})]
        for name in [*configured, *self.selected_names()]:
            owner, section = self.registry.load(name), shorten_name(name)
            if settings_class(owner) is None:
                continue
            if section in type(self).model_fields or classes.get(section, owner) is not owner:
                raise ValueError(f"{name}: {section} is the name of other settings as well; give the class another")
            classes[section] = owner
        return classes

    def find_idle_sections(self) -> list[str]:
        """Return sections of built-in classes that are not named, and so change nothing.

        Those with defaults alone are left out, which a run's file has of what it named.
        """
        extra = self.model_extra or {}
        unused = set(self.registry.names()) - set(map(shorten_name, self.selected_names()))
        idle = []
        for name in sorted(extra.keys() & unused):
            fields = settings_class(self.registry.load(name)).model_fields
            if any(value != fields[key].get_default(call_default_factory=True) for key, value in extra[name].items()):
                idle.append(name)
        return idle

    @classmethod
    def settings_of_entries(cls, prefix: str) -> Iterator[tuple[str, str, FieldInfo]]:
        """Yield the settings of built-in classes: dotted name, below ``prefix``, meaning, and what it is."""
        for name, setting, field in cls.registry.settings_of_entries():
            yield f"{prefix}{name}.{setting}", field.description or "", field

    def settings_of(self, name: str) -> Any:
        """Return the settings of the class ``name`` as its ``Config``; None for one that takes none."""
        kind = settings_class(self.registry.load(name))
        return None if kind is None else _validate(kind, self._select_values(shorten_name(name)))

    def build_named(self, name: str, *arguments: Any) -> Any:
        """Make one of the class ``name``, from its settings where it takes any, and then ``arguments``."""
        settings = self.settings_of(name)
        return self.registry.load(name)(*(() if settings is None else (settings,)), *arguments)


def _validate(kind: type[BaseModel], values: Mapping[str, Any]) -> BaseModel:
    """Return settings by the names of their fields, whatever aliases these have. Raises ValidationError."""
    return kind.model_validate(values, by_alias=False, by_name=True)


def _find_unkept(checked: BaseModel, written: Mapping[str, Any], again: BaseModel) -> Iterator[str]:
    """Yield settings that are not ``written``, or of which another value was read ``again``, as of a secret."""
    for name in type(checked).model_fields:
        value, other = getattr(checked, name), getattr(again, name)
        kind: Any = type(value)
        has_equals = kind.__eq__ is not object.__eq__ and not (isinstance(value, float) and math.isnan(value))
        if name not in written or (has_equals and value != other):
            yield name


def _find_ignored(kind: type[BaseModel], values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield settings, name and value, that a model of the user's, or one within it, would drop without a word."""
    drops = kind.model_config.get("extra", "ignore") == "ignore"
    for name, value in values.items():
        below = kind.model_fields[name].annotation if name in kind.model_fields else None
        if name not in kind.model_fields and drops:
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping) and isinstance(below, type) and issubclass(below, BaseModel):
            yield from _find_ignored(below, value, f"{prefix}{name}.")


def _refusal(
    key: str, value: Any, why: str, unknown: bool = False, class_settings: Sequence[str] = ()
) -> PydanticCustomError:
    """Return the error of one setting: of an unknown section its first setting, of a known one without its value.

    ``why``: of an unknown one why none is known, where that is clear. ``class_settings``: settings beside it that its
    class takes, one of which may be meant.
    """
    while unknown and isinstance(value, Mapping) and value:
        part, value = next(iter(value.items()))
        key = f"{key}.{part}"
    shown = "" if isinstance(value, Mapping) else str(value)
    context = {"key": key.rstrip("."), "value": shown, "unknown": unknown, "known": list(class_settings), "why": why}
    return PydanticCustomError(OWN, "{why}", context)
