"""Layers that keep a state are given whole sequences, whatever is laid beside them and whatever they begin with."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, MiniMaxConfig, MiniMaxForCausalLM, PreTrainedModel

from gkd.modeling.attention import IN_ROWS, NAME, list_windows, packed_attention_in_rows
from gkd.modeling.backbone import hidden_states, is_packed, pack_or_pad, takes_rows, use_padded_rows
from gkd.modeling.head import get_backbone
from gkd.modeling.layout import SequenceLayout
from gkd.modeling.rows import current_bounds
from gkd.modeling.sequences import PackedSequences
from gkd.modeling.states import find_state_layers, give_rows_to_state_layers
from tests.families import STATEFUL, make

LENGTHS, N_SHARED = (70, 12, 9, 30, 1), (6, 6, 0, 6, 0)
"""One is longer than the 64 tokens that linear attention computes at a time."""


def packed_model(family: str) -> PreTrainedModel:
    lm = make(family, 0)
    lm.set_attn_implementation(IN_ROWS)
    pack_or_pad(lm, "model.path")
    return lm


def sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    beginning = rng.integers(3, 90, max(N_SHARED))
    own = [rng.integers(3, 90, length) for length in LENGTHS]
    return [np.concatenate([beginning[:n], ids[n:]]).astype(np.int32) for n, ids in zip(N_SHARED, own, strict=True)]


def gradients(lm: PreTrainedModel, outputs: list[Tensor], slopes: list[Tensor]) -> dict[str, Tensor]:
    lm.zero_grad()
    sum(((out * slope).sum() for out, slope in zip(outputs, slopes, strict=True)), torch.zeros(())).backward()
    return {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", [*STATEFUL, "gpt_oss", "gemma2"])
def test_hidden_states_and_gradients_are_those_of_each_sequence_alone(family: str) -> None:
    lm, ids = packed_model(family), sequences()
    assert takes_rows(lm) and bool(find_state_layers(lm)) == (family in STATEFUL)
    layout = SequenceLayout(ids, N_SHARED)
    its = PackedSequences.from_layout(layout)
    assert len(its) == sum(LENGTHS) - 2 * max(N_SHARED)
    places = [torch.from_numpy(layout.locate(i, np.arange(len(row)))) for i, row in enumerate(ids)]
    slopes = [torch.randn(len(row), 64, generator=torch.Generator().manual_seed(i)) for i, row in enumerate(ids)]
    below = get_backbone(lm)
    with use_padded_rows(lm):
        alone = [below(torch.from_numpy(row)[None].long(), use_cache=False).last_hidden_state[0] for row in ids]
        expected = gradients(lm, alone, slopes)
    hidden = hidden_states(lm, its)
    outputs = [hidden[place] for place in places]
    for own, others in zip(outputs, alone, strict=True):
        torch.testing.assert_close(own, others, rtol=1e-4, atol=1e-5 * float(others.detach().abs().max()))
    found = gradients(lm, outputs, slopes)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=2e-5 * float(value.abs().max()), msg=name)


def test_a_copy_of_a_model_takes_rows_as_its_own_attention_says() -> None:
    lm = packed_model("qwen3_5")
    its = PackedSequences.from_layout(SequenceLayout(sequences(), N_SHARED))
    other = copy.deepcopy(lm)
    with torch.no_grad():
        expected = hidden_states(lm, its)
        lm.set_attn_implementation("eager")
        assert torch.equal(hidden_states(other, its), expected)


@torch.no_grad()
def test_a_model_decodes_with_its_states_between_two_passes() -> None:
    lm, plain = packed_model("qwen3_5"), make("qwen3_5", 0)
    its = PackedSequences.from_layout(SequenceLayout(sequences(), N_SHARED))
    before, prompt = hidden_states(lm, its), torch.arange(3, 12)[None]
    with use_padded_rows(lm):
        tokens = lm.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert torch.equal(tokens, plain.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None))
    assert torch.equal(hidden_states(lm, its), before)


@torch.no_grad()
def test_a_layer_without_its_sequences_fails() -> None:
    lm = packed_model("qwen3_5")
    with pytest.raises(ValueError, match="bounds"):
        lm(torch.arange(3, 12)[None], use_cache=False)


def minimax(dtype: torch.dtype) -> MiniMaxForCausalLM:
    torch.manual_seed(0)
    kinds = ["linear_attention", "full_attention"]
    shape = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    config = MiniMaxConfig(
        **shape, num_attention_heads=2, num_key_value_heads=2, num_local_experts=2, block_size=8, layer_types=kinds
    )
    config._attn_implementation = NAME
    return MiniMaxForCausalLM(config).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_is_not_found_is_not_carried_on(dtype: torch.dtype) -> None:
    """MiniMax's has no convolution before it; in bfloat16 logits of three short sequences are hardly off."""
    lm = minimax(dtype)
    pack_or_pad(lm, "model.path")
    assert not is_packed(lm)


