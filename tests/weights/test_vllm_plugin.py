"""What vLLM's processes need of this project, and what they note of their errors."""

from __future__ import annotations

import logging
import os
from importlib import metadata
from pathlib import Path

import pytest

from gkd.errors import ConfigError
from gkd.weights import vllm_plugin


def test_engines_of_further_processes_need_the_project_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    with pytest.raises(ConfigError, match=r"pip install"):
        vllm_plugin.require_installed()


def test_engines_of_further_processes_need_the_project_among_the_plugins_that_vllm_may_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(ConfigError, match=r"VLLM_PLUGINS"):
        vllm_plugin.require_installed()
    monkeypatch.setenv("VLLM_PLUGINS", "other,gkd")
    vllm_plugin.require_installed()


def test_an_error_of_another_process_is_noted(tmp_path: Path) -> None:
    with vllm_plugin.note_errors(str(tmp_path)) as first_error:
        assert Path(os.environ[vllm_plugin._NOTES]).is_relative_to(tmp_path)  # which goes when a worker is killed
        assert first_error() is None
        handler = vllm_plugin._Notes(os.environ[vllm_plugin._NOTES])
        for number in (1, 2):
            error = ValueError(f"no memory\nof GPU {number}")
            handler.emit(logging.LogRecord("vllm", logging.ERROR, "", 0, "failed", (), (ValueError, error, None)))
        handler.emit(logging.LogRecord("vllm", logging.ERROR, "", 0, "without an error", (), None))
        assert first_error() == "ValueError: no memory of GPU 1"
    assert vllm_plugin._NOTES not in os.environ
    handler.emit(logging.LogRecord("vllm", logging.ERROR, "", 0, "later", (), (ValueError, ValueError(), None)))
