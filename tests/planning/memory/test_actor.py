"""The estimate of the actor's memory against the peak of tensor bytes in real updates, within 15 %."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from gkd.actor.collate import collate
from gkd.actor.compute_copies import ComputeCopies
from gkd.actor.model import shard
from gkd.config import Config, load
from gkd.losses.divergence import BLOCK_GPU
from gkd.losses.objective import objective
from gkd.planning.memory.actor import (
    MicroBatchSize,
    Training,
    adapter_weights,
    checkpoint_bytes,
    logit_bytes,
    peak_items,
    saved_activations,
)
from gkd.planning.memory.colocation import memory_of
from gkd.planning.shapes import shape_of
from tests.planning.layouts import layout_of
from tests.planning.measure import peak_of_update, samples, student_of
from tests.planning.tensor_bytes import TensorBytes

LENGTH, RESPONSE, N = 128, 96, 4
WIDE = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 4096,
}  # fmt: skip
DEEP = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 512,
}  # fmt: skip
MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**DEEP),
    "qwen2 tied": Qwen2Config(**WIDE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**DEEP, head_dim=32),
    "gpt2": GPT2Config(n_embd=128, n_layer=6, n_head=4, vocab_size=512),
}
GRPO = {"name": "grpo"}
TOP_K = {"name": "on_policy_distill", "loss": {"name": "reverse_kl", "top_k": 8}}
FULL = {"name": "on_policy_distill", "loss": {"name": "jsd"}}


def run_of(algorithm: dict[str, Any], **actor: Any) -> Config:
    tree = {"algorithm": algorithm, "rollout": {"n": 2}, "actor": actor}
    return load(tree)


def sized_run(algorithm: dict[str, Any], tokens: int, checkpointing: bool, r: int | None) -> Config:
    return run_of(
        algorithm,
        max_tokens_per_micro_batch=tokens,
        gradient_checkpointing=checkpointing,
        loss_chunk=128,
        lora={"r": r},
    )


def estimate(model: PretrainedConfig, run: Config, tokens: int, k: int | None, sharded: bool = False) -> float:
    training = Training(run, 1, 4, sharded=sharded)
    micro = MicroBatchSize(tokens, tokens * RESPONSE // LENGTH, k or 0, alone=tokens == N * LENGTH)
    return sum(peak_items(shape_of(model.to_dict()), training, micro).values())


@pytest.mark.parametrize(
    ("name", "algorithm", "k", "r", "checkpointing", "tokens"),
    [
        ("llama", GRPO, None, None, False, 2 * LENGTH),
        ("llama", FULL, DEEP["vocab_size"], None, True, N * LENGTH),
        ("qwen2 tied", TOP_K, 8, None, False, 2 * LENGTH),
        ("qwen2 tied", TOP_K, 8, None, True, N * LENGTH),
        ("qwen2 tied", GRPO, None, 8, False, N * LENGTH),
        ("qwen2 tied", GRPO, None, 8, True, 2 * LENGTH),
        ("qwen3", GRPO, None, None, True, N * LENGTH),
        ("gpt2", GRPO, None, None, False, 2 * LENGTH),
    ],
)
def test_estimate_is_near_the_measured_peak(
    name: str, algorithm: dict[str, Any], k: int | None, r: int | None, checkpointing: bool, tokens: int
) -> None:
    run = sized_run(algorithm, tokens, checkpointing, r)
    model = MODELS[name]
    measured = peak_of_update(student_of(model, run), run, samples([LENGTH] * N, RESPONSE, model.vocab_size, k))
    assert estimate(model, run, tokens, k) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("algorithm", "k"),
    [
        (GRPO, None),
        (TOP_K, 8),
        (TOP_K | {"reward_weight": 0.5}, 8),
        (TOP_K | {"loss": {"name": "reverse_kl", "top_k": 8, "tail": False}, "reward_weight": 0.5}, 8),
    ],
)
@pytest.mark.parametrize("how", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.05}])
def test_tokens_that_are_left_out_are_counted(how: dict[str, Any], algorithm: dict[str, Any], k: int | None) -> None:
    """Of a chunk's logits [64, 8192], which are one block; here beside a head of hardly any numbers."""
    chunk, vocabulary, tensors = 64, 8192, TensorBytes()
    run = load({"algorithm": algorithm, "rollout": {"n": 2, **how}})
    micro = collate(samples([chunk + 8], chunk, vocabulary, k), k, [1 / chunk], [1.0])
    head, hidden = torch.nn.Linear(2, vocabulary, bias=False), torch.randn(chunk, 2, requires_grad=True)
    with tensors:
        loss, _ = objective(micro, run.algorithm, run.rollout, chunk)(hidden, head)
        loss.backward()
    # Beside floats there is a mask of bytes: a quarter of a copy.
    planned = logit_bytes(run, vocabulary, chunk, 4)
    assert tensors.peak == pytest.approx(planned, rel=0.08)


