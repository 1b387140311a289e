"""What processes of engines have in their environment."""

from __future__ import annotations

import pytest

from gkd.cluster.workers.environment import ALLOCATOR_VARIABLES, environment


def test_a_kernel_that_is_never_used_is_not_imported_on_a_gpu() -> None:
    assert environment("cuda", [])["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


def test_on_a_cpu_memory_is_kept_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not environment("cuda", []).keys() & ALLOCATOR_VARIABLES.keys()
    assert environment("cpu", []).keys() >= ALLOCATOR_VARIABLES.keys()
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    assert environment("cpu", []).keys() & ALLOCATOR_VARIABLES.keys() == ALLOCATOR_VARIABLES.keys() - {
        "MALLOC_TOP_PAD_"
    }