@pytest.mark.parametrize("family", ["qwen3_5", "gpt_oss"])
def test_what_takes_rows_is_found_in_bfloat16_too(family: str) -> None:
    lm = make(family, 0).to(torch.bfloat16)
    lm.set_attn_implementation(NAME)
    pack_or_pad(lm, "model.path")
    assert lm.config._attn_implementation == IN_ROWS


def test_a_convolution_that_no_text_goes_through_changes_nothing() -> None:
    """As of what a model hears."""
    lm = make("llama", 0)
    lm.model.audio_tower = torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3))
    lm.set_attn_implementation(NAME)
    pack_or_pad(lm, "model.path")
    assert find_state_layers(lm) and not takes_rows(lm)


class Layer(torch.nn.Module):
    """Keeps a sum of the tokens before, and returns it by itself or beside something else."""

    def __init__(self, returns_more: bool) -> None:
        super().__init__()
        self.conv, self.returns_more = torch.nn.Conv1d(1, 1, 1), returns_more

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Any:
        assert mask is None
        sums = hidden_states.cumsum(1)
        return (sums, "more") if self.returns_more else sums


@pytest.mark.parametrize("returns_more", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_a_layer_is_given_rows_alone_and_what_it_returns_beside_them_is_kept(returns_more: bool, named: bool) -> None:
    """By position or by name; a mask would be one of tokens laid end to end."""
    lm: Any = make("llama", 0)
    lm.own = Layer(returns_more)
    lm.config._attn_implementation = IN_ROWS
    give_rows_to_state_layers(lm)
    its = PackedSequences.from_layout(SequenceLayout(sequences(), N_SHARED))
    x, mask = torch.ones(1, len(its), 1), torch.ones(1, len(its))
    with torch.no_grad(), current_bounds.use(its.bounds, len(its)):
        out = lm.own(hidden_states=x, mask=mask) if named else lm.own(x, mask)
    assert isinstance(out, tuple) == returns_more and (not returns_more or out[1:] == ("more",))
    sums = out[0] if returns_more else out
    assert torch.equal(sums[0, :, 0], its.position_ids + 1.0)


def test_trying_a_model_leaves_no_hook_behind_that_lists_its_layers() -> None:
    lm = packed_model("qwen3_5")
    (layer,) = find_state_layers(lm)
    assert len(layer._forward_hooks) == len(layer._forward_pre_hooks) == 1
    attend = AttentionInterface()[IN_ROWS]
    with list_windows(IN_ROWS) as windows:
        assert windows == [] and AttentionInterface()[IN_ROWS] is not attend
    assert AttentionInterface()[IN_ROWS] is attend is packed_attention_in_rows


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "lfm2"])
def test_a_state_that_hardly_shows_in_short_sequences_is_not_carried_on_either(family: str) -> None:
    """In bfloat16 its part of the logits is less than rounding."""
    lm = make(family, 0)
    for layer in find_state_layers(lm):
        layer.out_proj.weight.mul_(1e-3)
    lm = lm.to(torch.bfloat16)
    lm.set_attn_implementation(NAME)
    pack_or_pad(lm, "model.path")
    assert lm.config._attn_implementation == IN_ROWS


def test_a_convolution_that_no_text_goes_through_stands_for_no_state() -> None:
    """MiniMax's states are not found, and there would be as many convolutions as states."""
    lm = minimax(torch.bfloat16)
    lm.model.audio_tower = torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3))
    pack_or_pad(lm, "model.path")
    assert not is_packed(lm)
