"""Memory of groups on the same GPUs, of reward models, offloaded and 4-bit actors."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from gkd.config import Lora
from gkd.config.device import EngineLoad
from gkd.data.model_info import ModelInfo
from gkd.errors import ConfigError
from gkd.inference.classifier import Classifier
from gkd.inference.engine import EngineSpec
from gkd.inference.requests import ScoreRequest
from gkd.inference.torch_scorer import TorchScorer
from gkd.planning.advice.advise import advise
from gkd.planning.layout import cpu_hardware
from gkd.planning.memory.actor import adapter_weights
from gkd.planning.memory.colocation import all_memory, memory_of, needs_offload, with_micro_batch
from gkd.planning.memory.pools import GroupMemory
from tests.planning.layouts import layout_of
from tests.planning.tensor_bytes import TensorBytes

GRPO = ("+recipe=grpo", "model.size=1.5b", "plan.gpu_type=h100-80gb")


def planned(*overrides: str, on_cpu: bool = False) -> dict[str, GroupMemory]:
    return {group.group: group for group in all_memory(layout_of(*GRPO, *overrides, on_cpu=on_cpu))}


def test_a_group_has_what_those_on_its_gpu_leave() -> None:
    alone, shared = planned(), planned("rollout.colocate_with=actor", "rollout.gpu_memory_utilization=0.3")
    assert alone["actor"].available == alone["rollout"].available
    whole = layout_of(*GRPO).hardware.memory
    assert shared["actor"].available == pytest.approx(whole - shared["rollout"].total)
    assert shared["rollout"].available == pytest.approx(whole - shared["actor"].total)
    assert shared["actor"].margin == pytest.approx(shared["rollout"].margin)  # they fit together or not


def test_what_is_in_the_hosts_memory_is_not_on_the_gpu() -> None:
    here = planned()["actor"]
    moved = [here.items[name] for name in ("weights", "gradients", "optimizer state")]
    moments, all_of_it = (planned(f"actor.{its}=true")["actor"] for its in ("offload_optimizer", "offload_weights"))
    assert moments.host == moved[2] and all_of_it.host == sum(moved)
    assert [moments.items[name] for name in ("weights", "gradients")] == moved[:2]
    assert not {"gradients", "optimizer state"} & all_of_it.items.keys()
    assert here.total - moments.total > 0.5 * moved[2]
    assert moments.total - all_of_it.total > 0.5 * sum(moved[:2])


def test_weights_under_adapters_are_bfloat16_and_four_bit_ones_a_quarter_of_that() -> None:
    plain, packed = planned("actor.lora.r=8")["actor"], planned("actor.lora.r=8", "actor.lora.quantize=nf4")["actor"]
    shape = layout_of(*GRPO).models.student
    linear = sum(kind.count * w.size for kind in shape.layers for w in kind.weights if w.linear)
    assert plain.items["weights"] - packed.items["weights"] == pytest.approx((2 - 0.516) * linear, rel=1e-3)
    trained = planned()["actor"].items["weights"]  # in float32, adapters or not
    adapters = sum(count * w.size for count, w in adapter_weights(shape, Lora(r=8)))
    assert plain.items["weights"] == pytest.approx(trained / 2 + 4 * adapters, rel=1e-3)


@pytest.mark.parametrize(("width", "layers", "kv_heads", "n", "length"), [(128, 2, 4, 16, 256), (768, 4, 2, 4, 128)])
def test_a_reward_model_is_near_the_measured_peak(
    width: int, layers: int, kv_heads: int, n: int, length: int, tmp_path: Path
) -> None:
    model = LlamaForSequenceClassification(LlamaConfig(
        hidden_size=128, intermediate_size=width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=kv_heads, vocab_size=500, num_labels=1,
    ))  # fmt: skip
    model.save_pretrained(tmp_path)
    settings = ("reward.functions=[reward_model]", f"reward_model.model.path={tmp_path}",
             f"reward_model.max_num_seqs={n}", f"reward_model.max_model_len={length}")  # fmt: skip
    numbers = sum(p.numel() for name, p in model.named_parameters() if "score" not in name)
    assert planned(*settings)["reward_model"].items["weights"] == 2 * numbers  # bfloat16
    items = planned(*settings, on_cpu=True)["reward_model"].items
    info = ModelInfo.read(str(tmp_path), "reward_model.model.path")
    own = layout_of(*GRPO, *settings).config.reward_model
    engine = Classifier(EngineSpec("reward_model", str(tmp_path), info, own, "cpu", "float32"))
    with TensorBytes() as measured:
        measured.count(engine.model.parameters())
        engine.rate([np.full(length, 1 + i, np.int32) for i in range(n)])
    assert items["weights"] + items["activations"] == pytest.approx(measured.peak, rel=0.15)


class OwnRater(Classifier):
    """What rates in a run of one's own, and states what it takes."""

    @classmethod
    def memory(cls, load: EngineLoad) -> dict[str, float]:
        return {"tables": 1e9 + load.n_sequences * load.longest}


