"""The variable-length kernel is called as each supported torch has it; here by stand-ins with its signatures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gkd.modeling import attention
from gkd.modeling.backbone import hidden_states, is_packed, pack_or_pad
from gkd.modeling.layout import SequenceLayout
from gkd.modeling.rows import Bounds, current_bounds
from gkd.modeling.sequences import PackedSequences
from tests.families import config_of, make

KEYS, QUERIES, SIZE = 2, 14, 16
BOUNDS = torch.tensor([0, 3, 10, 11], dtype=torch.int32)


def torch_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    return_aux: object = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """Causal attention with the arguments of torch 2.11, where groups of heads are implicit."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]  # the result has the queries' width
    assert max_q == max_k and len(key) == cu_seq_k[-1] and len(query) == cu_seq_q[-1]
    assert window_size[1] == 0
    window = None if window_size[0] < 0 else window_size[0] + 1
    q_bounds, k_bounds = (pairwise(bounds.tolist()) for bounds in (cu_seq_q, cu_seq_k))
    pairs = [(slice(*own), slice(*seen)) for own, seen in zip(q_bounds, k_bounds, strict=True)]
    return torch.cat(
        [by_hand(query[own], key[seen], value[seen], scale or query.shape[-1] ** -0.5, window) for own, seen in pairs]
    )


