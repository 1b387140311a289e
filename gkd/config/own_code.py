"""Files of users' own code: loaded as modules that may import what lies beside them, and kept as a run began."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

KEPT = "GKD_CODE"
"""Variable with the directory of the sources that a run began with: its processes that start later load these."""

UNUSED = "modules"
"""Folder of kept sources with modules of packages, where nothing looks for code: the packages' rest is not kept."""

_FOLDERS: list[Path] = []
"""Those of users' files, in the order in which Python looks there for what these import."""
_SOURCES: dict[Path, dict[Path, bytes]] = {}
"""Of users' files and of what they import from beside them, as they were when they were loaded into this process."""
_MODULES: dict[Path, bytes] = {}
"""The files of modules that are named as ``package.module``, as they were when one was first needed here."""


def load_module(file: Path) -> ModuleType:
    """Return the module in ``file``, under a name that no other has; it may import what lies beside it.

    Raises what the file raises, and ImportError where what it imports from beside it would be another file's neighbour.
    """
    name = _module_name(file)
    if name in sys.modules:
        return sys.modules[name]
    if file.parent not in _FOLDERS:
        _FOLDERS.append(file.parent)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    _require_own_neighbours(file)
    if KEPT in os.environ:
        _install_finder()
    spec = importlib.util.spec_from_file_location(name, file, loader=_KeptLoader(name, str(file)))
    assert spec is not None and spec.loader is not None  # where there is a loader there are both
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    _SOURCES[file] = _read_sources(file)
    keeps_none, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # its times have seconds, edits are faster
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name], _SOURCES[file]
        raise
    finally:
        sys.dont_write_bytecode = keeps_none
    return module


def record_source(module: ModuleType) -> None:
    """Have the file of a module that is named as ``package.module`` be kept with the others.

    It is imported from where it is all the same, as what it imports from its package is not kept.
    """
    file = Path(getattr(module, "__file__", None) or "")
    if file.suffix == ".py" and file not in _MODULES and file.is_file():
        _MODULES[file] = file.read_bytes()


def is_there(file: Path) -> bool:
    """Return whether there is such a file, or the run has kept it."""
    return file.is_file() or _is_kept(file)


def source_digest(file: Path) -> str:
    """Return SHA-256 (hex) of a source file and of what it imports from beside it, as they were when loaded here."""
    if file not in _SOURCES:
        _SOURCES[file] = _read_sources(file)
    return hashlib.sha256(b"".join(_SOURCES[file].values())).hexdigest()


def forget_edited_modules() -> list[Path]:
    """Have files that have changed since they were loaded here be loaded anew, with what is beside them; returns them.

    Modules that are named as ``package.module`` stay, as Python has it.
    """
    edited = [file for file in _SOURCES if _module_name(file) in sys.modules and _read_sources(file) != _SOURCES[file]]
    for file in edited:
        del sys.modules[_module_name(file)], _SOURCES[file]
        for neighbour, path in _neighbours(file):
            _SOURCES.pop(path, None)
            module = sys.modules.get(neighbour)
            if str(path) in (getattr(module, "__file__", None), *getattr(module, "__path__", ())):
                for name in [key for key in sys.modules if key == neighbour or key.startswith(f"{neighbour}.")]:
                    del sys.modules[name]
    return edited


@contextlib.contextmanager
def keep_sources(directory: Path) -> Iterator[None]:
    """Write the files that were loaded here into :func:`find_kept`; meanwhile processes that begin load those.

    So a run goes on with the code it began with, whatever is edited meanwhile, but for modules of packages.
    """
    folder, before = find_kept(directory), os.environ.get(KEPT)
    for place, content in _all_sources().items():
        copy = folder / place
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    os.environ[KEPT] = str(folder)
    _install_finder()  # this process, too, may import some of it only now
    try:
        yield
    finally:
        del os.environ[KEPT]
        if before is not None:
            os.environ[KEPT] = before


def find_kept(directory: Path) -> Path:
    """Return where in ``directory`` the files that were loaded here are kept: a directory for each state of them."""
    digest = hashlib.sha256()
    for place, content in _all_sources().items():
        digest.update(f"{place} {len(content)} ".encode() + content)
    return directory.absolute() / digest.hexdigest()[:12]


def _all_sources() -> dict[Path, bytes]:
    """Return what is kept, by its place among it."""
    modules = {_place_in(Path(UNUSED), path): content for path, content in sorted(_MODULES.items())}
    sources = (item for file in sorted(_SOURCES) for item in _SOURCES[file].items())
    return modules | {_place_in(Path(), path): content for path, content in sources}


def read_kept_variables() -> dict[str, str]:
    """Return the variables by which a process of this run loads what the run has kept."""
    return {KEPT: os.environ[KEPT]} if KEPT in os.environ else {}


class _KeptLoader(SourceFileLoader):
    """Loads a file, from what the run has kept of it where it has, and never from bytecode."""

    def get_data(self, path: str) -> bytes:
        return _read(Path(path))

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


