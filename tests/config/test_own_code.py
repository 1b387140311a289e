"""What a run's processes load of users' files that are edited, or deleted, while it is under way."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gkd.cluster.workers.environment import environment
from gkd.config import own_code
from gkd.config.own_code import KEPT, find_kept, keep_sources, load_module
from gkd.config.registry import Registry

NAMES = ("mine", "beside_kept", "package_kept", "lazily_kept", "folder_kept", "outer_kept")


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What makes of this process, as far as users' code goes, one that has just begun."""
    monkeypatch.setenv(KEPT, "")
    monkeypatch.delenv(KEPT)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # whose times have seconds

    def forget() -> None:
        monkeypatch.setattr(own_code, "_SOURCES", {})
        monkeypatch.setattr(own_code, "_MODULES", {})
        monkeypatch.setattr(own_code, "_FOLDERS", [])
        monkeypatch.setattr(sys, "path", [*sys.path])
        for name in [name for name in sys.modules if name.partition(".")[0] in NAMES or name.startswith("gkd_own_")]:
            monkeypatch.delitem(sys.modules, name)

    forget()
    return forget


def write(folder: Path, value: int) -> Path:
    (folder / "package_kept").mkdir(exist_ok=True)
    (folder / "package_kept" / "__init__.py").write_text(f"OF_PACKAGE = {value}\n")
    (folder / "package_kept" / "within.py").write_text(f"from outer_kept import OUTER\nWITHIN = {value}\n")
    (folder / "outer_kept.py").write_text(f"OUTER = {value}\n")
    (folder / "folder_kept").mkdir(exist_ok=True)
    (folder / "folder_kept" / "deep.py").write_text(f"DEEP = {value}\n")
    (folder / "beside_kept.py").write_text(f"from lazily_kept import LAST\nBESIDE = [{value}, LAST]\n")
    (folder / "lazily_kept.py").write_text(f"LAST = {value}\n")
    (folder / "mine.py").write_text(
        "from beside_kept import BESIDE\n"
        f"def values():\n    from package_kept import OF_PACKAGE, within\n    from folder_kept.deep import DEEP\n"
        f"    return [{value}, *BESIDE, OF_PACKAGE, within.WITHIN, within.OUTER, DEEP]\n"
        "def fails():\n    raise ValueError('mine')\n"
    )
    return folder / "mine.py"


def delete(folder: Path) -> None:
    for file in folder.rglob("*.py"):
        file.unlink()


def rename(folder: Path) -> None:
    write(folder, 2)
    (folder / "package_kept" / "within.py").rename(folder / "package_kept" / "inner.py")
    (folder / "mine.py").write_text("from package_kept import inner\n")


@pytest.mark.parametrize(
    "change", [lambda folder: write(folder, 2), delete, rename], ids=["edited", "deleted", "renamed"]
)
def test_a_process_that_begins_later_has_the_code_the_run_began_with(
    change: Callable[[Path], Any], begin: Callable[[], None], tmp_path: Path
) -> None:
    (tmp_path / "user").mkdir()
    file = write(tmp_path / "user", 1)
    load_module(file)
    with keep_sources(tmp_path / "sources"):
        assert environment("cpu", [])[KEPT] == os.environ[KEPT]
        change(file.parent)
        begin()
        later = load_module(file)
        with keep_sources(tmp_path / "sources"):  # of a run that begins again
            begin()
            assert load_module(file).values() == [1] * 7
        later = load_module(file)
        assert later.values() == [1] * 7
        assert later.__file__ == str(file)  # what it reads beside itself is there
        with pytest.raises(ValueError, match="mine") as raised:
            later.fails()
        assert str(file) in "".join(traceback.format_tb(raised.tb))
    assert KEPT not in os.environ and KEPT not in environment("cpu", [])


