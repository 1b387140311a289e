"""What becomes of a student with actor.liger=true, as far as a machine without a GPU shows it."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

from gkd.actor.compiling import use_liger
from gkd.config.compose import compose
from gkd.errors import ConfigError
from tests.actor import models

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def student() -> PreTrainedModel:
    return models.make("llama")


def test_liger_is_refused_on_a_cpu_and_where_it_is_missing(
    student: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"^actor\.liger=true: .*\bCPU$"):
        use_liger(student, CPU)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match=r"^actor.liger=true needs liger-kernel: pip install 'gkd\[liger\]' \("):
        use_liger(student, CUDA)


def test_compiled_layers_are_not_also_ligers() -> None:
    with pytest.raises(ConfigError, match=r"actor.*liger=true and compile=true"):
        compose(["actor.liger=true", "actor.compile=true"])
    assert compose(["actor.liger=true"]).actor.liger


def test_layers_are_ligers_and_the_head_is_not(student: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liger_kernel")
    for name, value in list(vars(modeling_llama).items()):  # Liger changes some for the process: put back afterwards
        monkeypatch.setattr(modeling_llama, name, value)
    forward, cross_entropy = student.forward, torch.nn.functional.cross_entropy
    rope = modeling_llama.apply_rotary_pos_emb
    use_liger(student, CUDA)
    layer = student.model.layers[0]
    for module in (student.model.norm, layer.input_layernorm, layer.mlp):
        assert "liger" in module.forward.__func__.__module__
    assert modeling_llama.apply_rotary_pos_emb is not rope
    assert student.forward == forward
    assert torch.nn.functional.cross_entropy is cross_entropy


def test_a_family_that_liger_does_not_know_is_named() -> None:
    pytest.importorskip("liger_kernel")
    mamba = MambaForCausalLM(MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=8))
    with pytest.raises(ConfigError, match=r"^actor\.liger=true: .*\bmamba"):
        use_liger(mamba, CUDA)