@pytest.mark.parametrize(("name", "k"), [("sampled_reverse_kl", 0), ("forward_kl", 8192), ("jsd", 8192), ("jsd", 8)])
def test_the_copies_of_a_block_are_counted(name: str, k: int) -> None:
    """Of a chunk of two blocks of logits, [128, 8192] each."""
    chunk, vocabulary, tensors = 256, 8192, TensorBytes()
    top_k = k if 0 < k < vocabulary else None
    run = load({"algorithm": {"name": "on_policy_distill", "loss": {"name": name, "top_k": top_k}}})
    micro = collate(samples([chunk + 8], chunk, vocabulary, k), k, [1 / chunk], [1.0])
    head, hidden = torch.nn.Linear(2, vocabulary, bias=False), torch.randn(chunk, 2, requires_grad=True)
    target_bytes = 0 if micro.targets is None else micro.targets.ids.nbytes + micro.targets.logprobs.nbytes
    with tensors:
        loss, _ = objective(micro, run.algorithm, run.rollout, chunk)(hidden, head)
        loss.backward()
    assert tensors.peak - target_bytes == pytest.approx(logit_bytes(run, vocabulary, chunk, 4), rel=0.08)


def test_a_nucleus_takes_a_gigabyte_of_a_gpu() -> None:
    """Six more copies of a block."""
    overrides = ("+recipe=grpo", "model.size=1.5b", "actor.loss_chunk=1024", "plan.gpu_type=h200")
    plain, nucleus = (memory_of(layout_of(*overrides, f"rollout.top_p={p}"), "actor").items for p in (1, 0.9))
    assert nucleus["logits"] - plain["logits"] == pytest.approx(6 * BLOCK_GPU * 4, rel=0.01)


@pytest.mark.parametrize("tied", [False, True])
def test_a_single_micro_batch_may_need_most_when_most_gradients_are_there(tied: bool) -> None:
    """As few activations are kept, and many layers have gradients by then."""
    model = LlamaConfig(**(DEEP | {"num_hidden_layers": 16}), tie_word_embeddings=tied)
    run = run_of(GRPO, max_tokens_per_micro_batch=N * LENGTH, gradient_checkpointing=True, loss_chunk=64)
    measured = peak_of_update(student_of(model, run), run, samples([LENGTH] * N, RESPONSE, model.vocab_size, None))
    assert estimate(model, run, N * LENGTH, None) == pytest.approx(measured, rel=0.05)