def test_an_engine_of_ones_own_that_rates_is_counted_as_it_states(tmp_path: Path) -> None:
    LlamaConfig(hidden_size=128, num_attention_heads=4, vocab_size=500, num_labels=1).save_pretrained(tmp_path)
    own = ("reward.functions=[reward_model]", f"reward_model.model.path={tmp_path}", "reward_model.max_num_seqs=3",
           "reward_model.max_model_len=50", f"reward_model.engine={__name__}:OwnRater")  # fmt: skip
    items = planned(*own)["reward_model"].items
    assert items["tables"] == 1e9 + 3 * 50 and "weights" not in items


@pytest.mark.parametrize(("width", "layers", "vocabulary", "k"), [(128, 2, 4000, 64), (768, 4, 500, 500)])
def test_a_teacher_in_torch_is_near_the_measured_peak(
    width: int, layers: int, vocabulary: int, k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that waits in one pass, half of each sequence a response."""
    monkeypatch.setattr("gkd.modeling.linear.pack_linear_layers", lambda lm: None)  # of another layout, not counted
    n, length = 16, 128
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=128, intermediate_size=width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=vocabulary,
    ))  # fmt: skip
    model.save_pretrained(tmp_path)
    settings = ("+recipe=on_policy_distill", "model.size=0.5b", f"teacher.model.path={tmp_path}",
        "teacher.engine=torch", f"teacher.max_num_seqs={n}", f"algorithm.loss.top_k={k}", f"data.val_top_k={k}",
        "data.max_prompt_length=64", "rollout.max_response_length=64")  # fmt: skip
    layout = layout_of(*settings, on_cpu=True)
    items = memory_of(layout, "teacher").items
    info = ModelInfo.read(str(tmp_path), "teacher.model.path")
    engine = TorchScorer(EngineSpec("teacher", str(tmp_path), info, layout.config.teacher, "cpu", "float32"))
    with TensorBytes() as measured:
        measured.count(engine.model.parameters())
        for i in range(n):
            engine.add(i, ScoreRequest(np.full(length, 1 + i, np.int32), ((length // 2, length),), k))
        answers = list(engine.step())
    assert len(answers) == n
    weights = sum(p.nbytes for p in model.parameters())
    assert items["weights"] == weights
    planned_bytes = items["activations"] + items["results"]
    assert 1.0 <= planned_bytes / (measured.peak - weights) <= 1.8  # at a temperature there is a second copy


ONE_GPU = ("placement=single_gpu", "rollout.gpu_memory_utilization=0.5")


def test_groups_on_one_gpu_are_offloaded_where_they_do_not_fit_side_by_side() -> None:
    side_by_side, offloaded = (planned(*ONE_GPU, f"cluster.offload={v}") for v in ("false", "true"))
    assert not side_by_side["actor"].fits
    assert offloaded["actor"].fits
    assert offloaded["rollout"].fits
    assert planned(*ONE_GPU) == offloaded  # auto
    whole = layout_of(*GRPO).hardware.memory
    assert offloaded["actor"].available == whole - offloaded["rollout"].items["context, CUDA graphs"]
    assert offloaded["rollout"].available == whole - offloaded["actor"].items["context, collectives"]
    smaller = (*ONE_GPU, "model.size=0.5b", "actor.max_tokens_per_micro_batch=2048")
    assert planned(*smaller) == planned(*smaller, "cluster.offload=false")  # not where they do


def test_weight_sync_is_planned_where_it_is_the_worst_moment() -> None:
    """Sharded over many ranks the actor is small, and an engine's weights are whole."""
    eight = ("trainer.n_gpus_per_node=8", "rollout.n_gpus_per_node=8", "rollout.colocate_with=actor", "model.size=14b",
             "rollout.gpu_memory_utilization=0.8", "actor.max_tokens_per_micro_batch=1280", "cluster.offload=true",
             "actor.gradient_checkpointing=true", "actor.loss_chunk=128")  # fmt: skip
    actor, rollout = (planned(*eight)[name] for name in ("actor", "rollout"))
    assert actor.items["engine's weights"] > rollout.items["weights"]
    assert "gradients" not in actor.items
    assert actor.total > sum(actor.items[name] for name in ("weights", "optimizer state")) + rollout.items["weights"]


def test_offloading_is_advised_where_it_is_ruled_out() -> None:
    advice = list(advise(layout_of(*GRPO, *ONE_GPU, "cluster.offload=false"), "actor"))
    assert "cluster.offload=true" in advice[0].overrides()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("placement=8gpu", "cluster.offload=true: .*colocate_with"),
        ("actor.lora={r: 8, quantize: nf4}", "cluster.offload=true: actor.lora.quantize=nf4"),
    ],
)
def test_offloading_that_is_impossible(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(*ONE_GPU[:1], override, "cluster.offload=true")


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        (("model.size=0.5b",), 16384),
        (("model.size=0.5b", "plan.gpu_type=rtx-4090"), None),  # no room
        (("model.size=7b", "trainer.n_gpus_per_node=4"), None),
        (("model.size=7b", "trainer.n_gpus_per_node=4", "actor.gradient_checkpointing=true"), 16384),
        (("model.size=0.5b", "actor.max_tokens_per_micro_batch=300"), 300),
        (("model.size=0.5b", "rollout.colocate_with=actor", "rollout.gpu_memory_utilization=0.65"), None),
    ],
)
def test_a_gpu_with_room_has_larger_micro_batches(overrides: tuple[str, ...], tokens: int | None) -> None:
    """A fifth is left free with them, and nothing is offloaded for them."""
    layout = layout_of("+recipe=grpo", "plan.gpu_type=h100-80gb", *overrides)
    decided = with_micro_batch(layout)
    assert decided.actor.max_tokens_per_micro_batch == tokens
    assert decided.actor.micro_batch_tokens == tokens or (tokens is None and decided.actor.micro_batch_tokens == 8192)
    then = dataclasses.replace(layout, config=decided)
    if tokens == 16384:
        memory = memory_of(then, "actor")
        assert memory.margin >= 0.2 * memory.available
    assert needs_offload(then) == needs_offload(layout)
    on_cpu = dataclasses.replace(layout, hardware=cpu_hardware(layout.config.plan))
    assert with_micro_batch(on_cpu) is layout.config


def test_room_is_also_for_copies_and_for_larger_blocks_of_the_loss() -> None:
    tight, roomy = (planned("model.size=0.5b", f"actor.max_tokens_per_micro_batch={n}")["actor"] for n in (8192, 8193))
    shape = layout_of(*GRPO, "model.size=0.5b").models.student
    assert roomy.items["gathered weights"] == 2 * shape.n_parameters
    assert tight.items["gathered weights"] < roomy.items["gathered weights"]
    assert roomy.items["logits"] > 2 * tight.items["logits"]
