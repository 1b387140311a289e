"""Readers of single files: JSON Lines, JSON, CSV and Parquet, one row at a time where the format allows it.

All but Parquet may be compressed (``.gz``).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from gkd.data.layouts import has_objects, is_conversation
from gkd.data.row import ROWS_AT_ONCE, Row, rows_of_batches
from gkd.errors import ConfigError, one_line

CSV_FIELD_BYTES = 1 << 30  # Python's limit is 128 KiB, which a long document exceeds


def read_jsonl(path: Path) -> Iterator[Row]:
    """Yield an object a line; blank lines count as lines. Raises ConfigError naming the line that is no object."""
    with _open(path) as file:
        for number, line in enumerate(_decode_lines(file, path), start=1):
            if line.strip():
                place = f"{path} line {number}"
                yield Row(_object(_parse(line, place), place), place)


def read_json(path: Path) -> Iterator[Row]:
    """Yield the objects of a list; also of the one list within an object, such as ``{"data": [...]}``.

    An object without such a list is a row. What begins with a complete object on its first line is read as JSON Lines,
    which ``datasets`` writes under this suffix, too. The file is held in memory.
    """
    try:
        with _open(path) as file:
            text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid UTF-8: {error.reason} at byte {error.start + 1}") from None
    if not text.strip():
        return
    if _is_object(text.lstrip().partition("\n")[0]) and not _is_object(text):
        yield from read_jsonl(path)
        return
    content = _parse(text, str(path))
    if isinstance(content, dict):
        lists = [value for value in content.values() if has_objects(value) and not is_conversation(value)]
        content = lists[0] if len(lists) == 1 else [content]
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
        with _open(path) as file:
            delimiter = delimiter_of(path)
            separated = f"separated by {'commas' if delimiter == ',' else 'tabs'}"
            lines = (part for line in _decode_lines(file, path) for part in io.StringIO(line, newline=""))  # also at \r
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
            header: list[str] = next(reader, [])
            if len(set(header)) < len(header):
                twice = next(name for name in header if header.count(name) > 1)
                raise ConfigError(f"{path}: its header names the column {twice!r} twice")
            for fields in reader:
                if not fields:
                    continue
                place = f"{path} line {reader.line_num}"
                if len(fields) != len(header):
                    raise ConfigError(f"{place} has {len(fields)} fields {separated}, and the header {len(header)}")
                yield Row(dict(zip(header, fields, strict=True)), place)
    except csv.Error as error:
        raise ConfigError(f"{path} line {reader.line_num} is not CSV: {one_line(error)}") from None


def read_parquet(path: Path) -> Iterator[Row]:
    """Yield rows of a Parquet file, a batch of it in memory at a time."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            yield from rows_of_batches(table.iter_batches(ROWS_AT_ONCE), str(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"data file {path} is not a readable Parquet file: {one_line(error)}") from None


FORMATS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": read_jsonl,
    ".json-lines": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
}


def find_reader(path: Path) -> Callable[[Path], Iterator[Row]] | None:
    """Return what reads files of such a name, None for an unknown format."""
    suffix = _suffix(path)
    return None if suffix == ".parquet" and path.suffix.lower() == ".gz" else FORMATS.get(suffix)


def delimiter_of(path: Path) -> str:
    """Return what separates the fields of a table in text."""
    return "\t" if _suffix(path) == ".tsv" else ","


def _suffix(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """Open the file to read its bytes, those that a ``.gz`` holds. Raises ConfigError for a compressed one's fault."""
    if path.suffix.lower() != ".gz":
        with path.open("rb") as file:
            yield file
        return
    try:
        with gzip.open(path) as file:
            yield cast("IO[bytes]", file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"data file {path} cannot be decompressed: {one_line(error)}") from None


def _decode_lines(file: IO[bytes], path: Path) -> Iterator[str]:
    """Yield the lines of a file that was opened as bytes. Raises ConfigError naming one that is no UTF-8."""
    for number, raw in enumerate(file, start=1):
        try:
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            lines = raw[: error.start].split(b"\r")  # of a file without any \n, as spreadsheets write
            place, byte = f"{path} line {number + len(lines) - 1}", len(lines[-1]) + 1
            raise ConfigError(f"{place} is not valid UTF-8: {error.reason} at byte {byte}") from None


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