def test_sequences_of_unequal_length_cost_little_more() -> None:
    """They are padded inside the attention alone."""
    lengths = [128, 120, 112, 100, 128, 120, 112, 100]
    run, model = run_of(GRPO, max_tokens_per_micro_batch=sum(lengths) // 2, loss_chunk=128), MODELS["llama"]
    measured = peak_of_update(student_of(model, run), run, samples(lengths, RESPONSE, model.vocab_size, None))
    training = Training(run, 1, 4, sharded=False)
    micro = MicroBatchSize(sum(lengths) // 2, RESPONSE * len(lengths) // 2)
    assert sum(peak_items(shape_of(model.to_dict()), training, micro).values()) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2 tied"])
def test_samples_with_a_prompt_in_common_keep_keys_beside_their_tokens(name: str, checkpointing: bool) -> None:
    """On a CPU also queries and results, as rows of the attention; of one layer at a time with checkpointing."""
    n, response = 4, 64
    tokens = LENGTH + (n - 1) * response
    run, model = sized_run(GRPO, tokens, checkpointing, None), MODELS[name]
    measured = peak_of_update(student_of(model, run), run, samples([LENGTH] * n, response, model.vocab_size, None, n))
    micro = MicroBatchSize(tokens, n * response, 0, alone=True, more_keys=n * LENGTH - tokens)
    planned, without = (
        sum(peak_items(shape_of(model.to_dict()), Training(run, 1, 4, sharded=False), its).values())
        for its in (micro, replace(micro, more_keys=0))
    )
    assert planned == pytest.approx(measured, rel=0.15)
    assert abs(planned - measured) < abs(without - measured) or checkpointing, (planned, without, measured)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "r", "checkpointing"), [("llama", None, True), ("qwen2 tied", None, False), ("qwen2 tied", 8, True)]
)
def test_the_same_under_fsdp(mesh: DeviceMesh, name: str, r: int | None, checkpointing: bool) -> None:
    tokens = 2 * LENGTH
    run = sized_run(GRPO, tokens, checkpointing, r)
    model = MODELS[name]
    student = student_of(model, run)
    shard(student, mesh, torch.float32)
    scored = samples([LENGTH] * N, RESPONSE, model.vocab_size, None)
    measured = peak_of_update(student, run, scored, resizing=True)
    assert estimate(model, run, tokens, None, sharded=True) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("name", "r", "checkpointing", "tokens"),
    [
        ("llama", None, False, 2 * LENGTH),
        ("qwen3", None, True, N * LENGTH),
        ("qwen2 tied", None, True, 2 * LENGTH),
        ("qwen2 tied", 8, False, N * LENGTH),
    ],
)
def test_the_same_with_copies_in_bfloat16(name: str, r: int | None, checkpointing: bool, tokens: int) -> None:
    """Of a rank that holds all of the student, and all that is under an adapter in float32, as on a CPU."""
    run = sized_run(GRPO, tokens, checkpointing, r)
    model = MODELS[name]
    student = student_of(model, run)
    student.copies = ComputeCopies(student, torch.bfloat16)
    measured = peak_of_update(student, run, samples([LENGTH] * N, RESPONSE, model.vocab_size, None))
    micro = MicroBatchSize(tokens, tokens * RESPONSE // LENGTH, 0, alone=tokens == N * LENGTH)
    planned = peak_items(shape_of(model.to_dict()), Training(run, 1, 2, sharded=False), micro)
    assert planned["gathered weights"] == 2 * student.copies.n_numbers
    assert sum(planned.values()) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("targets", ["all-linear", None])
def test_adapters_are_counted_exactly(name: str, targets: str | None) -> None:
    some = ["c_proj"] if name == "gpt2" else ["q_proj", "down_proj"]
    run = run_of(GRPO, lora={"r": 3, "target_modules": targets or some})
    student = student_of(MODELS[name], run)
    counted = sum(count * w.size for count, w in adapter_weights(shape_of(MODELS[name].to_dict()), run.actor.lora))
    trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
    assert counted == trained
    saved = checkpoint_bytes(shape_of(MODELS[name].to_dict()), Training(run, 1, 2, on_cpu=False))
    assert saved == 3 * 4 * trained  # they and both of their moments, in float32


def test_what_autograd_saves_is_counted_to_a_percent() -> None:
    """The formula itself, not only the peak that it is a part of: storages saved in one forward pass."""
    model, run = MODELS["qwen3"], run_of(GRPO)
    student = student_of(model, run)
    own = {p.untyped_storage()._cdata for p in student.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage
        return tensor

    scored = samples([LENGTH] * N, RESPONSE, model.vocab_size, None)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        student.compute_hidden(collate(scored, None, [0.0] * N, [0.0] * N))
    shape = shape_of(model.to_dict())
    kept = saved_activations(shape, 4)
    expected = N * LENGTH * (kept.layers[0] * shape.n_layers + kept.outside)
    assert sum(storage.nbytes() for storage in storages.values()) == pytest.approx(expected, rel=0.01)


def test_qwen_of_one_and_a_half_billion_by_hand() -> None:
    """In float32: 6.2 GB of weights, as much of gradients, twice that of AdamW; a fourth of it on four ranks."""
    shape = shape_of(
        {
            "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
            "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
        }
    )  # fmt: skip
    run, micro = run_of(GRPO, gradient_checkpointing=True, loss_chunk=1024), MicroBatchSize(2048, 1024)
    for world, share in ((1, 1.0), (4, 0.25)):
        items = peak_items(shape, Training(run, world, 2), micro)
        assert items["weights"] / 1e9 == pytest.approx(6.17 * share, rel=0.01)
        assert items["gradients"] / 1e9 == pytest.approx(6.17 * share, rel=0.01)
        assert items["optimizer state"] / 1e9 == pytest.approx(12.35 * share, rel=0.01)
        # 28 layers' inputs in bfloat16, of one layer everything: between one and two GB, as is known of such a model.
        # A layer a token: 2 norms (4 + 2 bytes) and 2 inputs of 1536, 12 + 12 + 2 + 2 heads of 128, 4 of 8960 numbers.
        layer = 2 * 6 * 1536 + 8 + 2 * 2 * 1536 + 2 * 2 * 1536 + 2 * 2 * 256 + 4 * 12 + 2 * 4 * 8960
        assert saved_activations(shape, 2).layers[0] == layer