def test_the_next_run_has_the_code_that_is_there_when_it_begins(begin: Callable[[], None], tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    kept = []
    for value in (1, 2, 1):
        file = write(tmp_path / "user", value)
        begin()
        assert load_module(file).values() == [value] * 7
        with keep_sources(tmp_path / "sources"):
            kept.append(Path(os.environ[KEPT]))
        assert find_kept(tmp_path / "sources") == kept[-1]
        (of_mine,) = kept[-1].rglob("mine.py")
        assert of_mine.read_bytes() == file.read_bytes()
    assert kept[0] == kept[2] != kept[1]


def test_what_the_run_s_own_process_imports_later_is_what_was_kept(begin: Callable[[], None], tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    own = load_module(write(tmp_path / "user", 1))
    with keep_sources(tmp_path / "sources"):
        write(tmp_path / "user", 2)
        assert own.values() == [1] * 7


def test_a_neighbour_is_known_by_whatever_path_python_has(begin: Callable[[], None], tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "user")
    file = write(tmp_path / "user", 1)
    sys.path.insert(0, str(tmp_path / "link"))
    load_module(file)
    with keep_sources(tmp_path / "sources"):
        kept = sorted(path.name for path in (tmp_path / "sources").rglob("*.py"))
    expected = ["__init__.py", "beside_kept.py", "deep.py", "lazily_kept.py", "mine.py", "outer_kept.py", "within.py"]
    assert kept == expected


def test_a_neighbour_s_name_that_an_archive_has_is_the_archive_s(begin: Callable[[], None], tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    file = write(tmp_path / "user", 1)
    with zipfile.ZipFile(tmp_path / "lib.zip", "w") as archive:
        archive.writestr("beside_kept.py", "BESIDE = [7, 7]\n")
    sys.path.insert(0, str(tmp_path / "lib.zip"))
    assert load_module(file).values()[:3] == [1, 7, 7]
    with keep_sources(tmp_path / "sources"):
        assert not [path for path in (tmp_path / "sources").rglob("*.py") if path.name == "beside_kept.py"]


def test_a_path_with_dots_is_kept_within_the_directory(begin: Callable[[], None], tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "elsewhere").mkdir()
    dotted = tmp_path / "elsewhere" / ".." / ".." / tmp_path.name / "user" / "mine.py"
    write(tmp_path / "user", 1)
    load_module(dotted)
    with keep_sources(tmp_path / "sources"):
        (kept,) = (tmp_path / "sources").rglob("mine.py")
        write(tmp_path / "user", 2)
        begin()
        assert load_module(dotted).values()[0] == 1
    assert kept.is_relative_to(tmp_path / "sources")


def test_a_folder_of_an_installed_package_s_name_is_not_kept(begin: Callable[[], None], tmp_path: Path) -> None:
    """Python has the installed one."""
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise SystemExit\n")
    (tmp_path / "mine.py").write_text("import numpy\ndef zero(): return numpy.zeros(1)[0]\n")
    assert load_module(tmp_path / "mine.py").zero() == 0
    with keep_sources(tmp_path / "sources"):
        assert [file.name for file in (tmp_path / "sources").rglob("*.py")] == ["mine.py"]


def test_of_a_package_the_module_that_is_named_is_kept_as_it_was_imported(
    begin: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry, name = Registry("section.setting", {}), "package_kept.within:WITHIN"
    monkeypatch.setattr("gkd.config.registry._LOADED", {})
    (beside := tmp_path / "beside.py").write_text("")  # a file of the user's in the folder of the package
    load_module(beside)
    assert registry.load(name) == 1
    write(tmp_path, 2)
    with keep_sources(tmp_path / "sources"):
        (kept,) = (tmp_path / "sources").rglob("within.py")
        assert "WITHIN = 1" in kept.read_text()
        begin()
        load_module(beside)
        monkeypatch.setattr("gkd.config.registry._LOADED", {})
        importlib.invalidate_caches()
        assert registry.load(name) == 2  # with what it imports from its package
        with keep_sources(tmp_path / "sources"):  # of a run that begins again
            assert len(list((tmp_path / "sources").rglob("within.py"))) == 2
