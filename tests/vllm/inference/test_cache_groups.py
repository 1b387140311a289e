"""What a sequence takes of the cache, as it is planned, against vLLM's own groups of layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from gkd.planning.memory.cache import BLOCK, STEPS_AT_ONCE, cache_use
from gkd.planning.shapes import shape_of
from gkd.planning.windows import Windows


@pytest.mark.parametrize(("full", "windowed"), [(8, 40), (10, 52), (13, 13), (13, 12), (2, 3), (4, 5), (1, 0), (0, 3)])
def test_a_sequence_takes_the_blocks_that_vllm_asks_for(full: int, windowed: int) -> None:
    """Gemma-3-12B's and 27B's numbers of layers, and some of each side of where vLLM makes larger groups."""
    length, window, step_tokens = 128_192, 1024, 16_384
    heads = {"block_size": BLOCK, "num_kv_heads": 8, "head_size": 256, "dtype": torch.bfloat16}
    own: dict[str, KVCacheSpec] = {f"full.{i}": FullAttentionSpec(**heads) for i in range(full)}
    own |= {f"windowed.{i}": SlidingWindowSpec(**heads, sliding_window=window) for i in range(windowed)}
    groups = _get_kv_cache_groups_uniform_page_size(own)
    a_block: int = max(len(group.layer_names) for group in groups) * groups[0].kv_cache_spec.page_size_bytes

    def taken(in_flight: int) -> int:
        n_blocks: int = sum(
            group.kv_cache_spec.max_admission_blocks_per_request(in_flight, length)
            if isinstance(group.kv_cache_spec, SlidingWindowSpec)
            else length // BLOCK
            for group in groups
        )
        return a_block * n_blocks

    shape = shape_of(
        {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": full + windowed, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 64}
    )  # fmt: skip
    use = cache_use(replace(shape, windows=Windows(window, windowed)), 1, 2, length, step_tokens)
    assert (use.first, use.further) == (taken(STEPS_AT_ONCE * step_tokens), taken(1))
