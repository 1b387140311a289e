"""Sections whose further settings belong to the classes that they name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from gkd.config.base import Settings
from gkd.registry import Registry

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
        """By the section below this one, "" for this one itself: the class that its settings belong to."""
        return {"": self.registry.load(getattr(self, self.selects))}

    @classmethod
    def settings_of_entries(cls, prefix: str) -> Iterator[tuple[str, str]]:
        """Dotted name, below ``prefix``, and meaning of the settings of every built-in class."""
        meanings: dict[str, dict[str, list[str]]] = {}  # of a setting's name: meaning -> classes that it has it in
        for name in cls.registry.names():
            for own, field in _fields(cls.registry.load(name)).items():
                meanings.setdefault(own, {}).setdefault(field.description or "", []).append(name)
        for own, classes in meanings.items():
            yield f"{prefix}{own}", "; ".join(f"{', '.join(names)}: {meaning}" for meaning, names in classes.items())

    def own(self, section: str = "") -> Any:
        """The settings of the class that is named, as its ``Config``."""
        kind = getattr(self.owners()[section], "Config", None)
        return None if kind is None else kind.model_validate(self._given(section))

    @property
    def selected(self) -> Any:
        """The class that is named."""
        return self.owners()[""]

    def build(self, *arguments: Any) -> Any:
        """Make one of the class that is named, with its settings first and then ``arguments``."""
        return self.selected(self.own(), *arguments)

    def _given(self, section: str) -> dict[str, Any]:
        extra = self.model_extra or {}
        if not section:
            return {name: value for name, value in extra.items() if name not in self.owners()}
        return dict(extra.get(section) or {})

    @model_validator(mode="after")
    def _own_settings_are_the_classes(self) -> OpenSettings:
        owners = self.owners()
        for section, owner in owners.items():
            given, prefix = self._given(section), f"{section}." if section else ""
            if (forbidden := next(iter(given.keys() - _fields(owner).keys()), None)) is not None:
                raise self._not_taken(prefix, forbidden, given[forbidden])
            try:
                (getattr(owner, "Config", None) or Settings).model_validate(given)
            except ValidationError as error:
                first = error.errors()[0]
                key, why = ".".join(map(str, first["loc"])), str(first["msg"]).removeprefix("Value error, ")
                if first["type"] == "extra_forbidden":
                    raise _error(prefix + key, first["input"]) from None
                raise _error(prefix + key, first["input"], why) from None
        if "" not in owners:
            for name in self.model_extra or {}:
                if name not in owners:
                    raise _error(name, "")
        return self

    def _not_taken(self, prefix: str, key: str, value: Any) -> PydanticCustomError:
        """What to raise for a setting that the named class does not take; it may be another built-in class'."""
        others = [] if prefix else [name for name in self.registry.names() if key in _fields(self.registry.load(name))]
        if not others:
            return _error(f"{prefix}{key}", value)
        named = f"{self.selects}={getattr(self, self.selects)}"
        return _error(key, value, f"is a setting of {self.selects}={' and '.join(others)}, and {named} takes none such")


def _fields(owner: Any) -> Mapping[str, FieldInfo]:
    """Own settings of a class; none where it has no Config."""
    fields: Mapping[str, FieldInfo] = getattr(getattr(owner, "Config", None), "model_fields", {})
    return fields


def _error(key: str, value: Any, why: str | None = None) -> PydanticCustomError:
    """An error of a setting ``key`` within a section; ``why`` None: there is no such setting."""
    context = {"key": key, "value": str(value), "unknown": why is None, "why": why or ""}
    return PydanticCustomError(OWN, "{why}", context)
