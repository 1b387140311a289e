"""Sections whose further settings belong to the classes that they name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import ConfigDict, ValidationError, model_validator
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
        for name in cls.registry.names():
            for own, field in getattr(getattr(cls.registry.load(name), "Config", None), "model_fields", {}).items():
                yield f"{prefix}{own}", f"{name}: {field.description or ''}"

    def own(self, section: str = "") -> Any:
        """The settings of the class that is named, as its ``Config``."""
        kind = getattr(self.owners()[section], "Config", None)
        return None if kind is None else kind.model_validate(self._given(section))

    def _given(self, section: str) -> dict[str, Any]:
        extra = self.model_extra or {}
        if not section:
            return {name: value for name, value in extra.items() if name not in self.owners()}
        return dict(extra.get(section) or {})

    @model_validator(mode="after")
    def _own_settings_are_the_classes(self) -> OpenSettings:
        owners = self.owners()
        for section, owner in owners.items():
            given, kind = self._given(section), getattr(owner, "Config", None) or Settings
            prefix = f"{section}." if section else ""
            try:
                kind.model_validate(given)
            except ValidationError as error:
                first = error.errors()[0]
                key = prefix + ".".join(map(str, first["loc"]))
                context = {"key": key, "value": first["input"], "unknown": first["type"] == "extra_forbidden"}
                why = str(first["msg"]).removeprefix("Value error, ")
                raise PydanticCustomError(OWN, "{why}", {**context, "why": why}) from None
        if "" not in owners:
            for name in self.model_extra or {}:
                if name not in owners:
                    raise PydanticCustomError(OWN, "{why}", {"key": name, "value": "", "unknown": True, "why": ""})
        return self