def torch_2_13(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    return_aux: object = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    """The same with those of torch 2.13, which refuses groups that are not announced."""
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    return torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


@pytest.mark.parametrize("kernel", [torch_2_11, torch_2_13])
@pytest.mark.parametrize("n_query", [KEYS, QUERIES])
@pytest.mark.parametrize("window", [None, 2, 6])  # of at most 7 tokens
def test_every_supported_torch_is_called_as_it_wants(
    kernel: Callable[..., Tensor], n_query: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=kernel))
    torch.manual_seed(0)
    q, k, v = (torch.randn(int(BOUNDS[-1]), heads, SIZE) for heads in (n_query, KEYS, KEYS))
    out = attention._variable_length(q, k, v, 0.3, window, Bounds(BOUNDS, BOUNDS, 7))
    for start, end in zip(BOUNDS[:-1].tolist(), BOUNDS[1:].tolist(), strict=True):
        expected = by_hand(q[start:end], k[start:end], v[start:end], 0.3, window)
        torch.testing.assert_close(out[start:end], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", [torch_2_11, torch_2_13])
def test_values_narrower_than_keys_come_out_as_wide_as_they_are(
    kernel: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in DeepSeek's multi-head latent attention, and so do their gradients."""
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=kernel))
    torch.manual_seed(0)
    q, k, v = (torch.randn(11, KEYS, size, requires_grad=True) for size in (24, 24, 16))
    out = attention._variable_length(q, k, v, 0.3, None, Bounds(BOUNDS, BOUNDS, 7))
    assert out.shape == (11, KEYS, 16)
    bounds = zip(BOUNDS[:-1].tolist(), BOUNDS[1:].tolist(), strict=True)
    expected = torch.cat([by_hand(q[a:b], k[a:b], v[a:b], 0.3, None) for a, b in bounds])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    slope = torch.randn_like(out)
    grads = (torch.autograd.grad(its, (q, k, v), slope) for its in (out, expected))
    for own, others in zip(*grads, strict=True):
        torch.testing.assert_close(own, others, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("size", [SIZE, 24])  # of keys; values have the former
def test_sequences_that_begin_alike_attend_to_one_copy_of_it(
    window: int | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel and by padding, forward and backward, as if each sequence had its own."""
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=torch_2_13))
    sequences = [np.concatenate([np.arange(4), [9] * n]).astype(np.int32) for n in (2, 5, 1)]
    layout = SequenceLayout([sequences[0], np.arange(7, 14, dtype=np.int32), *sequences[1:]], [4, 0, 4, 4])
    packed = PackedSequences.from_layout(layout)
    assert packed.cu_keys is not None and packed.key_index is not None
    bounds = packed.bounds
    torch.manual_seed(0)
    widths = ((QUERIES, size), (KEYS, size), (KEYS, SIZE))
    q, k, v = (torch.randn(len(packed), heads, width, requires_grad=True) for heads, width in widths)
    whole = [x[packed.key_index].split(packed.cu_keys.diff().tolist()) for x in (q, k, v)]
    rows = [by_hand(*own, 0.3, window) for own in zip(*whole, strict=True)]
    expected = torch.cat([row[-n:] for row, n in zip(rows, packed.cu_seqlens.diff().tolist(), strict=True)])
    transposed = (x.transpose(0, 1) for x in (q, k, v))
    padded = attention._attend_padded(next(transposed), next(transposed), next(transposed), 0.3, window, bounds)
    kernels = attention._variable_length(q, k, v, 0.3, window, bounds)
    slope = torch.randn_like(expected)
    theirs = torch.autograd.grad(expected, (q, k, v), slope)
    for out in (padded, kernels):
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        for own, others in zip(torch.autograd.grad(out, (q, k, v), slope), theirs, strict=True):
            torch.testing.assert_close(own, others, rtol=1e-4, atol=1e-5)


def first_query_at_the_first_key(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """As flash attention was before 2.1."""
    bounds = zip(*(pairwise(its.tolist()) for its in arguments[:2]), strict=True)
    return torch.cat(
        [by_hand(query[a:b], key[c:][: b - a], value[c:][: b - a], 0.125, None) for (a, b), (c, _) in bounds]
    )


def refused(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("FlashAttention needs an Ampere GPU")


@pytest.mark.parametrize(
    ("kernel", "shares"), [(torch_2_13, True), (first_query_at_the_first_key, False), (refused, False)]
)
def test_prompts_are_shared_where_the_kernel_is_found_to_take_them(
    kernel: Callable[..., Tensor], shares: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=kernel))
    measure = attention._measure_shared_error
    monkeypatch.setattr(attention, "_measure_shared_error", lambda _: measure("cpu"))
    attention.can_share_beginnings.cache_clear()
    try:
        assert attention.can_share_beginnings("cuda") == shares
    finally:
        attention.can_share_beginnings.cache_clear()
    assert len(caplog.messages) == (not shares)


def test_a_gpu_without_room_says_nothing_of_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(_: str) -> float:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(attention, "_measure_shared_error", fill)
    attention.can_share_beginnings.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        attention.can_share_beginnings("cuda")


def a_model() -> LlamaForCausalLM:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=40, attn_implementation=attention.NAME)).eval()


def test_a_model_whose_kernel_does_not_take_a_beginning_in_common_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(q: Tensor, k: Tensor, v: Tensor, scale: Any, window: Any, bounds: Bounds) -> Tensor:
        return attend(q, k, v, scale, window, Bounds(bounds.tokens, bounds.tokens, bounds.longest))

    model, attend = a_model(), attention._attend_padded
    monkeypatch.setattr(attention, "_attend_padded", drop)
    pack_or_pad(model, "model.path")
    assert not is_packed(model)


def test_bounds_are_those_of_the_pass_that_is_going_on() -> None:
    first, second = Bounds(BOUNDS, BOUNDS, 7), Bounds(BOUNDS, BOUNDS, 8)
    with current_bounds.use(first, 11), torch.no_grad():
        with current_bounds.use(second, 12):
            assert current_bounds.get(12) is second
        assert current_bounds.get(11) is first
    assert current_bounds.get() is first  # for what is computed once more in its backward pass


def test_attention_that_is_not_plain_is_its_familys_own_and_has_no_further_mask() -> None:
    """Also of a class that was derived from it elsewhere, as sharding does."""
    model = make("gemma2", 0)
    layer = model.model.layers[0].self_attn
    layer.__class__ = type("Sharded", (type(layer),), {"__module__": __name__})
    q, k, v = torch.randn(1, 2, 11, 32), torch.randn(1, 1, 11, 32), torch.randn(1, 1, 11, 32)
    with current_bounds.use(Bounds(BOUNDS, BOUNDS, 7), 11):
        capped, _ = attention.packed_attention_in_rows(layer, q, k, v, None, scaling=1.0, softcap=0.5)
        plain, _ = attention.packed_attention_in_rows(layer, q, k, v, None, scaling=1.0)
        with pytest.raises(ValueError, match="softcap"):
            attention.packed_attention_in_rows(layer, q, k, v, torch.zeros(11, 11), scaling=1.0, softcap=0.5)
        with pytest.raises(ValueError, match="position_bias"):
            attention.packed_attention_in_rows(layer, q, k, v, None, softcap=0.5, position_bias=torch.zeros(11, 11))
    rows = [slice(a, b) for a, b in pairwise(BOUNDS.tolist())]
    for own in rows:
        scores = 0.5 * torch.tanh(q[0, :, own] @ k[0, :, own].transpose(1, 2) / 0.5)
        seen = torch.ones_like(scores, dtype=torch.bool).tril()
        expected = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v[0, :, own]
        torch.testing.assert_close(capped[0, own].transpose(0, 1), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(capped, plain, atol=1e-2)


def test_a_mask_of_the_models_own_is_refused_and_not_left_out() -> None:
    q, k, v = (torch.randn(1, KEYS, 11, SIZE) for _ in range(3))
    with current_bounds.use(Bounds(BOUNDS, BOUNDS, 7), 11):
        attention.packed_attention(torch.nn.Identity(), q, k, v, None)
        with pytest.raises(ValueError, match="attention_mask"):
            attention.packed_attention(torch.nn.Identity(), q, k, v, torch.zeros(1, 1, 11, 11))


def test_the_kernel_is_not_given_heads_that_it_does_not_have() -> None:
    def taken(size: int, value: int) -> bool:
        return attention.kernel_takes(torch.empty(1, 2, 3, size), torch.empty(1, 2, 3, value))

    assert [size for size in (16, 64, 80, 100, 128, 256, 264, 512) if taken(size, size)] == [16, 64, 80, 128, 256]
    assert taken(192, 128) and not taken(128, 192)


@pytest.mark.parametrize(
    ("error", "packs"),
    [
        (RuntimeError("FlashAttention: head dimension at most 256"), False),
        (KeyError("of a family's own code"), False),
        (None, True),
    ],
)
def test_a_model_whose_kernel_refuses_its_shapes_is_padded(
    error: Exception | None, packs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=40, attn_implementation=attention.NAME)
    model = LlamaForCausalLM(config)

    def refuse(*_: object) -> Tensor:
        raise error or AssertionError

    if error is not None:
        monkeypatch.setattr(attention, "_attend_padded", refuse)
    caplog.set_level("INFO", "gkd")
    pack_or_pad(model, "model.path")
    assert is_packed(model) == packs and len(caplog.messages) == (not packs)
    error = torch.OutOfMemoryError("out of memory")  # which says nothing of the model
    monkeypatch.setattr(attention, "_attend_padded", refuse)
    model.set_attn_implementation(attention.NAME)
    with pytest.raises(torch.OutOfMemoryError):
        pack_or_pad(model, "model.path")


def test_a_model_whose_kernel_gives_no_numbers_is_padded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=40, attn_implementation=attention.NAME))
    attend = attention._attend_padded
    monkeypatch.setattr(attention, "_attend_padded", lambda *arguments: attend(*arguments) * torch.nan)
    caplog.set_level("INFO", "gkd")
    pack_or_pad(model, "model.path")
    assert not is_packed(model) and len(caplog.messages) == 1


def test_a_model_that_the_cpu_cannot_try_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of how it packs where its own kernels are there for GPUs alone."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=40, attn_implementation=attention.NAME))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel for a CPU")

    monkeypatch.setattr(model, "forward", fail)
    pack_or_pad(model, "model.path", torch.device("cuda"))
    assert not is_packed(model)


def by_hand(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention of one sequence, head by head, the last query at the last key."""
    steps = torch.arange(len(k))
    behind = steps[-len(q) :, None] - steps
    seen = (behind >= 0) & (behind < (window or len(k)))
    group = q.shape[1] // k.shape[1]
    heads = []
    for head in range(q.shape[1]):
        scores = scale * q[:, head] @ k[:, head // group].T
        heads.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v[:, head // group])
    return torch.stack(heads, dim=1)


@pytest.mark.parametrize(("family", "packs"), [("phimoe", False), ("qwen2_moe", False), ("mistral", True)])
def test_a_window_that_only_the_mask_knows_is_kept(family: str, packs: bool) -> None:
    """Packed attention makes no mask, and is told the window by the layers of most families."""
    config = config_of(family)
    config.sliding_window, length = 8, 20
    if getattr(config, "layer_types", None):
        config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).float().eval()
    pack_or_pad(model, "model.path")
    assert is_packed(model) == packs
    ids, bounds = torch.arange(length) + 1, torch.tensor([0, length], dtype=torch.int32)
    with torch.no_grad():
        ours = hidden_states(model, PackedSequences(ids, torch.arange(length), bounds, length))
        model.set_attn_implementation("eager")
        theirs = model.model(ids[None], use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_layer_with_attention_of_its_own_is_padded_though_it_hardly_shows() -> None:
    """It would look at other sequences, which a short trial in bfloat16 cannot tell from rounding."""

    def look_at_all(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return 1e-3 * hidden_states.cumsum(1), None

    model = a_model().to(torch.bfloat16)
    model.model.layers[1].self_attn.forward = look_at_all
    pack_or_pad(model, "model.path")
    assert not is_packed(model)


def test_gradients_of_keys_in_common_are_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300 sequences that begin with one token: in bfloat16 a sum of ones would stay at 256."""
    kernel = SimpleNamespace(varlen_attn=lambda query, key, value, *_, **__: key + value)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", kernel)
    n, index = 300, torch.tensor([i for own in range(1, 301) for i in (0, own)])
    starts, ends = (torch.tensor(its, dtype=torch.int32) for its in ([0, *range(2, n + 2)], range(0, 2 * n + 1, 2)))
    k, v = (torch.zeros(n + 1, 1, 1, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    attention._variable_length(k, k, v, None, None, Bounds(starts, ends, 2, index)).sum().backward()
    for value in (k, v):
        assert value.grad is not None and value.grad.flatten().tolist() == [300.0, *[1.0] * n]


def test_in_float32_a_model_is_padded_that_is_off_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """By less than bfloat16 would be."""
    model, attend = a_model(), attention._attend_padded
    monkeypatch.setattr(attention, "_attend_padded", lambda *arguments: 1.1 * attend(*arguments))
    pack_or_pad(model, "model.path")
    assert not is_packed(model)
