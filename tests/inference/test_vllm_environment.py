"""What processes of engines have in their environment."""

from __future__ import annotations

import os

import pytest

from gkd.inference.vllm_environment import compile_apart, environment


def test_a_kernel_that_is_never_used_is_not_imported_on_a_gpu() -> None:
    assert environment("cuda")["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


def test_engines_on_different_gpus_compile_in_different_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for gpus in ("0", "1", "2,3"):
        monkeypatch.setenv("VLLM_CACHE_ROOT", "/somewhere/vllm")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        compile_apart("cpu")
        assert os.environ["VLLM_CACHE_ROOT"] == "/somewhere/vllm"  # nothing is compiled there
        compile_apart("cuda")
        compile_apart("cuda")  # a process that has a second engine
        found.append(os.environ["VLLM_CACHE_ROOT"])
    assert found == [f"/somewhere/vllm/gpu-{gpus}" for gpus in ("0", "1", "2-3")]
