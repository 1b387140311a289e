"""Readers of single files: JSON Lines, JSON, CSV and Parquet, one row at a time where the format allows it."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gkd.data.row import Row
from gkd.errors import ConfigError, one_line

CSV_FIELD_BYTES = 1 << 30  # Python's limit is 128 KiB, which a long document exceeds


def read_jsonl(path: Path) -> Iterator[Row]:
    """Yield an object a line; blank lines count as lines. Raises ConfigError naming the line that is no object."""
    # Bytes, so that a line that is no UTF-8 can be named.
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            place = f"{path} line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(f"{place} is not valid UTF-8: {error.reason} at byte {error.start + 1}") from None
            if not line.strip():
                continue
            yield Row(_object(_parse(line, place), place), place)


def read_json(path: Path) -> Iterator[Row]:
    """Yield the objects of a list; also of the one list within an object, such as ``{"data": [...]}``.

    What begins with a complete object on its first line is read as JSON Lines, which ``datasets`` writes under this
    suffix, too. The file is held in memory.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid UTF-8: {error.reason} at byte {error.start + 1}") from None
    if not text.strip():
        return
    if _is_object(text.lstrip().partition("\n")[0]) and not _is_object(text):
        yield from read_jsonl(path)
        return
    content = _parse(text, str(path))
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        if len(lists) != 1:
            count = "none" if not lists else f"{len(lists)} lists"
            raise ConfigError(f"{path} is an object with {count} of rows in it: expected a list of rows, or one in it")
        (content,) = lists
    if not isinstance(content, list):
        raise ConfigError(f"{path} is not a list of rows but {_kind(content)}")
    for number, values in enumerate(content, start=1):
        place = f"{path} row {number}"
        yield Row(_object(values, place), place)


def read_csv(path: Path) -> Iterator[Row]:
    """Yield a row for each record after the header; values stay text. A ``.tsv`` is separated by tabs.

    Raises ConfigError naming the line of a record with more or fewer fields than the header.
    """
    csv.field_size_limit(CSV_FIELD_BYTES)
    reader: Any = None
    try:
        with path.open(encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(text, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
            header: list[str] = next(reader, [])
            if len(set(header)) < len(header):
                twice = next(name for name in header if header.count(name) > 1)
                raise ConfigError(f"{path}: its header names the column {twice!r} twice")
            for fields in reader:
                if not fields:
                    continue
                place = f"{path} line {reader.line_num}"
                if len(fields) != len(header):
                    raise ConfigError(f"{place} has {len(fields)} fields, and the header {len(header)}")
                yield Row(dict(zip(header, fields, strict=True)), place)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid UTF-8: {error.reason} at byte {error.start + 1}") from None
    except csv.Error as error:
        raise ConfigError(f"{path} line {reader.line_num} is not CSV: {one_line(error)}") from None


def read_parquet(path: Path) -> Iterator[Row]:
    """Yield rows of a Parquet file, a batch of it in memory at a time."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            rows = (values for batch in table.iter_batches() for values in batch.to_pylist())
            for number, values in enumerate(rows, start=1):
                yield Row(values, f"{path} row {number}")
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"data file {path} is not a readable Parquet file: {one_line(error)}") from None


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise ConfigError(f"{place} is not JSON: {_explain_json_error(error)}") from None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _explain_json_error(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno} " if error.lineno > 1 else ""
        return f"{error.msg} at {line}column {error.colno}"
    return "nested too deep" if isinstance(error, RecursionError) else one_line(error)


def _object(values: Any, place: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ConfigError(f"{place} is not a JSON object but {_kind(values)}")
    return values


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number", dict: "an object"}
    return names.get(type(value), "null")
