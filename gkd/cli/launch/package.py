"""The working directory as one zip file, for a job to run in: code and small files, not data and results."""

from __future__ import annotations

import os
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from gkd.config.data import TASKS
from gkd.errors import ConfigError

LEFT_OUT = {"__pycache__", "node_modules", "venv"}  # wherever they are; so is every name that begins with a dot
LEFT_OUT_AT_TOP = {"outputs", "data", "build", "dist", "wandb", "runs"}
MAX_MB = 100  # Ray keeps the package in the memory of the cluster's head


def pack(directory: Path, target: Path, further: Mapping[Path, Path] | None = None) -> tuple[int, list[str]]:
    """Zip ``directory`` into ``target``, with this gkd, its conf and tasks where it has no gkd of its own.

    ``further``: files from elsewhere, by the name that they get.

    Returns the number of files, and which directories were left out besides hidden ones and caches. Raises ConfigError
    when there is more than :data:`MAX_MB`, or for a name that no zip file can have.
    """
    sources: dict[Path, Path] = dict(further or {})
    without: list[str] = []
    folders = [(directory, directory, LEFT_OUT_AT_TOP)]
    if not (directory / "gkd" / "__init__.py").is_file():
        gkd_folder = Path(__file__).parents[2]
        folders += [
            (folder, gkd_folder.parent, set())
            for folder in (gkd_folder, gkd_folder.parent / "conf", *_task_folders(gkd_folder))
        ]
    n_bytes: Counter[str] = Counter()
    for folder, top, left_out in folders:
        for path in _files(folder, left_out, without):
            name = path.relative_to(top)
            _require_utf8(name)
            sources[name] = path
            n_bytes[name.parts[0]] += path.stat().st_size
            if n_bytes.total() > MAX_MB * 1_000_000:
                raise ConfigError(_describe_excess(n_bytes, directory))
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for name, path in sorted(sources.items()):
            archive.write(path, name)
    return len(sources), sorted(without)


def _task_folders(gkd_folder: Path) -> list[Path]:
    """Return the folders of built-in tasks outside of ``gkd_folder``, where a checkout has its recipes."""
    specs = [find_spec(entry.partition(":")[0]) for entry in TASKS.entries.values()]
    folders = {Path(spec.origin).parent for spec in specs if spec is not None and spec.origin is not None}
    return sorted(folder for folder in folders if not folder.is_relative_to(gkd_folder))


def is_packed(file: Path, directory: Path) -> bool:
    """Return whether :func:`pack` takes ``file``."""
    return file.is_relative_to(directory) and file in _files(directory, LEFT_OUT_AT_TOP, [])


def _files(directory: Path, left_out_at_top: set[str], without: list[str]) -> Iterator[Path]:
    for folder, names, files in os.walk(directory):
        skip = LEFT_OUT | (left_out_at_top if Path(folder) == directory else set())
        folders = [name for name in names if not name.startswith(".") and name != "__pycache__"]
        names[:] = [name for name in folders if name not in skip and not _is_elsewhere(Path(folder) / name)]
        without += [str((Path(folder) / name).relative_to(directory)) for name in folders if name not in names]
        for name in files:
            path = Path(folder) / name
            if not name.startswith(".") and path.is_file():
                yield path


def _require_utf8(name: Path) -> None:
    try:
        str(name).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the working directory has a file of the name {str(name)!r}: rename or remove it") from None


def _is_elsewhere(path: Path) -> bool:
    return path.is_symlink() or (path / "pyvenv.cfg").exists()


def _describe_excess(n_bytes: Counter[str], directory: Path) -> str:
    largest = ", ".join(f"{name} ({size / 1e6:.0f} MB)" for name, size in n_bytes.most_common(3))
    return (
        f"the working directory {directory} holds more than the {MAX_MB} MB a job may bring, among others {largest}. "
        "Start from the directory of your code; data, outputs and names with a leading dot stay here"
    )
