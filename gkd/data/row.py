"""One row of a data file, and how its columns are named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gkd.config.hints import suggest
from gkd.config.overrides import flatten
from gkd.errors import ConfigError, one_line

KEYS_SHOWN = 20
ROWS_AT_ONCE = 1000
"""Rows of a table that are in memory at a time: of long documents tens of thousands would be gigabytes."""
_SHORT_FLOATS = {"float": np.float32, "halffloat": np.float16}
"""Types of pyarrow of less than double precision, by name."""
MOST_ANSWERS = 64
"""Numbers of a list that may be answers; embeddings have more, and stay as they are read, which is fast."""
_ABSENT = object()


def is_missing(value: Any) -> bool:
    """Return whether a column's value stands for none: null, or NaN or an infinity, as tables write what they lack."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its ``values`` by column, and ``place``, the file and line (or row) to name in an error."""

    values: dict[str, Any]
    place: str

    def get(self, key: str, setting: str) -> Any:
        """Return the value in column ``key``; ``a.b`` is ``b`` within column ``a``, ``a.0`` the first of a list.

        Raises ConfigError naming the ``setting`` of a missing one.
        """
        value = self._look_up(key)
        if value is not _ABSENT:
            return value
        columns = list(flatten(self.values))
        shown = ", ".join(columns[:KEYS_SHOWN]) + (", ..." if len(columns) > KEYS_SHOWN else "")
        raise ConfigError(
            f"{self.place} has no key {key!r} ({setting}){suggest(key, columns)}; the keys there are: {shown or 'none'}"
        )

    def find(self, key: str) -> Any:
        """Return the value in column ``key`` as :meth:`get` does; None for a missing one."""
        value = self._look_up(key)
        return None if value is _ABSENT else value

    def _look_up(self, key: str) -> Any:
        if key in self.values:
            return self.values[key]
        value: Any = self.values
        for part in key.split("."):
            if isinstance(value, Mapping) and part in value:
                value = value[part]
            elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                return _ABSENT
        return value


def _is_json(kind: Any) -> bool:
    """Return whether values of a type of pyarrow are JSON as text, as `datasets` stores mixed columns."""
    return getattr(kind, "extension_name", "") == "arrow.json"


def _is_short_float(kind: Any) -> bool:
    """Return whether values of a type of pyarrow are of less than double precision."""
    return str(kind) in _SHORT_FLOATS


def _holds(is_such: Callable[[Any], bool], kind: Any) -> bool:
    """Return whether a type of pyarrow is such a one, or has values of such a one."""
    return is_such(kind) or any(_holds(is_such, kind.field(index).type) for index in range(kind.num_fields))


def _decode(kind: Any, value: Any) -> Any:
    """Return a value of this type with what its JSON stands for in place of the text, and 3.14 for a short 3.14.

    That is the shortest number that is stored so; as a double it would be 3.140000104904175.
    """
    if value is None or not (_holds(_is_json, kind) or _holds(_is_short_float, kind)):
        return value
    if isinstance(value, dict):
        return {name: _decode(kind.field(name).type, below) for name, below in value.items()}
    if not isinstance(value, list):
        return json.loads(value) if _is_json(kind) else float(str(_SHORT_FLOATS[str(kind)](value)))
    within = kind.field(0).type
    is_long = _is_short_float(within) and len(value) > MOST_ANSWERS
    return value if is_long else [_decode(within, below) for below in value]


def rows_of_batches(batches: Iterable[Any], place: str) -> Iterator[Row]:
    """Yield rows of tables of pyarrow as they are stored; ``place`` is what they are of.

    Raises ConfigError for a value that Python has no object for, such as a time after the year 9999.
    """
    number = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
            for field in batch.schema:
                if _holds(_is_json, field.type) or _holds(_is_short_float, field.type):
                    for row in rows:
                        row[field.name] = _decode(field.type, row[field.name])
        except (OverflowError, ValueError) as error:
            raise ConfigError(
                f"{place} rows {number + 1} to {number + len(batch)} hold a value unknown to Python: {one_line(error)}"
            ) from None
        for values in rows:
            number += 1
            yield Row(values, f"{place} row {number}")
