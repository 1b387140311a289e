"""Compile caches of engines."""

from __future__ import annotations

import os

import pytest

from gkd.inference.vllm_environment import compile_apart


def test_engines_on_different_gpus_compile_in_different_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    directories = []
    monkeypatch.setattr("platform.node", lambda: "one")
    for gpus in ("0", "1", "2,3"):
        monkeypatch.setenv("VLLM_CACHE_ROOT", "/somewhere/vllm")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        compile_apart("cpu")
        assert os.environ["VLLM_CACHE_ROOT"] == "/somewhere/vllm"  # nothing is compiled there
        compile_apart("cuda")
        compile_apart("cuda")  # a process that has a second engine
        directories.append(os.environ["VLLM_CACHE_ROOT"])
    assert directories == [f"/somewhere/vllm/one-gpu-{gpus}" for gpus in ("0", "1", "2-3")]
    monkeypatch.setattr("platform.node", lambda: "other")  # with the same home
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/somewhere/vllm")
    compile_apart("cuda")
    assert os.environ["VLLM_CACHE_ROOT"] == "/somewhere/vllm/other-gpu-2-3"
