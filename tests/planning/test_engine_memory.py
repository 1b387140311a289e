"""Memory of vLLM engines: the arithmetic by hand, and a real engine's tensors on a CPU within 15 %."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gkd.planning.engine_memory import engine_memory, kv_bytes, sequences_held
from tests.planning.subjects import subject

DISTIL = ("+recipe=on_policy_distill", "model.size=1.5b", "teacher.model.size=7b", "plan.card=a100-80gb")


def test_a_token_of_qwen_takes_28_kilobytes_of_cache() -> None:
    """28 layers x 2 key-value heads x 128 x 2 of keys and values x 2 bytes; by four GPUs a head is repeated."""
    shape = subject(*DISTIL).models.student
    assert kv_bytes(shape, 1, 2) == 28 * 2 * 128 * 2 * 2
    assert kv_bytes(shape, 2, 2) == kv_bytes(shape, 4, 2) == 28 * 1 * 128 * 2 * 2


def test_the_cache_is_what_the_share_of_the_card_leaves() -> None:
    s = subject(*DISTIL)
    found = engine_memory(s, "rollout", s.config.rollout)
    inside = ("weights", "activations of a step", "context, CUDA graphs", "key-value cache")
    assert sum(found.items[name] for name in inside) == pytest.approx(0.85 * s.card.memory)
    held = int(found.items["key-value cache"] // (kv_bytes(s.models.student, 1, 2) * 1280))
    assert f"holds {held:,} sequences of 1,280 tokens" in found.notes[0]
    assert sequences_held(s, "rollout", s.config.rollout) == s.config.rollout.max_num_seqs


def test_tensor_parallelism_divides_weights_and_must_divide_heads() -> None:
    s = subject(*DISTIL)
    one = engine_memory(s, "teacher", s.config.teacher)
    four = s.config.teacher.model_copy(update={"tensor_parallel_size": 4, "n_gpus_per_node": 4})
    assert engine_memory(s, "teacher", four).items["weights"] == one.items["weights"] / 4
    eight = s.config.teacher.model_copy(update={"tensor_parallel_size": 8, "n_gpus_per_node": 8})
    assert "does not divide 28 attention heads" in engine_memory(s, "teacher", eight).lack


def test_an_engine_without_room_for_one_sequence_does_not_fit() -> None:
    s = subject(*DISTIL)
    small = replace(s, card=replace(s.card, memory=20e9))
    assert engine_memory(small, "rollout", s.config.rollout).fits
    teacher = engine_memory(small, "teacher", s.config.teacher)
    assert not teacher.fits
    assert "short of one sequence's cache" in teacher.lack


@pytest.mark.vllm
def test_a_real_engine_holds_what_was_planned(tmp_path: Path) -> None:
    """The weights an engine on a CPU reads, its cache, and the sequences that vLLM's own blocks hold."""
    from gkd.vllm_engine import engine_arguments, environment

    os.environ.update(environment("cpu"))
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm import LLM

    LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=4096, max_position_embeddings=256,
        )
    ).save_pretrained(tmp_path)  # fmt: skip
    s = subject("+recipe=grpo", f"model.path={tmp_path}", "placement=cpu", "data.max_prompt_length=128",
                "rollout.max_response_length=128", on_cpu=True)  # fmt: skip
    planned = engine_memory(s, "rollout", s.config.rollout)
    llm = LLM(**engine_arguments(str(tmp_path), "cpu", s.config.rollout, dtype="float32", max_model_len=256))
    # Not of the engine's parameters: on a CPU vLLM packs the layers' matrices away from them.
    weights = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    config = llm.llm_engine.vllm_config
    tokens = config.cache_config.num_gpu_blocks * config.cache_config.block_size
    llm.llm_engine.engine_core.shutdown()
    assert planned.items["weights"] == pytest.approx(weights, rel=0.15)
    cache = tokens * kv_bytes(s.models.student, 1, 4)
    assert planned.items["key-value cache"] == pytest.approx(cache, rel=0.15)
    held = int(planned.notes[0].split("holds ")[1].split(" ")[0].replace(",", ""))
    assert held == pytest.approx(tokens / 256, rel=0.15)
