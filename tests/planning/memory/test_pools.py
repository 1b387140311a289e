"""Memory of vLLM engines: the arithmetic by hand. A real one is compared in tests/vllm/inference/test_engines.py."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gkd.errors import ConfigError
from gkd.planning.advice.advise import plan_sizes
from gkd.planning.layout import cpu_hardware, engine_class
from gkd.planning.memory.actor import MicroBatchSize
from gkd.planning.memory.cache import cache_use, find_width_obstacle, kv_bytes
from gkd.planning.memory.pools import (
    COLLECTIVES,
    cache_gb_of,
    count_concurrent_sequences,
    largest_micro_batch,
    pool_memory,
    slots_of,
)
from gkd.planning.memory.push import count_received_bytes
from gkd.planning.shapes import shape_of
from tests.error_text import contains_in_order
from tests.own.random_tokens import RandomTokens
from tests.planning.layouts import QWEN3_30B, layout_of, layout_with

DISTIL = ("+recipe=on_policy_distill", "model.size=1.5b", "teacher.model.size=7b", "plan.gpu_type=a100-80gb")


def test_a_scorers_class_is_asked_what_its_steps_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    s = layout_of(*DISTIL, "teacher.engine=torch")
    activations = pool_memory(s, "teacher", s.config.teacher).items["activations"]
    monkeypatch.setattr(engine_class(s.config.teacher, s.models.shape_of("teacher")), "logit_bytes", {"cuda": 4 << 30})
    assert pool_memory(s, "teacher", s.config.teacher).items["activations"] > activations


def test_an_engine_of_ones_own_is_counted_with_one_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 16,384 tokens of the larger of attention and feed-forward part, in bfloat16, and the weights."""
    long = ("rollout.max_response_length=8192", "plan.gpu_type=h100-80gb")
    s = layout_of("+recipe=grpo", "model.size=7b", *long, "rollout.engine=tests.own.random_tokens:RandomTokens")
    items, shape = pool_memory(s, "rollout", s.config.rollout).items, s.models.student
    a_token = 2 * max(4 * shape.hidden + 3 * shape.widest_mlp, 10 * shape.hidden)
    assert items["activations"] == 16_384 * a_token
    assert items["weights"] == 2 * shape.n_parameters
    monkeypatch.setattr(engine_class(s.config.rollout, shape), "pass_tokens", {"cuda": 1024})
    longest = s.workload.longest  # a sequence is never divided
    assert pool_memory(s, "rollout", s.config.rollout).items["activations"] == longest * a_token


def test_a_token_of_qwen_takes_28_kilobytes_of_cache() -> None:
    """28 layers x 2 key-value heads x 128 x 2 of keys and values x 2 bytes; by four GPUs a head is repeated."""
    shape = layout_of(*DISTIL).models.student
    assert kv_bytes(shape, 1, 2) == 28 * 2 * 128 * 2 * 2
    assert kv_bytes(shape, 2, 2) == kv_bytes(shape, 4, 2) == 28 * 1 * 128 * 2 * 2


GEMMA3_12B = {
    "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 262208, "sliding_window": 1024,
}  # fmt: skip
LONG = ("+recipe=grpo", "model.size=14b", "plan.gpu_type=h100-80gb", "data.max_prompt_length=120000",
        "rollout.max_response_length=8192")  # fmt: skip


