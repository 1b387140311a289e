"""Entries of a cache: made once, whole or not at all."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from gkd.config import Data
from gkd.data.cache import cache_directory, make_entry
from gkd.errors import ConfigError
from tests.error_text import contains_in_order
from tests.ray.cluster.conftest import eventually


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "entry.unfinished").mkdir()
    (tmp_path / "entry.unfinished" / "half").touch()
    with make_entry(tmp_path / "entry", lambda _: None) as unfinished:
        assert unfinished is not None
        (unfinished / "whole").touch()
    assert [path.name for path in (tmp_path / "entry").iterdir()] == ["whole"]


def test_two_at_once_make_an_entry_once(tmp_path: Path) -> None:
    makers: list[int] = []
    lines: list[str] = []

    def make(number: int) -> None:
        with make_entry(tmp_path / "entry", lines.append) as unfinished:
            if unfinished is not None:
                makers.append(number)
                assert eventually(lambda: len(lines) == 2)  # the others wait

    threads = [threading.Thread(target=make, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(makers) == 1
    assert len(lines) == 2 and all(contains_in_order(line, "entry") for line in lines)


def test_an_entry_is_for_all_who_share_the_cache(tmp_path: Path) -> None:
    """Also what a library makes for its owner alone, as safetensors does."""
    with make_entry(tmp_path / "entry", lambda line: None) as unfinished:
        assert unfinished is not None
        (unfinished / "model").mkdir()
        file = unfinished / "model" / "x"
        file.touch(0o600)
    (tmp_path / "plain").touch()
    assert (tmp_path / "entry/model/x").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_exception_leaves_no_entry(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"), make_entry(tmp_path / "entry", lambda _: None):
        raise OSError("disk full")
    assert entries(tmp_path) == []


def test_what_is_there_is_used_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_entry(tmp_path / "entry", lambda _: None):
        pass

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "open", fail)
    with make_entry(tmp_path / "entry", lambda _: None) as unfinished:
        assert unfinished is None
    with (
        pytest.raises(ConfigError, match=r"Read-only file .*data\.cache_dir=DIR"),
        make_entry(tmp_path / "new", lambda _: None),
    ):
        pass


def test_the_cache_is_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory(Data()) == Path("/xdg/gkd")
    assert cache_directory(Data(cache_dir="/mine")) == Path("/mine")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory(Data()) == Path.home() / ".cache" / "gkd"
