"""Adapters: what is trained, what reaches the engines, what is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftConfig
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import gkd.actor.lora
from gkd.actor.loading import load
from gkd.actor.lora import add_adapter, disable_adapter, is_adapter, require_adaptable, save_adapter
from gkd.actor.model import Student
from gkd.actor.quantize import find_quantized_layers
from gkd.config import Algorithm, Lora, Rollout
from gkd.errors import ConfigError
from gkd.losses.objective import objective
from tests.actor import models
from tests.families import make as make_family
from tests.losses.test_micro_batch import micro_batch

FAMILIES = ["llama", "qwen2 tied", "gpt2", "qwen3 moe"]


def base(family: str) -> PreTrainedModel:
    if family in models.FAMILIES:
        return models.make(family)
    torch.manual_seed(0)
    if family == "qwen3 moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**models.SHAPE, **experts))
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": models.VOCAB, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def trained(path: Path, **lora: object) -> Student:
    """A student with an adapter that is not 0 any more."""
    student = load(path, lora=Lora(r=4, **lora))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in student.lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return student


@pytest.mark.parametrize(
    ("family", "shape", "mixer"),
    [
        ("falcon_h1", {"num_hidden_layers": 2}, ["in_proj"]),
        ("bamba", {"num_hidden_layers": 2, "attn_layer_indices": [1]}, ["in_proj"]),
        ("mamba", {"num_hidden_layers": 2}, ["in_proj"]),
        ("qwen3_next", {"num_hidden_layers": 2}, ["in_proj_ba", "in_proj_qkvz", "out_proj"]),  # which calls it
    ],
)
def test_all_linear_layers_are_those_that_are_called(family: str, shape: dict[str, object], mixer: list[str]) -> None:
    """Kernels of Mamba's mixers multiply by the weights of the others, without an adapter."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**shape))
        add_adapter(lm, Lora(r=4))
    adapted = {name.partition(".lora_")[0] for name, _ in lm.named_parameters() if is_adapter(name)}
    modules = dict(lm.named_modules())
    mixers = {name for name in modules if hasattr(modules[name], "A_log")}
    assert sorted({name.rpartition(".")[2] for name in adapted if name.rpartition(".")[0] in mixers}) == mixer
    assert family == "mamba" or any("mlp" in name or "feed_forward" in name for name in adapted)


def test_layers_are_found_where_the_head_is_called_the_decoder(tmp_path: Path) -> None:
    """transformers takes that of ModernBERT's causal models for what is below the head."""
    torch.manual_seed(0)
    shape = models.SHAPE | {"cls_token_id": 0, "sep_token_id": 0, "layer_types": ["full_attention"] * 2}
    plain = ModernBertDecoderForCausalLM(ModernBertDecoderConfig(**shape))
    plain.save_pretrained(tmp_path)
    student = trained(tmp_path)
    adapted = {name.partition(".lora_")[0] for name, _ in student.adapter_tensors()}
    assert {name.rpartition(".")[2] for name in adapted} == {"q_proj", "k_proj", "v_proj", "Wi", "Wo"}
    plain.load_state_dict(dict(student.gather_full_tensors(torch.float32)), strict=False)
    torch.testing.assert_close(logits(plain), logits(student), rtol=1e-4, atol=1e-5)


def logits(model: torch.nn.Module) -> torch.Tensor:
    """Of one sequence, by a Hugging Face model or by the student's own way."""
    micro = micro_batch(models.scored(1))
    with torch.no_grad():
        if isinstance(model, Student):
            return model.head(model.compute_hidden(micro))
        return model.eval()(micro.sequences.token_ids[None], use_cache=False).logits[0].float()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_leaves_the_actor_is_the_model_with_its_adapter(family: str, tmp_path: Path) -> None:
    base(family).save_pretrained(tmp_path)
    student, plain = trained(tmp_path), base(family)
    expected = plain.state_dict()
    tensors = dict(student.gather_full_tensors(torch.float32))
    assert tensors.keys() <= expected.keys()
    assert {k for k in expected if k not in tensors} <= {"lm_head.weight"}  # tied
    plain.load_state_dict(tensors, strict=False)
    plain.tie_weights()
    with_adapter = logits(student)
    torch.testing.assert_close(logits(plain), with_adapter, rtol=1e-4, atol=1e-5)
    with disable_adapter(student.lm):
        torch.testing.assert_close(logits(student), logits(base(family)))
    assert not torch.allclose(with_adapter, logits(base(family)), atol=1e-2)
    torch.testing.assert_close(logits(student), with_adapter)


