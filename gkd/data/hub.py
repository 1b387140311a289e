"""Data sets as the ``datasets`` library has them: directories, and names in the local Hugging Face cache.

It finds the files of a subset and split, and reads Parquet and Arrow, whose types are stored. Of JSON and CSV it would
infer types, so these are read as files that are named alone, unless the index states how (``configs``).
Nothing here reaches a network: a name that is not in the cache is refused with the command that gets it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain, islice
from pathlib import Path
from typing import Any

from gkd.data.formats import delimiter_of, find_reader
from gkd.data.row import ROWS_AT_ONCE, Row, rows_of_batches
from gkd.errors import ConfigError, describe_error

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def looks_like_a_name(text: str) -> bool:
    """Return whether ``text`` may be the name of a model or data set on the Hugging Face hub: NAME or OWNER/NAME.

    What ends like a file, such as ``questions.txt``, is none.
    """
    return _NAME.fullmatch(text) is not None and re.fullmatch(r"\.[a-zA-Z]+", Path(text).suffix) is None


def read_directory(path: Path, part: str) -> Iterator[Row]:
    """Yield rows of a directory that ``save_to_disk`` wrote, or of data files as a hub repository has them.

    ``part``: which of several, as ``SUBSET:SPLIT``, ``SUBSET`` or ``SPLIT``; "" where there is one.
    """
    import datasets

    if (path / "dataset_dict.json").exists():
        splits = sorted(p.name for p in path.iterdir() if p.is_dir())
        if part not in splits:
            raise ConfigError(
                f"data directory {path} holds several splits ({', '.join(splits)}): name one, such as {path}/train"
            )
        path, part = path / part, ""
    if not any(path.rglob("*.*")):
        raise ConfigError(f"data directory {path} holds no data files")
    if (path / "state.json").exists():
        with _failures(f"data directory {path} was not written whole by datasets' save_to_disk"):
            table = datasets.Dataset.load_from_disk(str(path))
        if part not in ("", str(table.split)):
            raise ConfigError(f"data directory {path} holds one data set, without a split {part!r}: name it alone")
        return _rows(table, str(path))
    return _load(str(path), part, f"data directory {path}", str(path))


def read_name(name: str, part: str) -> Iterator[Row]:
    """Yield rows of the data set ``name`` in the local Hugging Face cache; ``part`` as in :func:`read_directory`.

    Raises ConfigError, with the command that gets it, where it is not there.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        source = snapshot_download(name, repo_type="dataset", local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        source = name  # what load_dataset prepared once is in a cache of its own
    return _load(source, part, f"data set {name}", f"{name}:{part}" if part else name)


def _load(source: str, part: str, what: str, place: str) -> Iterator[Row]:
    """Return the rows of the one split of ``source`` that ``part`` names."""
    import datasets

    with _keep_offline(), _failures(f"{what} cannot be read", source, part):
        subsets = datasets.get_dataset_config_names(source)
        subset, split = _subset_and_split(part, subsets, what)
        if split is None:
            splits = datasets.get_dataset_split_names(source, subset)
            if len(splits) != 1:
                pick = f"{subset}:{splits[0]}" if len(subsets) > 1 else splits[0]
                raise ConfigError(f"{what} holds several splits ({', '.join(splits)}): name one, such as :{pick}")
            split = splits[0]
        if files := _find_files(datasets.load_dataset_builder(source, subset).config):
            return _read_split(files, split)
        return _rows(datasets.load_dataset(source, subset, split=split), place)


def _find_files(config: Any) -> dict[str, list[Path]] | None:
    """Return the files of a subset by split where all are JSON, JSON Lines, CSV or Parquet, as they are.

    None for other formats, for files that are not here (``hf://``), and where an index (README.md) states how they are
    to be read. ``config``: the ``datasets.BuilderConfig`` that came of both.
    """
    from datasets import BuilderConfig

    files = {str(split): [Path(file) for file in names] for split, names in (config.data_files or {}).items()}
    paths = list(chain.from_iterable(files.values()))
    if not paths or any(not path.exists() or find_reader(path) is None for path in paths):
        return None
    stated = {field.name for field in fields(config) if getattr(config, field.name) != field.default}
    stated -= {"sep", *(field.name for field in fields(BuilderConfig))}
    separated = getattr(config, "sep", None) in {None, *map(delimiter_of, paths)}
    return None if stated or not separated else files


def _read_split(files: Mapping[str, Sequence[Path]], split: str) -> Iterator[Row]:
    """Return the rows of a split, or of what ``datasets`` names so: ``train[:100]``, ``train+test``, ``all``."""
    from datasets import ReadInstruction

    if split in files:
        return _read_files(files[split])
    spec = "+".join(files) if split == "all" else split
    lengths = {name: sum(1 for _ in _read_files(paths)) if name in spec else 0 for name, paths in files.items()}
    parts = ReadInstruction.from_spec(spec).to_absolute(lengths)
    rows = (islice(_read_files(files[part.splitname]), part.from_, part.to) for part in parts)
    return chain.from_iterable(rows)


def _read_files(paths: Sequence[Path]) -> Iterator[Row]:
    for path in paths:
        if reader := find_reader(path):
            yield from reader(path)


def _subset_and_split(part: str, subsets: list[str], what: str) -> tuple[str, str | None]:
    """Return which subset is meant, and which split where one is named."""
    first, _, second = (part, "", "") if "[" in part.partition(":")[0] else part.partition(":")  # a slice has a colon
    if second or first in subsets:
        if first and first not in subsets:
            raise ConfigError(f"{what} has no subset {first!r}; there are {', '.join(subsets)}")
        return first or subsets[0], second or None
    if len(subsets) != 1:
        raise ConfigError(f"{what} holds several subsets ({', '.join(subsets)}): name one, such as :{subsets[0]}:train")
    return subsets[0], first or None


def _rows(table: Any, place: str) -> Iterator[Row]:
    """Return rows as they are stored: images and audio are not decoded."""
    return rows_of_batches(table.with_format("arrow").iter(ROWS_AT_ONCE), place)


@contextmanager
def _failures(subject: str, source: str = "", part: str = "") -> Iterator[None]:
    """Turn whatever ``datasets`` meets in its own files into one line."""
    try:
        yield
    except ConfigError:
        raise
    except ConnectionError:
        named = f"{source}:{part}" if part else source
        raise ConfigError(
            f"data file {named} does not exist, and no data set of that name is in the local Hugging Face cache; "
            f"this gets it: hf download --repo-type dataset {source}"
        ) from None
    except Exception as error:
        # Of what it meets in a file it states only that it was met.
        cause = error.__cause__ or error
        raise ConfigError(f"{subject}: {describe_error(cause)}{_advise_cache(cause)}") from None


def _advise_cache(error: BaseException) -> str:
    """Return what to do where ``datasets`` could not write its own files; empty for other errors."""
    from datasets import config

    is_in_cache = isinstance(error, OSError) and str(error.filename).startswith(str(config.HF_DATASETS_CACHE))
    return "; HF_DATASETS_CACHE=DIR has it write to another directory" if is_in_cache else ""


@contextmanager
def _keep_offline() -> Iterator[None]:
    """Keep ``datasets`` from the network, and from writing progress over the run's own."""
    from datasets import are_progress_bars_disabled, config, disable_progress_bars, enable_progress_bars

    before, quiet = config.HF_HUB_OFFLINE, are_progress_bars_disabled()
    config.HF_HUB_OFFLINE = True
    disable_progress_bars()
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before
        if not quiet:
            enable_progress_bars()
