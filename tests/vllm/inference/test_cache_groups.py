"""What a sequence takes of the cache, as it is planned, against vLLM's own groups of layers and sizes of states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator as TYPES
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as STATES
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

from gkd.planning.memory.cache import BLOCK, STEPS_AT_ONCE, cache_use
from gkd.planning.shapes import ModelShape, shape_of
from gkd.planning.states import States, read_states
from gkd.planning.windows import Windows

HEADS = {"num_kv_heads": 8, "head_size": 256, "dtype": torch.bfloat16}
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


def size_of_delta_net(config: Any, tp: int) -> tuple[Any, Any]:
    shape = STATES.gated_delta_net_state_shape(
        tp, config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim,
        config.linear_value_head_dim, config.linear_conv_kernel_dim,
    )  # fmt: skip
    return shape, TYPES.gated_delta_net_state_dtype(torch.bfloat16, "auto", getattr(config, "mamba_ssm_dtype", "auto"))


def size_of_mamba2(config: Any, tp: int) -> tuple[Any, Any]:
    names = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
    if config.model_type != "nemotron_h":
        names = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
    n_heads, head, state, n_groups, kernel = (getattr(config, name) for name in names)
    shape = STATES.mamba2_state_shape(tp, n_heads * head, n_groups, n_heads, head, state, kernel)
    wide = getattr(config, "mamba_ssm_cache_dtype", "auto")
    return shape, TYPES.mamba2_state_dtype(torch.bfloat16, "auto", wide)


def size_of_kimi(config: Any, tp: int) -> tuple[Any, Any]:
    shape = STATES.kda_state_shape(
        tp, config.linear_num_heads, config.linear_head_dim, conv_kernel_size=config.linear_conv_kernel_dim
    )
    return shape, TYPES.kda_state_dtype(torch.bfloat16, "auto")


def size_of_convolution(config: Any, tp: int) -> tuple[Any, Any]:
    shape = STATES.short_conv_state_shape(tp, config.hidden_size, config.conv_L_cache)
    return shape, TYPES.short_conv_state_dtype(torch.bfloat16, "auto")


@pytest.mark.parametrize(
    ("family", "size", "changes"),
    [
        ("qwen3_next", size_of_delta_net, {}),
        ("qwen3_5_text", size_of_delta_net, {"mamba_ssm_dtype": "float32"}),
        ("olmo_hybrid", size_of_delta_net, {}),
        ("nemotron_h", size_of_mamba2, {}),
        ("granitemoehybrid", size_of_mamba2, {}),
        ("falcon_h1", size_of_mamba2, {}),
        ("kimi_linear", size_of_kimi, {}),
        ("lfm2", size_of_convolution, {"layer_types": ["conv", "full_attention"] * 16}),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_state_has_the_size_that_vllm_gives_it(
    family: str, size: Callable[[Any, int], tuple[Any, Any]], changes: dict[str, Any], tp: int
) -> None:
    """By its own sums, with the arguments that its models give: these load what its engines do not start beside."""
    config = CONFIG_MAPPING[family](**changes)
    shapes, dtypes = size(config, tp)
    expected = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    entries = config.to_dict()
    states = read_states(entries, config.model_type, len(entries.get("layers_block_type", ())) or 32)
    # Over GPUs vLLM repeats the groups of Mamba that these share.
    assert states.layer_bytes(2) / tp == (expected if tp == 1 else pytest.approx(expected, rel=0.01))
    assert states.n_layers
