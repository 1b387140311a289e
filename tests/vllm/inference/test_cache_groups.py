"""What a sequence takes of the cache, as it is planned, against vLLM's own groups of layers and sizes of states."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.model_executor.models.registry import ModelRegistry
from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

from gkd.planning.memory.cache import BLOCK, STEPS_AT_ONCE, cache_use
from gkd.planning.shapes import ModelShape, shape_of
from gkd.planning.states import States, read_states
from gkd.planning.windows import Windows

HEADS = {"num_kv_heads": 8, "head_size": 256, "dtype": torch.bfloat16}
KIMI = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}
KINDS = [
    (8, 40, 0), (10, 52, 0), (13, 13, 0), (13, 12, 0), (2, 3, 0), (4, 5, 0), (1, 0, 0), (0, 3, 0),
    (8, 0, 24), (3, 0, 4), (3, 2, 9), (1, 0, 1),
]  # fmt: skip


def shape_with(n_layers: int, windows: Windows, states: States) -> ModelShape:
    """A model of layers with the keys and values of HEADS."""
    config = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": n_layers, "num_attention_heads": 16,
              "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 64}  # fmt: skip
    return replace(shape_of(config), windows=windows, states=states)


@pytest.mark.parametrize(("full", "windowed", "stateful"), KINDS)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_sequence_takes_the_blocks_that_vllm_asks_for(full: int, windowed: int, stateful: int, tp: int) -> None:
    """Gemma-3-12B's, 27B's and Qwen3.5-9B's numbers of layers, and some of each side of where vLLM makes larger groups.

    Blocks are as large as a state, which vLLM has all kinds of layers padded to.
    """
    length, window, step_tokens, numbers = 128_192, 1024, 16_384, 548_864
    a_token = FullAttentionSpec(block_size=1, **HEADS | {"num_kv_heads": 8 // tp}).page_size_bytes
    state: dict[str, Any] = {"shapes": ((numbers // tp,),), "dtypes": (torch.bfloat16,)}
    page = MambaSpec(block_size=length, **state).page_size_bytes if stateful else 1
    block = BLOCK * -(-page // (BLOCK * a_token))
    heads = HEADS | {"num_kv_heads": 8 // tp, "block_size": block}
    own: dict[str, KVCacheSpec] = {f"full.{i}": FullAttentionSpec(**heads) for i in range(full)}
    own |= {f"windowed.{i}": SlidingWindowSpec(**heads, sliding_window=window) for i in range(windowed)}
    own |= {
        f"stateful.{i}": MambaSpec(block_size=length, page_size_padded=block * a_token, **state)
        for i in range(stateful)
    }
    groups = _get_kv_cache_groups_uniform_page_size(own)
    assert len({group.kv_cache_spec.page_size_bytes for group in groups}) == 1
    a_block: int = max(len(group.layer_names) for group in groups) * groups[0].kv_cache_spec.page_size_bytes

    def taken(in_flight: int) -> int:
        n_blocks = 0
        for spec in (group.kv_cache_spec for group in groups):
            if isinstance(spec, SlidingWindowSpec):
                n_blocks += spec.max_admission_blocks_per_request(in_flight, length)
            elif isinstance(spec, MambaSpec):
                config: Any = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="none"))
                n_blocks += spec.max_num_blocks_per_req(config, length)
            else:
                n_blocks += -(-length // block)
        return a_block * n_blocks

    states = States(stateful, stateful, numbers) if stateful else States()
    use = cache_use(
        shape_with(full + windowed + stateful, Windows(window, windowed), states), tp, 2, length, step_tokens
    )
    assert (use.first, use.further) == (taken(STEPS_AT_ONCE * step_tokens), taken(1))


@pytest.mark.parametrize(
    ("family", "architecture", "changes"),
    [
        ("qwen3_next", "Qwen3NextForCausalLM", {}),
        ("qwen3_next", "Qwen3NextForCausalLM", {"mamba_ssm_dtype": "float32"}),  # as Qwen3.5's, which needs torchvision
        ("olmo_hybrid", "OlmoHybridForCausalLM", {}),
        ("nemotron_h", "NemotronHForCausalLM", {}),
        ("granitemoehybrid", "GraniteMoeHybridForCausalLM", {}),
        ("falcon_h1", "FalconH1ForCausalLM", {"mamba_d_ssm": 128 * 8}),
        ("kimi_linear", "KimiLinearForCausalLM", {"linear_attn_config": KIMI}),
        ("lfm2", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"] * 16, "conv_dim": 2048}),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_state_has_the_size_that_vllm_gives_it(
    family: str, architecture: str, changes: dict[str, Any], tp: int
) -> None:
    config = (KimiLinearConfig if family == "kimi_linear" else CONFIG_MAPPING[family])(**changes)
    own, _ = ModelRegistry.resolve_model_cls([architecture], SimpleNamespace(model_impl="vllm"))  # type: ignore[arg-type]
    off = {"use_replayssm": False, "use_kda_recoverssm": False}
    cache = SimpleNamespace(mamba_cache_dtype="auto", mamba_ssm_cache_dtype="auto", **off)
    vllm_config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
        model_config=SimpleNamespace(hf_config=config, hf_text_config=config, dtype=torch.bfloat16),
        cache_config=cache, speculative_config=None, num_speculative_tokens=0,
    )  # fmt: skip
    wide = changes.get("mamba_ssm_dtype") or getattr(config, "mamba_ssm_cache_dtype", None)
    cache.mamba_ssm_cache_dtype = wide or "auto"
    shapes = own.get_mamba_state_shape_from_config(vllm_config)  # type: ignore[attr-defined]
    dtypes = own.get_mamba_state_dtype_from_config(vllm_config)  # type: ignore[attr-defined]
    size = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    entries = config.to_dict()
    states = read_states(entries, config.model_type, len(entries.get("layers_block_type", ())) or 32)
    # Over GPUs vLLM repeats the groups of Mamba that these share.
    assert states.layer_bytes(2) / tp == (size if tp == 1 else pytest.approx(size, rel=0.01)) and states.n_layers
