"""What processes of engines have in their environment."""

from __future__ import annotations

from gkd.inference.vllm_environment import environment


def test_a_kernel_that_is_never_used_is_not_imported_on_a_gpu() -> None:
    assert environment("cuda", [])["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
