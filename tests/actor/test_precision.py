"""A student that computes in bfloat16, beside transformers' model of that type: what that keeps in float32 stays so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedModel,
    XGLMConfig,
    XGLMForCausalLM,
)

from gkd.actor.collate import collate
from gkd.actor.loading import load, load_sharded
from gkd.actor.model import shard
from gkd.config import Lora
from tests.actor.test_families import logprobs, samples
from tests.families import SHAPE, make

ROUTERS = {"ernie4_5_moe": ".gate.weight", "hunyuan_moe": ".gate.wg.weight"}
BUFFERS: dict[str, Callable[[], PreTrainedModel]] = {
    "xglm": lambda: XGLMForCausalLM(XGLMConfig(vocab_size=96, d_model=64, ffn_dim=96, num_layers=2, attention_heads=2)),
    "openai-gpt": lambda: OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=96, n_embd=64, n_layer=2, n_head=2)),
    "minimax": lambda: MiniMaxForCausalLM(
        MiniMaxConfig(**SHAPE, head_dim=32, num_local_experts=4, block_size=8, num_experts_per_tok=2)
    ),
}
"""Of families whose masks and tables are buffers."""


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def with_close_experts(family: str, path: Path) -> None:
    """Write a model whose experts only float32 can tell apart: their rows of the router are one in bfloat16."""
    model = make(family, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(ROUTERS[family]):
                first = torch.randn(parameter.shape[1]).bfloat16().float()
                parameter.copy_(first * (1 + 2.0**-12 * torch.arange(len(parameter))[:, None]))
            elif "moe_statics" in name:
                parameter.zero_()
    model.save_pretrained(path)


@torch.no_grad()
def students_logprobs(path: Path, mesh: DeviceMesh, sharded: bool) -> Tensor:
    """Of all samples in one micro-batch, [N, V]."""
    if sharded:
        student = load(path, dtype=torch.bfloat16)
        shard(student, mesh, torch.bfloat16)
    else:
        student = load_sharded(str(path), mesh, torch.device("cpu"), torch.bfloat16)
    micro = collate(samples(), None, [1.0] * 5, [0.0] * 5)
    with student.use_compute_type():
        return student(micro, lambda hidden, head: head(hidden).log_softmax(-1)).float()


def transformers_logprobs(path: Path, attention: str) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation=attention)
    return torch.cat([logprobs(model, scored) for scored in samples()]).float()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("family", ROUTERS)
def test_experts_are_chosen_in_float32(family: str, sharded: bool, mesh: DeviceMesh, tmp_path: Path) -> None:
    with_close_experts(family, tmp_path)
    own, its = students_logprobs(tmp_path, mesh, sharded), transformers_logprobs(tmp_path, "sdpa")
    assert (own - its).abs().mean() < 0.01


@pytest.mark.parametrize("lora", [None, Lora(r=2, target_modules=["o_proj"])])
@pytest.mark.parametrize("family", ROUTERS)
def test_routers_are_sent_in_float32(family: str, lora: Lora | None, tmp_path: Path) -> None:
    """vLLM's ERNIE has its own in float32."""
    with_close_experts(family, tmp_path)
    student = load(tmp_path, lora=lora, dtype=torch.bfloat16)
    files, sent = load_file(tmp_path / "model.safetensors"), dict(student.file_tensors(torch.bfloat16))
    exact = {name for name, value in sent.items() if value.dtype == torch.float32}
    assert {name for name in files if name.endswith(ROUTERS[family])} <= exact
    assert all("gate" in name or "moe_statics" in name for name in exact)
    assert all(torch.equal(sent[name], files[name]) for name in exact)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("family", BUFFERS)
def test_masks_and_tables_are_of_the_type_that_is_computed_with(
    family: str, sharded: bool, mesh: DeviceMesh, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    BUFFERS[family]().save_pretrained(tmp_path)
    assert torch.equal(students_logprobs(tmp_path, mesh, sharded), transformers_logprobs(tmp_path, "eager"))
