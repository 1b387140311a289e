"""Where a private Ray has its files."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from gkd.cluster.session import connect
from gkd.cluster.session.connect import LONGEST_BASE, _new_directory
from gkd.errors import ConfigError


def test_a_place_that_is_not_there_or_too_long_for_sockets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Path(tempfile.mkdtemp(prefix="d", dir="/tmp"))
    fits, too_long = (base / ("x" * (length - len(str(base)) - 1)) for length in (LONGEST_BASE, LONGEST_BASE + 1))
    try:
        monkeypatch.setenv("RAY_TMPDIR", str(fits))
        with pytest.raises(ConfigError, match=re.escape(f"RAY_TMPDIR={fits}")):
            _new_directory()
        fits.mkdir()
        assert Path(_new_directory()).parent == fits
        too_long.mkdir()
        monkeypatch.setenv("RAY_TMPDIR", str(too_long))
        with pytest.raises(ConfigError, match=re.escape(f"RAY_TMPDIR={too_long}")):
            _new_directory()
    finally:
        shutil.rmtree(base)


def test_where_tmp_is_not_writable_the_variable_that_was_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(os, "access", lambda path, mode: path != "/tmp")
    monkeypatch.setattr(tempfile, "tempdir", too_long := f"/{'x' * LONGEST_BASE}")  # as it is found by TMPDIR
    with pytest.raises(ConfigError, match=rf"^TMPDIR={too_long}:"):
        _new_directory()


def test_a_place_that_is_full_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    base = tempfile.mkdtemp(prefix="d", dir="/tmp")
    try:
        monkeypatch.setenv("RAY_TMPDIR", base)
        monkeypatch.setattr(connect, "LEAST_ROOM", 1 << 70)
        with pytest.raises(ConfigError, match=rf"RAY_TMPDIR={base}: \d+ MiB free"):
            _new_directory()
        assert not list(Path(base).iterdir())
    finally:
        shutil.rmtree(base)