def test_four_bit_weights_leave_the_actor_as_what_they_stand_for(tmp_path: Path) -> None:
    base("qwen2 tied").save_pretrained(tmp_path)
    student, plain = trained(tmp_path, quantize="nf4", target_modules=["q_proj", "down_proj"]), base("qwen2 tied")
    packed = find_quantized_layers(student)
    assert len(packed) == 14  # adapted or not, all but the head
    assert all(layer.weight.dtype == torch.uint8 for layer in packed.values())
    tensors = dict(student.gather_full_tensors(torch.float32))
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    assert {k: v.shape for k, v in tensors.items()} == {k: v.shape for k, v in expected.items() if k in tensors}
    assert expected.keys() - tensors.keys() <= {"lm_head.weight"}
    plain.load_state_dict(tensors, strict=False)
    plain.tie_weights()
    torch.testing.assert_close(logits(plain), logits(student), rtol=1e-4, atol=1e-4)
    gate = "model.layers.0.mlp.gate_proj.weight"
    apart = (tensors[gate] - expected[gate]).abs().mean() / expected[gate].abs().mean()
    assert 0.01 < apart < 0.2  # it was rounded, and to what is near
    micro = micro_batch(models.scored(3))
    student(micro, objective(micro, Algorithm(), Rollout(n=2), 100))[0].backward()
    assert all(".lora_" in name for name, p in student.lm.named_parameters() if p.grad is not None)


def test_four_bits_of_layers_that_lie_transposed_are_refused(tmp_path: Path) -> None:
    """GPT-2's: bitsandbytes packs them turned, and what they stand for would leave the actor so."""
    base("gpt2").save_pretrained(tmp_path)
    require_adaptable(str(tmp_path), Lora(r=4))
    with pytest.raises(ConfigError, match=r"^actor\.lora\.quantize=nf4: .*\bgpt2\b.*Conv1D"):
        require_adaptable(str(tmp_path), Lora(r=4, quantize="nf4"))


def test_only_the_adapter_is_trained(tmp_path: Path) -> None:
    base("llama").save_pretrained(tmp_path)
    student, micro = trained(tmp_path, target_modules=["q_proj", "v_proj"]), micro_batch(models.scored(3))
    value, _ = student(micro, objective(micro, Algorithm(), Rollout(n=2), 100))
    value.backward()
    with_gradient = {name for name, p in student.lm.named_parameters() if p.grad is not None}
    assert with_gradient
    assert all(".lora_" in name and ("q_proj" in name or "v_proj" in name) for name in with_gradient)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["nothing"], r"target_modules=\['nothing'\]: .*nothing"),
        (["embed_tokens"], r"embed_tokens .*linear layer"),
        (["q_proj", "v_porj"], r"target_modules=.*: .*v_porj \(.*v_proj\?\)"),  # peft adapts the first, and no word
        (["q_proj", "proj"], r"no layer\b.* proj"),
    ],
)
def test_targets_that_cannot_be_adapted(targets: list[str], message: str, tmp_path: Path) -> None:
    base("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, lora=Lora(r=4, target_modules=targets))


def test_a_model_without_layers_for_adapters_is_named(tmp_path: Path) -> None:
    """Falcon's are of a class of its own."""
    make_family("falcon", 0).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^actor\.lora\.target_modules=all-linear: FalconForCausalLM .*; leave"):
        require_adaptable(str(tmp_path), Lora(r=4))


def test_a_head_is_adapted_where_its_weight_is_its_own(tmp_path: Path) -> None:
    base("llama").save_pretrained(tmp_path / "own")
    student, plain = trained(tmp_path / "own", target_modules=["q_proj", "lm_head"]), base("llama")
    plain.load_state_dict(dict(student.gather_full_tensors(torch.float32)))
    torch.testing.assert_close(logits(plain), logits(student), rtol=1e-4, atol=1e-5)
    base("qwen2 tied").save_pretrained(tmp_path / "tied")
    for check in (require_adaptable, lambda path, lora: load(path, lora=lora)):
        with pytest.raises(ConfigError, match=r"^actor\.lora\.target_modules: lm_head "):
            check(str(tmp_path / "tied"), Lora(r=4, target_modules=["q_proj", "lm_head"]))


@pytest.mark.parametrize("name", ["own/model", "gpt2", None])
def test_an_adapter_names_its_base_as_others_find_it(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name and revision on the hub where it was taken from the hub's cache, whose path is this machine's."""
    monkeypatch.setattr(gkd.actor.lora, "HF_HUB_CACHE", str(tmp_path))
    base, revision = tmp_path / "model", None
    if name is not None:
        revision = "0123456789abcdef0123456789abcdef01234567"
        base = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / revision
    save_adapter({"layer.lora_A.default.weight": torch.ones(2, 3)}, Lora(r=2), str(base), tmp_path / "adapter")
    written = PeftConfig.from_pretrained(tmp_path / "adapter")
    assert (written.base_model_name_or_path, written.revision) == (name or str(base), revision)


def test_weights_that_are_not_all_there(tmp_path: Path) -> None:
    base("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight \(1 tensors"):
        load(tmp_path)


def test_what_is_trained_is_in_float32_beside_weights_that_are_not() -> None:
    lm = base("llama").bfloat16()
    add_adapter(lm, Lora(r=2))
    types = {name: parameter.dtype for name, parameter in lm.named_parameters()}
    assert {kind for name, kind in types.items() if is_adapter(name)} == {torch.float32}
    assert {kind for name, kind in types.items() if not is_adapter(name)} == {torch.bfloat16}
