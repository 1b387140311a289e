"""One row of a data file, and how its columns are named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
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


def _find_decoder(kind: Any) -> Callable[[Any], Any] | None:
    """Return what makes of a value of this type of pyarrow what it stands for; None where that is itself.

    ``datasets`` stores mixed columns as JSON in texts. A number of less than double precision is the shortest that is
    stored so: 3.14, which as a double is 3.140000104904175. Maps, unions and the like are left as they are.
    """
    import pyarrow

    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda text: None if text is None else json.loads(text)
    if (short := _SHORT_FLOATS.get(str(kind))) is not None:
        return lambda value: value if value is None or value.is_integer() else float(str(short(value)))
    if pyarrow.types.is_dictionary(kind):
        return _find_decoder(kind.value_type)
    if pyarrow.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        decoders = {field.name: decode for field in fields if (decode := _find_decoder(field.type)) is not None}
        return partial(_decode_fields, decoders) if decoders else None
    is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind)
    within = _find_decoder(kind.value_type) if is_list else None
    return None if within is None else partial(_decode_list, within, str(kind.value_type) in _SHORT_FLOATS)


def _decode_fields(decoders: Mapping[str, Callable[[Any], Any]], value: Any) -> Any:
    if value is None:
        return None
    return {name: decoders[name](below) if name in decoders else below for name, below in value.items()}


def _decode_list(decode: Callable[[Any], Any], of_numbers: bool, value: Any) -> Any:
    if value is None or (of_numbers and len(value) > MOST_ANSWERS):
        return value
    return [decode(below) for below in value]


def rows_of_batches(batches: Iterable[Any], place: str) -> Iterator[Row]:
    """Yield rows of tables of pyarrow as they are stored; ``place`` is what they are of.

    Raises ConfigError for a value that Python has no object for, such as a time after the year 9999.
    """
    number = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
            for field in batch.schema:
                if (decode := _find_decoder(field.type)) is not None:
                    for row in rows:
                        row[field.name] = decode(row[field.name])
        except (OverflowError, ValueError) as error:
            raise ConfigError(
                f"{place} rows {number + 1} to {number + len(batch)} hold a value unknown to Python: {one_line(error)}"
            ) from None
        for values in rows:
            number += 1
            yield Row(values, f"{place} row {number}")
