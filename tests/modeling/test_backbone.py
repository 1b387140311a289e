"""Families that are not computed as transformers does are refused as they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    CpmAntConfig,
    CpmAntForCausalLM,
    PreTrainedModel,
    ProphetNetConfig,
    ProphetNetForCausalLM,
)

from gkd.actor.loading import load
from gkd.config import Teacher
from gkd.data.model_info import ModelInfo
from gkd.errors import ConfigError
from gkd.inference.engine import EngineSpec
from gkd.inference.torch_scorer import TorchScorer
from gkd.modeling.backbone import pack_or_pad

INFO = ModelInfo(vocabulary=40, positions=64, eos_ids=[1], n_tokens=40)


SIZES = {"hidden_size": 32, "vocab_size": 40}
BELOW = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
FAMILIES = {
    # Padded on the left; seeing later tokens; with a decoder that cannot be left out.
    "cpmant": lambda: CpmAntForCausalLM(CpmAntConfig(**SIZES, **BELOW, dim_head=16, prompt_length=4, prompt_types=4)),
    "bert": lambda: BertLMHeadModel(BertConfig(**SIZES, **BELOW, is_decoder=False)),
    "prophetnet": lambda: ProphetNetForCausalLM(
        ProphetNetConfig(**SIZES, num_decoder_layers=1, num_decoder_attention_heads=2, decoder_ffn_dim=48)
    ),
}


def make(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = FAMILIES[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_is_not_computed_as_transformers_does_is_refused(family: str, tmp_path: Path) -> None:
    make(family).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"^model\.path=.*\b{family}\b"):
        load(tmp_path)
    spec = EngineSpec("teacher", str(tmp_path), INFO, Teacher(engine="torch"), "cpu", "float32")
    with pytest.raises(ConfigError, match=rf"^teacher\.model\.path=.*\b{family}\b"):
        TorchScorer(spec)


def test_a_family_that_only_a_gpu_computes_is_not_refused_for_what_a_cpu_cannot(tmp_path: Path) -> None:
    """Kernels of some are there for GPUs alone, and the student is on the CPU as it is read."""
    model = make("prophetnet")
    pack_or_pad(model, "model.path", torch.device("cuda"))
    model = make("cpmant")
    with pytest.raises(ConfigError, match="cpmant"):
        pack_or_pad(model, "model.path", torch.device("cuda"))
