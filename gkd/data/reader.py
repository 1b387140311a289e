"""Rows of a data set: a file or several, a directory, or a name in the local Hugging Face cache.

Every mistake ends in one line that names the file and, where there is one, the line.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from itertools import chain

from gkd.config import user_path
from gkd.config.paths import is_pattern
from gkd.data.formats import FORMATS, find_reader
from gkd.data.hub import looks_like_a_name, read_directory, read_name
from gkd.data.row import Row
from gkd.errors import ConfigError


def read_rows(file: str) -> Iterator[Row]:
    """Yield rows of ``file`` in its order.

    ``file`` is a file whose suffix is in :data:`gkd.data.formats.FORMATS`, or a pattern with ``*`` or ``?`` for
    several, by name; a directory that ``datasets`` wrote or can load; or the name of a data set in the local Hugging
    Face cache. The latter two may be followed by ``:SUBSET``, ``:SPLIT`` or both. Raises ConfigError when it is
    missing, has no rows, is of an unknown format, or is not what its suffix names.
    """
    n_rows = 0
    for row in _rows(file):
        n_rows += 1
        yield row
    if n_rows == 0:
        raise ConfigError(f"data file {file} is empty: it has no rows")


def _rows(file: str) -> Iterator[Row]:
    path = user_path(file)
    if not path.exists():
        if "://" in file:
            raise ConfigError(
                f"data file {file} is an address, and nothing is downloaded: name a file, a directory of datasets, or "
                "a data set in the local Hugging Face cache"
            )
        if is_pattern(file):
            return chain.from_iterable(map(read_rows, match_files(file)))
        directory, _, part = file.partition(":")
        if part and user_path(directory).is_dir():
            return read_directory(user_path(directory), part)
        if looks_like_a_name(directory):
            return read_name(directory, part)
        raise ConfigError(f"data file {file} does not exist")
    if path.is_dir():
        return read_directory(path, "")
    if not path.is_file():
        raise ConfigError(f"data file {file} is no file")
    if (reader := find_reader(path)) is None:
        raise ConfigError(
            f"data file {file} is of an unknown format: expected {', '.join(FORMATS)}, text also as .gz, a directory "
            "of datasets, or a name in the local Hugging Face cache"
        )
    return reader(path)


def match_files(pattern: str) -> list[str]:
    """Return the files that a pattern stands for, ``**`` also for directories. Raises ConfigError for none."""
    files = sorted(glob.glob(str(user_path(pattern)), recursive=True))  # noqa: PTH207 - of any path
    if not files:
        raise ConfigError(f"data file {pattern} does not exist: no file's name is like it")
    return files