class _KeptFinder:
    """Finds what users' files import from beside them in what the run has kept, where that has it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is kept; None for one that is not."""
        names = fullname.split(".")
        if not any(_is_kept(place) for folder in _FOLDERS for place in _module_places(folder, names[0])):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        places = [Path(spec.origin)] if spec is not None and spec.origin is not None else []
        for folder in [] if places else _FOLDERS if path is None else map(Path, path):  # it was deleted meanwhile
            places += _module_places(folder, names[-1])
        for place in filter(_is_kept, places):
            if place.suffix != ".py":
                package = ModuleSpec(fullname, None, is_package=True)
                package.submodule_search_locations = [str(place)]
                return package
            within = [str(place.parent)] if place.name == "__init__.py" else None
            loader = _KeptLoader(fullname, str(place))
            return importlib.util.spec_from_file_location(
                fullname, place, loader=loader, submodule_search_locations=within
            )
        return None


def _install_finder() -> None:
    if not any(isinstance(finder, _KeptFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _KeptFinder())


def _find_copy(place: Path) -> Path | None:
    """Return what the run has kept of a file or of a folder; None where it has kept none, and outside of a run."""
    if (directory := os.environ.get(KEPT)) is None:
        return None
    copy = _place_in(Path(directory), place)
    return copy if copy.exists() else None


def _is_kept(place: Path) -> bool:
    return _find_copy(place) is not None


def _place_in(directory: Path, file: Path) -> Path:
    return directory / os.path.normpath(file).lstrip("/")


def _read(file: Path) -> bytes:
    return (_find_copy(file) or file).read_bytes()


def _module_name(file: Path) -> str:
    return f"gkd_own_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"


def _read_sources(file: Path) -> dict[Path, bytes]:
    """Return the contents of a file and of all that it may import from beside it, packages whole."""
    paths = [file, *(path for _, place in _neighbours(file) for path in _files_of(place))]
    return {path: _read(path) for path in paths if is_there(path)}


def _neighbours(file: Path) -> list[tuple[str, Path]]:
    """Return the modules beside ``file`` that it imports, and that these do, by name and in one order; not this one.

    Of a package it is the file that makes it one, or else its folder. Python may have another module of a name.
    """
    places: dict[str, Path] = {}
    files = [file]
    while files:
        for name in _find_imported_modules(files.pop()):
            place = _find_neighbour(file.parent, name)
            if place is None or place == file or name in places or name == __package__.partition(".")[0]:
                continue
            if _is_imported(name, place):
                places[name] = place
                files += _files_of(place)
    return sorted(places.items())


def _is_imported(name: str, place: Path) -> bool:
    """Return whether Python, asked for a module of this name, takes the one at ``place``, or knows none."""
    spec = PathFinder.find_spec(name)
    if spec is None:
        return True  # it was deleted, and is kept
    origins = [spec.origin] if spec.origin is not None else spec.submodule_search_locations or []
    places = [place, place.parent] if place.name == "__init__.py" else [place]  # a folder where that was deleted
    return any(Path(other) == one or _is_same_file(Path(other), one) for other in origins for one in places)


def _is_same_file(other: Path, one: Path) -> bool:
    try:
        return other.samefile(one)
    except OSError:  # one was deleted, or the other is within an archive, or no place at all
        return False


def _files_of(place: Path) -> list[Path]:
    """Return the files of a module: it, or all of its package."""
    if place.suffix == ".py" and place.name != "__init__.py":
        return [place]
    is_folder = place.suffix != ".py"  # which may have data beside its modules, far below
    folder = place if is_folder else place.parent
    copy = _find_copy(folder)  # which has what there was
    patterns = ("*.py", "*/*.py") if is_folder and copy is None else ("**/*.py",)
    files = {file for pattern in patterns for file in (copy or folder).glob(pattern)}
    return [folder / file.relative_to(copy or folder) for file in sorted(files)]


def _find_imported_modules(file: Path) -> Sequence[str]:
    """Return the modules that a file imports, without what is within them; none of a file that cannot be read."""
    try:
        return _modules_imported_by(_read(file))
    except (OSError, SyntaxError, ValueError):  # importing it raises why
        return ()


@lru_cache(maxsize=1024)  # a sweep composes the same files for each of its runs
def _modules_imported_by(source: bytes) -> Sequence[str]:
    nodes = list(ast.walk(ast.parse(source)))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return tuple(sorted({module.partition(".")[0] for module in modules}))


def _require_own_neighbours(file: Path) -> None:
    """Raise ImportError where what a file imports from beside it would be another file's neighbour of that name.

    Python has one module of a name, from the first folder that has one.
    """
    for name in _find_imported_modules(file):
        neighbour = _find_neighbour(file.parent, name)
        for folder in _FOLDERS[: _FOLDERS.index(file.parent)] if neighbour else ():
            other = _find_neighbour(folder, name)
            if neighbour is None or other is None or {neighbour.suffix, other.suffix} != {".py"}:
                continue
            if _read(neighbour) != _read(other):
                raise ImportError(
                    f"it imports {name}, and both {other} and {neighbour} are called so: rename one of them"
                )


def _find_neighbour(folder: Path, name: str) -> Path | None:
    *files, package = _module_places(folder, name)
    return next(
        (place for place in files if is_there(place)), package if package.is_dir() or _is_kept(package) else None
    )


def _module_places(folder: Path, name: str) -> tuple[Path, Path, Path]:
    return folder / f"{name}.py", folder / name / "__init__.py", folder / name
