"""Rows of a data file: JSONL, Parquet, or a directory written by ``datasets.Dataset.save_to_disk``.

Every mistake in a file ends in one line that names the file and, where there is one, the line.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gkd.config import user_path
from gkd.errors import ConfigError, one_line

JSONL_SUFFIXES = (".jsonl", ".json-lines", ".ndjson")


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its ``values`` by column, and ``place``, the file and line (or row) to name in an error."""

    values: dict[str, Any]
    place: str

    def get(self, key: str, setting: str) -> Any:
        """Return the value in column ``key``. Raises ConfigError naming the ``setting`` of a missing one."""
        if key in self.values:
            return self.values[key]
        near = difflib.get_close_matches(key, list(self.values), n=1, cutoff=0.6)
        hint = f" (did you mean {near[0]}?)" if near else ""
        keys = ", ".join(self.values) or "none"
        raise ConfigError(f"{self.place} has no key {key!r} ({setting}){hint}; the keys there are: {keys}")


def read_rows(file: str) -> Iterator[Row]:
    """Yield rows of ``file`` in its order.

    Raises ConfigError when the file is missing, has no rows, is of an unknown format, is not valid UTF-8, or holds a
    line that is not a JSON object.
    """
    n_rows = 0
    for row in _reader(file)(user_path(file)):
        n_rows += 1
        yield row
    if n_rows == 0:
        raise ConfigError(f"data file {file} is empty: it has no rows")


def _reader(file: str) -> Callable[[Path], Iterator[Row]]:
    path = user_path(file)
    if not path.exists():
        raise ConfigError(f"data file {file} does not exist")
    if path.is_dir():
        return _read_directory
    if not path.is_file():
        raise ConfigError(f"data file {file} is no file")
    if path.suffix in JSONL_SUFFIXES:
        return _read_jsonl
    if path.suffix == ".parquet":
        return _read_parquet
    raise ConfigError(
        f"data file {file} is of an unknown format: expected .jsonl, .parquet or a directory written by datasets' "
        "save_to_disk"
    )


def _read_jsonl(path: Path) -> Iterator[Row]:
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
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
                raise ConfigError(f"{place} is not JSON: {_not_json(error)}") from None
            if not isinstance(values, dict):
                raise ConfigError(f"{place} is not a JSON object but {_kind(values)}")
            yield Row(values, place)


def _not_json(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deep" if isinstance(error, RecursionError) else one_line(error)


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            rows = (values for batch in table.iter_batches() for values in batch.to_pylist())
            for number, values in enumerate(rows, start=1):
                yield Row(values, f"{path} row {number}")
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"data file {path} is not a readable Parquet file: {one_line(error)}") from None


def _read_directory(path: Path) -> Iterator[Row]:
    if (path / "dataset_dict.json").exists():
        splits = ", ".join(sorted(part.name for part in path.iterdir() if part.is_dir()))
        raise ConfigError(f"data directory {path} holds several splits ({splits}): name one, such as {path}/train")
    import datasets

    try:
        rows = datasets.Dataset.load_from_disk(str(path))
    except Exception as error:  # datasets raises whatever it meets in its own files
        raise ConfigError(
            f"data directory {path} was not written by datasets' save_to_disk: {one_line(error)}"
        ) from None
    for number, values in enumerate(rows, start=1):
        yield Row(dict(values), f"{path} row {number}")
