"""What the table of supported models says, against the installed vLLM."""

from __future__ import annotations

from gkd.inference.vllm_models import CPU_HEAD_SIZES, CPU_LATENT_SIZES, architectures


def test_sizes_are_those_of_the_installed_vllm() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()
    assert list(CPU_LATENT_SIZES) == CPUMLABackend.get_supported_head_sizes()


def test_architectures_are_those_of_the_installed_vllm() -> None:
    from vllm.model_executor.models import ModelRegistry

    names = architectures()
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForConditionalGeneration", "PhiForCausalLM"} <= names
    assert names <= set(ModelRegistry.get_supported_archs())


def test_there_is_no_selective_scan_in_the_installed_vllm() -> None:
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()  # of three libraries the one for this processor; a second would end the process
    assert hasattr(torch.ops._C, "rms_norm")
    assert not hasattr(torch.ops._C, "selective_scan_fwd")