def test_layers_with_a_window_cache_the_window() -> None:
    """By hand: 8 layers cache 8,192 bytes a token, 40 of a window of 1,024 that of 65 blocks, in 5 groups of 8.

    Beside one sequence whose prompt is in two steps of 16,384 tokens, the others are what they are by then.
    """
    s = layout_with(GEMMA3_12B, *LONG)
    memory = pool_memory(s, "rollout", s.config.rollout)
    a_block = 8 * 16 * 8192
    later = a_block * (128_192 // 16 + 5 * 65)
    first = a_block * (128_192 // 16 + 5 * (-(-(1023 + 2 * 16_384) // 16) + 1))
    held = 1 + int((memory.items["key-value cache"] - first) // later)
    assert memory.fits and held > 1
    assert f"holds {held:,} sequences" in memory.notes[0]
    less = s.config.rollout.model_copy(update={"kv_cache_gb": 18})
    lacking = f"{(first - 18 * 2**30) / 1e9:.1f} GB"
    assert contains_in_order(pool_memory(s, "rollout", less).shortage, lacking, "one sequence")
    short = layout_with(GEMMA3_12B, *LONG[:3])  # of texts that windows do not pass over, all is cached
    assert short.workload.longest == 1280
    use = cache_use(short.models.student, 1, 2, 1280, 8192)
    assert use.first == 48 * 8192 * 1280 > use.further == a_block * (80 + 5 * 65)


def test_a_sampler_of_transformers_keeps_windows_too() -> None:
    s = layout_with(GEMMA3_12B, *LONG, "rollout.engine=hf")
    items = pool_memory(s, "rollout", s.config.rollout).items
    assert items["key-value cache"] == pytest.approx(128 * 8192 * (8 * 128_192 + 40 * 1024), rel=1e-4)


def test_latent_attention_caches_a_vector_that_no_gpu_has_a_part_of() -> None:
    """DeepSeek-V2-Lite: 27 layers of 512 + 64 numbers of 2 bytes."""
    deepseek = {
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
        "num_attention_heads": 16, "vocab_size": 102400, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    }  # fmt: skip
    assert kv_bytes(shape_of(deepseek), 1, 2) == kv_bytes(shape_of(deepseek), 4, 2) == 27 * 576 * 2


def test_the_cache_is_what_the_share_of_the_gpu_leaves() -> None:
    s = layout_of(*DISTIL)
    memory = pool_memory(s, "rollout", s.config.rollout)
    inside = ("weights", "activations of a step", "context, CUDA graphs", "key-value cache")
    assert sum(memory.items[name] for name in inside) == pytest.approx(0.85 * s.hardware.memory)
    held = int(memory.items["key-value cache"] // (kv_bytes(s.models.student, 1, 2) * 1280))
    assert f"holds {held:,} sequences of 1,280 tokens" in memory.notes[0]
    assert count_concurrent_sequences(s, "rollout", s.config.rollout) == 128


@pytest.mark.parametrize(
    "counted",
    [None, 3, [("weights", 1.0)], {"weights": None}, {"weights": "1"}, {"a": -1.0}, {"a": math.nan}, {1: 1.0}],
)
def test_an_engine_that_counts_no_bytes_is_refused(counted: object, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tests.own.random_tokens:RandomTokens"
    s = layout_of("+recipe=grpo", "model.size=7b", f"rollout.engine={name}")
    monkeypatch.setattr(RandomTokens, "memory", lambda load: counted)
    with pytest.raises(ConfigError, match=r"^rollout.engine: RandomTokens.memory\(\)"):
        pool_memory(s, "rollout", s.config.rollout)
    monkeypatch.setattr(RandomTokens, "memory", lambda load: {"weights": np.float32(2e9)})
    assert pool_memory(s, "rollout", s.config.rollout).items["weights"] == 2e9


def test_an_engine_samples_what_its_cache_holds_of_what_the_schedule_asks_for() -> None:
    """By hand: 0.85 of the GPU without weights, context, graphs and the largest step, in sequences of mean length."""
    large, length = (*DISTIL, "trainer.batch_size=4096"), 1280
    s = layout_of(*large)
    assert s.workload.length == length and s.hardware.memory == pytest.approx(79.1 * 2**30)
    assert slots_of(s, "rollout", s.config.rollout) == 1024  # vLLM's own limit; its cache holds more
    assert count_concurrent_sequences(s, "rollout", s.config.rollout) == 1024
    shape, engine = s.models.student, s.config.rollout
    small = replace(s, hardware=replace(s.hardware, memory=12e9))
    width = max(layers.width for layers in shape.layers)
    used_bytes = 2 * shape.n_parameters + 1.1 * 2**30 + 8192 * 2 * (3 * shape.hidden + 3 * width)
    left = 0.85 * 12e9 - used_bytes - 256 * shape.vocabulary * (2 + 2 * 4)
    held = slots_of(small, "rollout", engine)
    assert held == int(left // (kv_bytes(shape, 1, 2) * length)) < 256
    memory = pool_memory(small, "rollout", engine)
    assert f"max_num_seqs={held}" in memory.notes[0]
    assert memory.items["key-value cache"] >= held * kv_bytes(shape, 1, 2) * length
    for overrides, slots in (
        ((), 128), (("schedule.max_staleness=2",), 192), (("rollout.n=8",), 512), (("rollout.max_num_seqs=7",), 7),
        (("rollout.n=8", "rollout.n_gpus_per_node=2"), 256), (("rollout.n=8", "rollout.engine=hf"), 128),
    ):  # fmt: skip
        layout = layout_of(*DISTIL, *overrides)
        assert slots_of(layout, "rollout", layout.config.rollout) == slots, overrides
    on_cpu = layout_of(*DISTIL, "rollout.n=8", on_cpu=True)
    assert slots_of(on_cpu, "rollout", on_cpu.config.rollout) == 128
    longer = layout_of(*large, "rollout.max_response_length=30000")  # at most, and nobody knows at mean
    assert slots_of(replace(longer, hardware=small.hardware), "rollout", longer.config.rollout) == 128
    config, models = s.config, s.models
    planned = plan_sizes(config, models, {"actor": 80e9, "rollout": 12e9})
    assert planned == {
        "rollout.max_num_seqs": held, "rollout.kv_cache_gb": None, "actor.max_tokens_per_micro_batch": 8192
    }  # fmt: skip
    for sizes in (None, {"actor": 80e9}):  # on CPUs, and where the engines' GPUs say nothing of their memory
        assert plan_sizes(config, models, sizes)["rollout.max_num_seqs"] == 128


def test_a_small_models_cache_is_twice_what_its_sequences_fill() -> None:
    """By hand: of 128 sequences, twice, in whole GiB; more than that would be millions of blocks of 16 tokens."""
    s = layout_of("+recipe=grpo", "model.size=0.5b", "trainer.batch_size=16", "rollout.n=8", "plan.gpu_type=h200")
    shape, engine, longest = s.models.student, s.config.rollout, s.workload.longest
    a_token = 2 * 24 * 2 * 64 * 2
    assert kv_bytes(shape, 1, 2) == a_token and longest % 16 == 0
    gb = -(-2 * 128 * longest * a_token // 2**30)
    assert cache_gb_of(s, "rollout", engine) == gb < 8
    planned = engine.model_copy(update={"kv_cache_gb": gb})
    items = pool_memory(s, "rollout", planned).items
    assert items["key-value cache"] == gb * 2**30
    assert sum(items.values()) == pytest.approx(sum(pool_memory(s, "rollout", engine).items.values()))
    assert count_concurrent_sequences(s, "rollout", planned) == slots_of(s, "rollout", planned) == 128
    assert plan_sizes(s.config, s.models, {"rollout": 139e9})["rollout.kv_cache_gb"] == gb
    assert cache_gb_of(s, "rollout", engine.model_copy(update={"kv_cache_gb": 30})) == 30
    estimated = replace(s, models=replace(s.models, student=replace(shape, is_exact=False)))
    assert cache_gb_of(estimated, "rollout", engine) is None  # it may be more
    small = engine.model_copy(update={"gpu_memory_utilization": 0.05})  # leaves less than that
    assert cache_gb_of(s, "rollout", small) is None


def test_tensor_parallelism_divides_weights_and_must_divide_heads() -> None:
    s = layout_of(*DISTIL)
    one = pool_memory(s, "teacher", s.config.teacher)
    four = s.config.teacher.model_copy(update={"tensor_parallel_size": 4, "n_gpus_per_node": 4})
    assert pool_memory(s, "teacher", four).items["weights"] == one.items["weights"] / 4
    eight = s.config.teacher.model_copy(update={"tensor_parallel_size": 8, "n_gpus_per_node": 8})
    assert contains_in_order(pool_memory(s, "teacher", eight).shortage, "8", "28 attention heads")


PHI4 = {
    "model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40,
    "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "width", "lacking"),
    [
        (PHI4, 1, ""), (PHI4, 2, ""), (PHI4, 3, "40"), (PHI4, 4, "10"), (PHI4, 5, "100352"), (PHI4, 20, "100352"),
        (PHI4 | {"vocab_size": 100_351}, 2, ""), (PHI4 | {"vocab_size": 320}, 20, ""),
        (PHI4 | {"intermediate_size": 17919}, 2, "17919"),
        (PHI4 | {"kv_lora_rank": 512}, 4, ""),
        (QWEN3_30B, 8, ""), (QWEN3_30B | {"moe_intermediate_size": 767}, 8, ""),
    ],
)  # fmt: skip
def test_an_engine_is_as_wide_as_vllm_divides_a_model(config: dict[str, Any], width: int, lacking: str) -> None:
    """Heads, the feed-forward part and rows of the vocabulary evenly; of key-value heads each GPU has some or one."""
    assert contains_in_order(obstacle := find_width_obstacle(shape_of(config), width), lacking)
    assert bool(obstacle) == bool(lacking)
    s = layout_with(config, "+recipe=grpo", "model.size=14b", "plan.gpu_type=h200")
    pool = s.config.rollout.model_copy(update={"tensor_parallel_size": width, "n_gpus_per_node": width})
    assert pool_memory(s, "rollout", pool).shortage == obstacle
    assert pool_memory(replace(s, hardware=cpu_hardware(s.config.plan)), "rollout", pool).shortage == obstacle


def test_of_four_bit_weights_a_matrix_of_a_layer_is_expanded_at_a_time() -> None:
    """Beside embeddings and head, which are not of 4 bits; by hand, in bfloat16."""
    quantized = ("actor.lora.r=16", "actor.lora.quantize=nf4", "actor.gradient_checkpointing=true")
    s = layout_of("+recipe=grpo", "model.size=7b", "plan.gpu_type=rtx-4090", "trainer.n_gpus_per_node=2", *quantized)
    items = pool_memory(s, "actor", s.config.trainer).items
    assert items["gathered weights"] == 2 * (2 * 152_064 * 3584 + 3584 + 18_944 * 3584)


def test_ranks_of_a_group_over_nccl_have_its_buffers() -> None:
    """Of the actor and its engines where weights go from GPU to GPU of their own, and of an engine of two GPUs."""
    apart, shared, by_host = (
        layout_of("+recipe=grpo", "model.size=1.5b", "plan.gpu_type=h100-80gb", "rollout.engine=vllm", *more)
        for more in ((), ("placement=single_gpu",), ("weights.transfer=object_store",))
    )
    with_buffers, *without = (
        pool_memory(s, "actor", s.config.trainer).items["context, collectives"] for s in (apart, shared, by_host)
    )
    assert [with_buffers - one for one in without] == pytest.approx([COLLECTIVES, COLLECTIVES])
    for s, more in ((apart, COLLECTIVES), (shared, 0), (by_host, 0)):
        memory = pool_memory(s, "rollout", s.config.rollout)
        assert memory.items["weights being received"] == count_received_bytes(s, 1) + more
    over_two = apart.config.rollout.model_copy(update={"tensor_parallel_size": 2, "n_gpus_per_node": 2})
    assert pool_memory(apart, "rollout", over_two).items["collectives"] == COLLECTIVES
    assert "collectives" not in pool_memory(apart, "rollout", apart.config.rollout).items


def test_an_engine_without_room_for_one_sequence_does_not_fit() -> None:
    s = layout_of(*DISTIL, "teacher.engine=vllm")
    small = replace(s, hardware=replace(s.hardware, memory=20e9))
    assert pool_memory(small, "rollout", s.config.rollout).fits
    teacher = pool_memory(small, "teacher", s.config.teacher)
    assert not teacher.fits
    assert re.search(r"\bone sequence's cache\b", teacher.shortage)


def test_the_top_k_of_a_step_is_planned_as_the_engine_caps_it() -> None:
    """Ids of 8 bytes and values of 4, twice; a large K has smaller steps, but of a token of each sequence at least."""
    from gkd.data.model_info import ModelInfo
    from gkd.inference.engine import EngineSpec
    from gkd.inference.vllm_scorer import ROW_BYTES, scoring_arguments

    whole = 152_064
    for k, n_seqs, tokens in (
        (512, 32, None), (32_768, 32, ROW_BYTES // (24 * 32_769)), (whole, 32, 588), (whole, 1024, 1024)
    ):  # fmt: skip
        s = layout_of(*DISTIL, f"data.val_top_k={k}", f"teacher.max_num_seqs={n_seqs}", "teacher.engine=vllm")
        settings = s.config.teacher.model_copy(update={"max_top_k": k})
        arguments = scoring_arguments(
            EngineSpec("teacher", "teacher", ModelInfo(whole, None, [1], 0), settings, "cuda", "bfloat16")
        )
        assert arguments.get("max_num_batched_tokens") == tokens
        planned = pool_memory(s, "teacher", s.config.teacher).items["top K of prompt rows"]
        assert planned == pytest.approx(24 * (k + 1) * (tokens or 16_384), rel=1e-3)
    with_reference = ("+recipe=grpo", "model.size=1.5b", "plan.gpu_type=a100-80gb", "algorithm.kl.coef=0.1")
    reference = layout_of(*with_reference, "reference.engine=vllm")
    top_k_rows = pool_memory(reference, "reference", reference.config.reference).items["top K of prompt rows"]
    assert top_k_rows == 24 * 16_384


def test_quantized_weights_are_counted_by_their_bits() -> None:
    plain, half, quarter = (
        pool_memory(s, "teacher", s.config.teacher).items["weights"]
        for s in (
            layout_of(*DISTIL, "teacher.engine=vllm", *more)
            for more in ((), ("teacher.quantization=fp8",), ("teacher.quantization=mxfp4",))
        )
    )
    shape = layout_of(*DISTIL).models.shape_of("teacher")
    embeddings = shape.n_parameters - sum(kind.count * w.size for kind in shape.layers for w in kind.weights)
    assert half == pytest.approx(plain / 2 + embeddings, rel=1e-3)
    assert quarter == pytest.approx(plain / 4 + 1.5 * embeddings, rel=1e-3)


@pytest.mark.parametrize(
    ("batch", "settings", "expected"),
    [
        # One prompt of 500 tokens with eight responses of 200 is all there is: 2,100 tokens, 5,600 keys.
        (1, (), MicroBatchSize(2100, 1600, alone=True, more_keys=3500)),
        (1, ("actor.share_prompts=false",), MicroBatchSize(5600, 1600, alone=True)),
        (1, ("actor.compile=auto",), MicroBatchSize(4096, 1600, alone=True, more_keys=3500)),  # padded
        # Three prompts are 6,300 tokens of 16,800 keys, and micro-batches have 16,384 at most, or 17,600.
        (3, (), MicroBatchSize(6300, 4800, more_keys=16384 - 6300)),
        (3, ("actor.max_tokens_per_micro_batch=8800",), MicroBatchSize(6300, 4800, alone=True, more_keys=10500)),
        (9, (), MicroBatchSize(8192, 6242, more_keys=8192)),
    ],
)
def test_a_batch_that_one_micro_batch_holds_has_each_prompt_once(
    batch: int, settings: tuple[str, ...], expected: MicroBatchSize
) -> None:
    s = layout_of(
        "+recipe=grpo", "model.size=0.5b", "plan.gpu_type=h100-80gb", f"trainer.batch_size={batch}", "rollout.n=8",
        "plan.prompt_length=500", "plan.response_length=200", "actor.compile=false", *settings,
    )  # fmt: skip
    assert largest_micro_batch(s, 1) == expected
